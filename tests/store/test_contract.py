"""Every store passes one suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spindel.store._memory import MemoryStore
from spindel.testing.store_contract import StoreContract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spindel.store._contract import Store


class TestStores(StoreContract):
    @pytest.fixture(params=["memory"])
    def reopen(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
        store = MemoryStore()
        return lambda: store
