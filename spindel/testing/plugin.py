"""Fixtures for pytest, there as soon as spindel is installed.

| fixture | gives |
|---|---|
| `memory_store` | a fresh `MemoryStore` |
| `sqlite_store` | a `SqliteStore` over a new file, not yet opened: enter it with `async with` |
| `postgres_cluster` | a `PostgresCluster` for the whole session, started when the first test asks for it |
| `postgres_pool` | lends databases on it: `with postgres_pool.lend() as another: dsn = another()` |
| `postgres_dsn` | the address of an empty database on it |
| `postgres_store` | a `PostgresStore` over an empty database, not yet opened |
| `spindel_clock` | the test's loop clock: it jumps over waits, never past real work; needs pytest-trio to be used |
| `wall_clock` | a `ManualWallClock`; it follows `spindel_clock` if the test uses that, too |

None of them is asynchronous, so they do no harm where pytest-trio isn't installed.

Where there is no PostgreSQL server, tests that ask for one are skipped; with `SPINDEL_REQUIRE_POSTGRES=1` in the
environment they fail instead.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

from spindel.store._memory import MemoryStore
from spindel.store._postgres import PostgresStore
from spindel.store._sqlite import SqliteStore
from spindel.testing.clocks import ManualWallClock, autojump_clock
from spindel.testing.postgres import PostgresCluster, find_server_binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trio.testing import MockClock

    from spindel.testing._postgres_pool import DatabasePool

__all__ = [
    "memory_store",
    "postgres_cluster",
    "postgres_dsn",
    "postgres_pool",
    "postgres_store",
    "pytest_runtest_setup",
    "skip_without_postgres",
    "spindel_clock",
    "sqlite_store",
    "wall_clock",
]

_REQUIRE: Final = "SPINDEL_REQUIRE_POSTGRES"

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


def skip_without_postgres() -> None:
    """Skip the test at hand where there is no PostgreSQL server and none is required."""
    if find_server_binaries() is None and os.environ.get(_REQUIRE, "0") in {"", "0"}:
        pytest.skip("needs a PostgreSQL server's programs (Debian: apt-get install postgresql)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture is made, so that all such tests are told in one line; called by pytest."""
    if "postgres_cluster" in getattr(item, "fixturenames", ()):
        skip_without_postgres()


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[PostgresCluster]:
    """Give a throw-away server; one for all tests of the session."""
    skip_without_postgres()
    with PostgresCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres_pool(postgres_cluster: PostgresCluster) -> DatabasePool:
    """Give what lends databases of the cluster, with spindel's tables and nothing in them; for tests that need several."""
    from spindel.testing._postgres_pool import DatabasePool  # noqa: PLC0415  of an extra

    return DatabasePool(postgres_cluster)


@pytest.fixture
def postgres_dsn(postgres_pool: DatabasePool) -> Iterator[str]:
    """Give the address of an empty database with spindel's tables."""
    dsn = postgres_pool.take()
    yield dsn
    postgres_pool.give_back(dsn)


@pytest.fixture
def postgres_store(postgres_dsn: str) -> PostgresStore:
    """Give a store over an empty database, not yet opened."""
    return PostgresStore(postgres_dsn)


@pytest.fixture
def spindel_clock() -> MockClock:
    """Give the loop clock of the test; pytest-trio runs the test on it."""
    return autojump_clock()


@pytest.fixture
def wall_clock(request: pytest.FixtureRequest) -> ManualWallClock:
    """Give a wall clock that moves when told to, or with the test's loop clock."""
    follows = "spindel_clock" in request.fixturenames
    return ManualWallClock(follows=request.getfixturevalue("spindel_clock") if follows else None)
