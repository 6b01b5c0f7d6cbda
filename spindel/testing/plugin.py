"""Fixtures for pytest, there as soon as spindel is installed.

| fixture | gives |
|---|---|
| `memory_store` | a fresh `MemoryStore` |
| `sqlite_store` | a `SqliteStore` over a new file, not yet opened: enter it with `async with` |
| `spindel_clock` | the test's loop clock: it jumps over waits, never past real work; needs pytest-trio to be used |
| `wall_clock` | a `ManualWallClock`; it follows `spindel_clock` if the test uses that, too |

None of them is asynchronous, so they do no harm where pytest-trio isn't installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spindel.store._memory import MemoryStore
from spindel.store._sqlite import SqliteStore
from spindel.testing.clocks import ManualWallClock, autojump_clock

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

__all__ = ["memory_store", "spindel_clock", "sqlite_store", "wall_clock"]

# The suite's own comparisons should be told as those of a test module.
pytest.register_assert_rewrite("spindel.testing.store_contract")


@pytest.fixture
def memory_store() -> MemoryStore:
    """Give a fresh store in memory."""
    return MemoryStore()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> SqliteStore:
    """Give a store over a new file of the test's own folder, not yet opened."""
    return SqliteStore(tmp_path / "spindel.db")


@pytest.fixture
def spindel_clock() -> MockClock:
    """Give the loop clock of the test; pytest-trio runs the test on it."""
    return autojump_clock()


@pytest.fixture
def wall_clock(request: pytest.FixtureRequest) -> ManualWallClock:
    """Give a wall clock that moves when told to, or with the test's loop clock."""
    follows = "spindel_clock" in request.fixturenames
    return ManualWallClock(follows=request.getfixturevalue("spindel_clock") if follows else None)
