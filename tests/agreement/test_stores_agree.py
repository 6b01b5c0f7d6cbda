"""Two stores that are told the same give the same answers and hold the same rows."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings

from spindel.store._memory import MemoryStore
from spindel.store._sqlite import SqliteStore
from spindel.testing.strategies import Operation, replay, scripts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=scripts())
async def test_memory_and_sqlite_agree_on_every_script(script: list[Operation]) -> None:
    """R-05, R-06, R-07: whatever is written in whatever order, both stores refuse and keep the same."""
    memory = MemoryStore()
    expected = await replay(script, lambda: memory)
    with TemporaryDirectory() as folder:
        found = await replay(script, lambda: SqliteStore(Path(folder) / "rooms.db", executor="inline"))

    assert found == expected
