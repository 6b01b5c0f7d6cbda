"""The least that can make rows durable: what a durable figure is compared with.

A thread that takes what is queued, at most 256 statements, and commits it at once; tasks that queue a statement and
are resumed by the delivery of its batch. It has what the store's writer has and can't do without: the same lane, the
same database with its triggers and indexes, the same statements, the same batch limit, one hand-over a tick, no
savepoint around a single statement. It has nothing else: no checks, no refusals, no repeats, and its rows are computed
before the watch starts.

Where its rows go is a sink: a file, or a PostgreSQL database, which gets them as the store's backend sends them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from benchmarks._harness import ROOM
from spindel.clock import SystemClock
from spindel.ids import IdSource, WitnessStage, witness_id
from spindel.store import FAMILY_VERSION, JOB_VERSION, AdmitRun, AppendWitnesses, FinishRun
from spindel.store._connection import open_for_writing
from spindel.store._executor import ThreadExecutor, refuse_abort
from spindel.store._runs_part import RUNS_PART
from spindel.store._writer import BATCH_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from spindel.store import Mutation
    from spindel.store._executor import Lane

__all__ = ["WRITES_PER_CHILD", "BareWriter", "FileSink", "Sink", "make_jobs", "make_rows", "write_rows"]

WRITES_PER_CHILD: Final = 2
"""The first row of a child, and its outcome."""

_Queued = tuple[Any, trio.lowlevel.Task]


class Sink(Protocol):
    """A database of its own, which has a store's tables and nothing in them."""

    def own_room(self, incarnation: UUID, now: int) -> None:
        """Let the room be owned under the epoch 1."""
        ...

    def prepare(self, mutation: Mutation[Any]) -> Any:
        """Compute what `commit` takes, before the watch starts."""
        ...

    def commit(self, prepared: Sequence[Any]) -> None:
        """Write it all in one transaction; called in the lane."""
        ...

    def close(self) -> None:
        """Give the connection up."""
        ...


class _Recorder:
    """Looks like a connection to the store's own code, and only notes the statement with its values."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, tuple[Any, ...]]] = []

    def execute(self, text: str, values: tuple[Any, ...]) -> None:
        self.statements.append((text, values))

    def changes(self) -> int:
        return 1


class FileSink:
    """A file of SQLite."""

    def __init__(self, path: str) -> None:
        self._connection = open_for_writing(path)

    def own_room(self, incarnation: UUID, now: int) -> None:
        """See `Sink`."""
        self._connection.execute(
            "INSERT INTO rooms (name, incarnation, epoch, owner, opened_at, closed_at) "
            "VALUES (?1, ?2, 1, NULL, ?3, NULL) ON CONFLICT (name) DO UPDATE SET incarnation = excluded.incarnation",
            (ROOM, str(incarnation), now),
        )

    def prepare(self, mutation: Mutation[Any]) -> Any:
        """See `Sink`: the statement that the store would execute."""
        recorder = _Recorder()
        RUNS_PART.sqlite[type(mutation)](recorder, mutation)
        (statement,) = recorder.statements
        return statement

    def commit(self, prepared: Sequence[Any]) -> None:
        """See `Sink`."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        for statement, values in prepared:
            execute(statement, values)
        execute("COMMIT")

    def close(self) -> None:
        """See `Sink`."""
        self._connection.close()


class BareWriter:
    """See the module.

    Args:
        lane: where batches are committed.
        sink: where to.
    """

    def __init__(self, lane: Lane, sink: Sink) -> None:
        self._lane = lane
        self._sink = sink
        self._token = trio.lowlevel.current_trio_token()
        self._fresh: list[_Queued] = []
        self._waiting: deque[_Queued] = deque()

    async def write_all(self, rows: Sequence[Sequence[Any]]) -> None:
        """Write rows one after another: the first row of each, then its outcome."""
        for statements in rows:
            for statement in statements:
                if not self._fresh:
                    self._token.run_sync_soon(self._hand_over)
                self._fresh.append((statement, trio.lowlevel.current_task()))
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
            self._sink.commit([statement for statement, _ in batch])
        return batch

    def _deliver(self, batch: list[_Queued]) -> None:
        for _, task in batch:
            trio.lowlevel.reschedule(task)


def make_rows(sink: Sink, count: int) -> list[list[Any]]:
    """Own the room of a new database, begin a root Run in it, and compute what is written for each of its children."""
    ids, incarnation, now = _own_room(sink)

    def statements_of(run_id: UUID, parent: UUID | None) -> list[Any]:
        admission = AdmitRun(
            room=ROOM, epoch=1, incarnation=incarnation, id=run_id, kind="run", actor="local", parent_id=parent,
            trigger_id=None, provenance="{}", family_version=FAMILY_VERSION, created_at=now, started_at=now,
        )  # fmt: skip
        outcome = FinishRun(
            room=ROOM, epoch=1, id=run_id, status="completed", reason=None, error=None, ended_at=now,
            family_returned=True,
        )  # fmt: skip
        return [sink.prepare(admission), sink.prepare(outcome)]

    root = ids.next_uuid()
    sink.commit(statements_of(root, None)[:1])
    return [statements_of(ids.next_uuid(), root) for _ in range(count)]


def make_jobs(sink: Sink, count: int) -> list[list[Any]]:
    """Own the room of a new database, and compute the four writes of each of so many Jobs."""
    ids, incarnation, now = _own_room(sink)
    rows: list[list[Any]] = []
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
        rows.append([sink.prepare(mutation) for mutation in (admission, core, outcome, adapter)])
    return rows


def _own_room(sink: Sink) -> tuple[IdSource, UUID, int]:
    clock = SystemClock()
    ids = IdSource(clock.now_micros)
    incarnation = ids.next_uuid()
    now = clock.now_micros()
    sink.own_room(incarnation, now)
    return ids, incarnation, now


async def write_rows(
    sink: Sink,
    count: int,
    tasks: int,
    watch: Any,
    make: Callable[[Sink, int], list[list[Any]]] = make_rows,
) -> None:
    """Make so many rows and write them from so many tasks, each write after the one before; then close the sink."""
    rows = make(sink, count)
    lane = ThreadExecutor().open_lane("bare writer")
    try:
        writer = BareWriter(lane, sink)
        watch.start()
        async with trio.open_nursery() as nursery:
            for index in range(tasks):
                nursery.start_soon(writer.write_all, rows[index::tasks])
        watch.stop()
    finally:
        lane.close()
        sink.close()
