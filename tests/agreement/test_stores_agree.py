"""Stores that are told the same give the same answers and hold the same rows."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings

from spindel.store import _sqlite_backend, _sqlite_many
from spindel.store._memory import MemoryStore
from spindel.store._postgres import PostgresStore
from spindel.store._sqlite import SqliteStore
from spindel.testing.strategies import Operation, replay, scripts

if TYPE_CHECKING:
    from spindel.testing._postgres_pool import DatabasePool


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=scripts())
async def test_memory_and_sqlite_agree_on_every_script(script: list[Operation]) -> None:
    """R-05, R-06, R-07: whatever is written in whatever order, both stores refuse and keep the same."""
    memory = MemoryStore()
    expected = await replay(script, lambda: memory)
    with TemporaryDirectory() as folder:
        found = await replay(script, lambda: SqliteStore(Path(folder) / "rooms.db", executor="inline"))

    assert found == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=scripts())
async def test_memory_and_sqlite_agree_whatever_is_applied_at_once(script: list[Operation]) -> None:
    """R-03, R-05: mutations of one type that stand side by side are tried together, and mean what they mean alone."""
    memory = MemoryStore()
    expected = await replay(script, lambda: memory)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sqlite_backend, "MANY_MIN", 1)
        patch.setattr(_sqlite_many, "_SIZES", (3, 2, 1))
        found = await replay(script, lambda: SqliteStore(Path(folder) / "rooms.db", executor="inline"))

    assert found == expected


@pytest.mark.postgres
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=scripts())
async def test_memory_and_postgresql_agree_on_every_script(
    postgres_pool: DatabasePool, script: list[Operation]
) -> None:
    """R-05, R-06, R-07: PostgreSQL's functions refuse and keep what the reference does."""
    memory = MemoryStore()
    expected = await replay(script, lambda: memory)
    with postgres_pool.lend() as another:
        dsn = another()
        found = await replay(script, lambda: PostgresStore(dsn, executor="inline"))

    assert found == expected
