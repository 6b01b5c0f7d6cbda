"""Long histories, quickly: finished rows as the store would have written them, without a Run for each.

The triggers are taken away for the length of the filling and put back as they were, since asking them a million times
would be most of the work. What they would refuse isn't written: the rows belong to an earlier opening of the room, ended
and have the right witness.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import apsw

from benchmarks._harness import ROOM
from spindel.ids import WitnessStage, parse_uuid, witness_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["EARLIER", "fill_history", "filling", "orphan"]

EARLIER: Final = "01900000-0000-7000-8000-000000000000"
"""The opening of the room that the rows are of."""

_STARTED: Final = 1_750_000_000_000_000
_ROOM: Final = """\
INSERT INTO rooms (name, incarnation, epoch, owner, opened_at, closed_at) VALUES (?1, ?2, 1, NULL, ?3, ?3)
ON CONFLICT (name) DO NOTHING"""

# Ids in the order of the times, as the real ones are.
_ROWS: Final = """\
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?3)
INSERT INTO runs (
  id, room, incarnation, kind, actor, provenance, family_version, created_at, started_at, status, ended_at, updated_at,
  family_return_ack
)
SELECT id, ?1, ?2, 'run', 'local', '{}', 1, ?4 + n, ?4 + n, 'completed', ?4 + n, ?4 + n, family_witness(id)
FROM (SELECT n, printf('01900000-0000-7000-9000-%012x', n) AS id FROM numbers)"""

_ORPHAN: Final = """\
UPDATE runs SET status = 'running', reason = NULL, ended_at = NULL, family_return_ack = NULL, updated_at = started_at
WHERE id IN (SELECT id FROM runs WHERE room = ?1 ORDER BY started_at, id LIMIT ?2)"""


@contextmanager
def filling(path: Path) -> Iterator[apsw.Connection]:
    """Open a closed file for filling: no triggers, no syncs; afterwards it is as whole as any other."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.create_scalar_function("family_witness", _family_witness, 1, deterministic=True)
        connection.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -200000")
        connection.execute("BEGIN IMMEDIATE")
        triggers: list[Any] = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall()
        for name, _ in triggers:
            connection.execute(f'DROP TRIGGER "{name}"')
        yield connection
        for _, text in triggers:
            connection.execute(text)
        connection.execute("COMMIT")
        connection.execute("PRAGMA synchronous = FULL")
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    finally:
        connection.close()


def fill_history(path: Path, count: int) -> None:
    """Add finished rows of an earlier opening of the room to a new file."""
    with filling(path) as connection:
        connection.execute(_ROOM, (ROOM, EARLIER, _STARTED))
        connection.execute(_ROWS, (ROOM, EARLIER, count, _STARTED))


def orphan(path: Path, count: int) -> None:
    """Make the oldest rows of the room running again, as if the process had died over them."""
    with filling(path) as connection:
        connection.execute(_ORPHAN, (ROOM, count))


def _family_witness(*run_id: Any) -> str:
    return str(witness_id(WitnessStage.FAMILY_RETURN, parse_uuid(*run_id)))
