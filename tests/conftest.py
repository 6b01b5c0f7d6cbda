"""What the whole suite shares: every store, and a way to act after every single step."""

from __future__ import annotations

from importlib.metadata import entry_points
from itertools import count
from typing import TYPE_CHECKING, Protocol

import pytest

from spindel.store import MemoryStore, PostgresStore, SqliteStore
from spindel.testing.faults import FaultyStore
from spindel.testing.sweep import Steps, sweep_steps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from spindel.store import Store

# Where spindel is installed, pytest has loaded its plugin already, and would refuse it a second time.
if not entry_points(group="pytest11", name="spindel"):
    pytest_plugins = ["spindel.testing.plugin"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a server also where the fixture is asked for by a parameter only."""
    # Not at the top: pytest wants to load the plugin itself.
    from spindel.testing.plugin import skip_without_postgres  # noqa: PLC0415

    if item.get_closest_marker("postgres") is not None:
        skip_without_postgres()


STORES = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=STORES)
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Make every store, over facts of the test's own: each call gives one over the same, as a new process would.

    Those with a database write in the loop, so that a test's turns are its own.
    """
    if request.param == "memory":
        store = MemoryStore()
        return lambda: store
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "runs.db", executor="inline")
    dsn: str = request.getfixturevalue("postgres_dsn")
    return lambda: PostgresStore(dsn, executor="inline")


@pytest.fixture
async def store(reopen: Callable[[], Store]) -> AsyncIterator[Store]:
    """Every store, open."""
    async with reopen() as opened:
        yield opened


@pytest.fixture(params=STORES)
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Make every store, over nothing: for one attempt after another, each of which closes its own."""
    if request.param == "memory":
        yield MemoryStore
    elif request.param == "sqlite":
        numbers = count()
        yield lambda: SqliteStore(tmp_path / f"{next(numbers)}.db", executor="inline")
    else:
        with request.getfixturevalue("postgres_pool").lend() as another:
            yield lambda: PostgresStore(another(), executor="inline")


@pytest.fixture(params=STORES[1:])
def unopened(request: pytest.FixtureRequest, tmp_path: Path) -> SqliteStore | PostgresStore:
    """Every store that writes in a thread of its own, not yet open."""
    if request.param == "sqlite":
        return SqliteStore(tmp_path / "threaded.db")
    return PostgresStore(request.getfixturevalue("postgres_dsn"))


@pytest.fixture
async def threaded(unopened: SqliteStore | PostgresStore) -> AsyncIterator[Store]:
    """Every store that writes in a thread of its own, open."""
    async with unopened as opened:
        yield opened


@pytest.fixture
def faulty(store: Store) -> FaultyStore:
    """Every store, wrapped so that its writes can fail, wait and be counted."""
    return FaultyStore(store)


class Sweep(Protocol):
    def __call__(self, scenario: Callable[[Steps], Awaitable[object]]) -> Awaitable[int]: ...


@pytest.fixture
def sweep() -> Sweep:
    """Run a scenario again and again, acting after its first step, then after its second, until it has no more."""
    return sweep_steps
