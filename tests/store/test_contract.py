"""Every store passes one suite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from spindel.store._memory import MemoryStore
from spindel.store._postgres import PostgresStore
from spindel.store._sqlite import SqliteStore
from spindel.testing.store_contract import StoreContract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spindel.store._contract import Store


class TestStores(StoreContract):
    """R-02, R-03, R-05, R-06, R-07, R-08, R-09, R-10, R-12, R-58: the suite that ships with the package, over every store of ours."""

    @pytest.fixture(
        params=[
            "memory",
            "sqlite-thread",
            "sqlite-inline",
            pytest.param("postgres-thread", marks=pytest.mark.postgres),
            pytest.param("postgres-inline", marks=pytest.mark.postgres),
        ]
    )
    def reopen(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
        if request.param == "memory":
            store = MemoryStore()
            return lambda: store
        executor: Literal["thread", "inline"] = "thread" if request.param.endswith("thread") else "inline"
        if request.param.startswith("sqlite"):
            return lambda: SqliteStore(tmp_path / "rooms.db", executor=executor)
        dsn: str = request.getfixturevalue("postgres_dsn")
        return lambda: PostgresStore(dsn, executor=executor)
