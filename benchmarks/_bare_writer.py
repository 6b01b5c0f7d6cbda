"""The least that can make rows durable: what a durable figure is compared with.

A thread that takes what is queued, at most 256 statements, and commits it at once; tasks that queue a statement and
are resumed by the delivery of its batch. It has what the store's writer has and can't do without: the same lane, the
same file with its triggers and indexes, the same statements, the same batch limit, one hand-over a tick, no savepoint
around a single statement. It has nothing else: no checks, no epochs, no refusals, no repeats, and its rows are
computed before the watch starts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import trio

from benchmarks._harness import ROOM
from spindel.clock import SystemClock
from spindel.ids import IdSource, WitnessStage, witness_id
from spindel.store import FAMILY_VERSION, JOB_VERSION, AdmitRun, AppendWitnesses, FinishRun, SqliteStore
from spindel.store._connection import open_for_writing
from spindel.store._executor import ThreadExecutor, refuse_abort
from spindel.store._runs_part import RUNS_PART
from spindel.store._writer import BATCH_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from uuid import UUID

    import apsw

    from spindel.store import Mutation
    from spindel.store._executor import Lane

__all__ = ["WRITES_PER_CHILD", "BareWriter", "make_file", "make_jobs", "make_rows", "write_rows"]

WRITES_PER_CHILD: Final = 2
"""The first row of a child, and its outcome."""


Statement = tuple[str, tuple[Any, ...]]
_Queued = tuple[str, tuple[Any, ...], trio.lowlevel.Task]


class _Recorder:
    """Looks like a connection to the store's own code, and only notes the statement with its values."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def execute(self, text: str, values: tuple[Any, ...]) -> None:
        self.statements.append((text, values))

    def changes(self) -> int:
        return 1


class BareWriter:
    """See the module.

    Args:
        lane: where batches are committed.
        connection: a connection that was made by `make_file`.
    """

    def __init__(self, lane: Lane, connection: apsw.Connection) -> None:
        self._lane = lane
        self._connection = connection
        self._token = trio.lowlevel.current_trio_token()
        self._fresh: list[_Queued] = []
        self._waiting: deque[_Queued] = deque()

    async def write_all(self, rows: Sequence[Sequence[Statement]]) -> None:
        """Write rows one after another: the first row of each, then its outcome."""
        for statements in rows:
            for text, values in statements:
                if not self._fresh:
                    self._token.run_sync_soon(self._hand_over)
                self._fresh.append((text, values, trio.lowlevel.current_task()))
                await trio.lowlevel.wait_task_rescheduled(refuse_abort)

    def _hand_over(self) -> None:
        fresh, self._fresh = self._fresh, []
        self._waiting.extend(fresh)
        for _ in range(0, len(fresh), BATCH_MAX):
            self._lane.submit(self._turn, self._deliver)

    def _turn(self) -> list[_Queued]:
        waiting = self._waiting
        batch = [waiting.popleft() for _ in range(min(BATCH_MAX, len(waiting)))]
        if batch:
            execute = self._connection.execute
            execute("BEGIN IMMEDIATE")
            for statement, values, _ in batch:
                execute(statement, values)
            execute("COMMIT")
        return batch

    def _deliver(self, batch: list[_Queued]) -> None:
        for _, _, task in batch:
            trio.lowlevel.reschedule(task)


async def make_file(path: Path) -> None:
    """Make a store's file, as the store makes it."""
    async with SqliteStore(path):
        pass


def make_rows(connection: apsw.Connection, count: int) -> list[list[Statement]]:
    """Own the room of a new file, begin a root Run in it, and compute what is written for each of its children."""
    ids, incarnation, now = _own_room(connection)

    def statements_of(run_id: UUID, parent: UUID | None) -> list[Statement]:
        admission = AdmitRun(
            room=ROOM, epoch=1, incarnation=incarnation, id=run_id, kind="run", actor="local", parent_id=parent,
            trigger_id=None, provenance="{}", family_version=FAMILY_VERSION, created_at=now, started_at=now,
        )  # fmt: skip
        outcome = FinishRun(
            room=ROOM, epoch=1, id=run_id, status="completed", reason=None, error=None, ended_at=now,
            family_returned=True,
        )  # fmt: skip
        return _statements_of(admission, outcome)

    root = ids.next_uuid()
    connection.execute(*statements_of(root, None)[0])
    return [statements_of(ids.next_uuid(), root) for _ in range(count)]


def make_jobs(connection: apsw.Connection, count: int) -> list[list[Statement]]:
    """Own the room of a new file, and compute the four writes of each of so many Jobs."""
    ids, incarnation, now = _own_room(connection)
    rows: list[list[Statement]] = []
    for _ in range(count):
        job_id = ids.next_uuid()
        admission = AdmitRun(
            room=ROOM, epoch=1, incarnation=incarnation, id=job_id, kind="job", actor="local", parent_id=None,
            trigger_id=None, provenance="{}", family_version=FAMILY_VERSION, created_at=now, started_at=now,
            job_version=JOB_VERSION,
        )  # fmt: skip
        core = AppendWitnesses(
            room=ROOM, epoch=1, id=job_id, at=now, family=witness_id(WitnessStage.FAMILY_RETURN, job_id),
            core=witness_id(WitnessStage.CORE_CLEANUP, job_id),
        )  # fmt: skip
        outcome = FinishRun(
            room=ROOM, epoch=1, id=job_id, status="completed", reason=None, error=None, ended_at=now,
            family_returned=False,
        )  # fmt: skip
        adapter = AppendWitnesses(
            room=ROOM, epoch=1, id=job_id, at=now, adapter=witness_id(WitnessStage.ADAPTER_CLEANUP, job_id)
        )
        rows.append(_statements_of(admission, core, outcome, adapter))
    return rows


def _own_room(connection: apsw.Connection) -> tuple[IdSource, UUID, int]:
    clock = SystemClock()
    ids = IdSource(clock.now_micros)
    incarnation = ids.next_uuid()
    now = clock.now_micros()
    connection.execute(
        "INSERT INTO rooms (name, incarnation, epoch, owner, opened_at, closed_at) VALUES (?1, ?2, 1, NULL, ?3, NULL)"
        " ON CONFLICT (name) DO UPDATE SET incarnation = excluded.incarnation",
        (ROOM, str(incarnation), now),
    )
    return ids, incarnation, now


def _statements_of(*mutations: Mutation[Any]) -> list[Statement]:
    recorder = _Recorder()
    for mutation in mutations:
        RUNS_PART.sqlite[type(mutation)](recorder, mutation)
    return recorder.statements


async def write_rows(
    path: Path,
    count: int,
    tasks: int,
    watch: Any,
    make: Callable[[apsw.Connection, int], list[list[Statement]]] = make_rows,
) -> None:
    """Make so many rows and write them from so many tasks, each write after the one before, to `make_file`'s file."""
    connection = open_for_writing(str(path))
    rows = make(connection, count)
    lane = ThreadExecutor().open_lane("bare writer")
    try:
        writer = BareWriter(lane, connection)
        watch.start()
        async with trio.open_nursery() as nursery:
            for index in range(tasks):
                nursery.start_soon(writer.write_all, rows[index::tasks])
        watch.stop()
    finally:
        lane.close()
        connection.close()
