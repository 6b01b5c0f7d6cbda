"""The suite that every store passes. What a store must do and no test here demands is missing here.

Subclass `StoreContract` in a test module and say how the store is opened::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def reopen(self, tmp_path):
            return lambda: MyStore(tmp_path / "rooms.db")

`reopen` gives a function; each call of it makes a store over the same facts, as a restarted process would. A store
that keeps its facts in the object gives the same object each time.

The tests need pytest-trio; they mark themselves. They use no private name of a store, so what they show is what a
room sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spindel.testing.store_contract._commands import Commands, open_commands, refusal
from spindel.testing.store_contract._evidence import EvidenceContract
from spindel.testing.store_contract._lists import ListsContract
from spindel.testing.store_contract._rooms import RoomsContract
from spindel.testing.store_contract._rows import RowsContract
from spindel.testing.store_contract._writes import WritesContract

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from spindel.store._contract import Store

__all__ = ["Commands", "StoreContract", "open_commands", "refusal"]


class StoreContract(RowsContract, EvidenceContract, WritesContract, RoomsContract, ListsContract):
    """Every promise of a store, each as a test. See the module for how to use it."""

    pytestmark = pytest.mark.trio

    @pytest.fixture
    def reopen(self) -> Callable[[], Store]:
        """Give a function that makes a store over the same facts each time; the subclass says how."""
        raise NotImplementedError("the subclass says how its store is opened")

    @pytest.fixture
    async def store(self, reopen: Callable[[], Store]) -> AsyncGenerator[Store, None]:
        """An open store."""
        async with reopen() as store:
            yield store

    @pytest.fixture
    async def room(self, store: Store) -> AsyncGenerator[Commands, None]:
        """A claimed room of the store."""
        async with open_commands(store) as commands:
            yield commands
