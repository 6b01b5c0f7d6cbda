"""The writer: one lane that applies queued mutations in batches, each batch one transaction and one delivery.

    tasks ──queue──▶ fresh ──one hand-over at a time──▶ turns of at most 256: BEGIN, apply, COMMIT ──▶ deliver each
                       ▲                                                                                │
                       └──────────── the tasks that it resumed queue what they write next ◀─────────────┘

A task that writes parks itself and is resumed by the delivery of its batch; nothing else is made for it. While a
hand-over is out, whatever is queued waits for the next one, which follows the last delivery after a few ticks of the
loop: so the tasks that this delivery resumed, and those that they wake in turn, get their next write into it. Handing
over at each tick instead splits tasks that write again and again into two crowds for good: each is committed while the
other one computes, so they never share a commit, and each waits for the other's as well as for its own.

A first write after a pause waits for nobody: it is handed over in the next tick.

What a batch knows at its end:

- COMMIT returned: whatever was not refused is acknowledged.
- Something failed before COMMIT was issued: nothing was stored; all are refused as transient.
- COMMIT raised: it may be on disk all the same, or come to be there later. Every mutation that changed something is
  uncertain, and nothing of it is repeated here. The others were judged against rows that may never have existed, so
  they are judged again. The connection is given up, and the next one first moves the whole journal into the file and
  truncates it: after a failed sync the journal's last frames may be readable without being on disk, and only a
  completed checkpoint makes what can be read true.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import apsw
import msgspec
import trio

from spindel.clock import Backoff, foreign_work
from spindel.errors import InvalidRecordError, SchemaError, WriteRefusedError, WriteUncertainError
from spindel.store._contract import Confirmation
from spindel.store._executor import refuse_abort
from spindel.store._mutations import Together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spindel.store._contract import StorePart
    from spindel.store._executor import Lane
    from spindel.store._mutations import Mutation

__all__ = ["BATCH_MAX", "Writer"]

BATCH_MAX: Final = 256
# One for the tasks that a delivery resumes, one for those that they wake: a settled Job's waiter starts the next Job.
_GATHERING_TICKS: Final = 2

_log: Final = logging.getLogger("spindel.store")
_BACKOFF: Final = Backoff(first_seconds=0.025, longest_seconds=5.0)
_EPOCH: Final = "SELECT epoch FROM rooms WHERE name = ?1"
_CODE: Final = re.compile(r"RAISE\s*\(\s*ABORT\s*,\s*'([a-z0-9-]{1,64})'\s*\)")
_CONSTRAINTS: Final = {
    apsw.SQLITE_CONSTRAINT_CHECK: "check",
    apsw.SQLITE_CONSTRAINT_DATATYPE: "type",
    apsw.SQLITE_CONSTRAINT_FOREIGNKEY: "reference",
    apsw.SQLITE_CONSTRAINT_NOTNULL: "missing",
    apsw.SQLITE_CONSTRAINT_PRIMARYKEY: "exists",
    apsw.SQLITE_CONSTRAINT_UNIQUE: "exists",
}
_TRANSIENT: Final[dict[type[apsw.Error], str]] = {
    apsw.BusyError: "busy",
    apsw.FullError: "disk-full",
    apsw.IOError: "disk-error",
}


class _Group:
    """A task that waits for several mutations."""

    __slots__ = ("left", "task")

    def __init__(self, task: trio.lowlevel.Task, left: int) -> None:
        self.task = task
        self.left = left


class _Slot(msgspec.Struct):
    """One queued mutation, who waits for it, and what became of it."""

    mutation: Any
    waiter: trio.lowlevel.Task | _Group
    confirming: bool = False
    result: Any = None
    error: Exception | None = None


class Writer:
    """Queues, batches and delivers. The public half is called in the loop, the turns run in the lane.

    Args:
        lane: where turns run.
        parts: whose mutations it knows.
        unowned: types that need no ownership, since they make or end it.
        connect: opens a connection for writing.
    """

    __slots__ = (
        "_checkpoint_due",
        "_closing",
        "_confirmations",
        "_connect",
        "_connection",
        "_delays",
        "_draining",
        "_foreign",
        "_fresh",
        "_handlers",
        "_lane",
        "_now",
        "_refusals",
        "_retry_at",
        "_scheduled",
        "_single",
        "_token",
        "_turns",
        "_unowned",
        "_unsettled",
        "commits",
    )

    def __init__(
        self, lane: Lane, parts: Iterable[StorePart], unowned: frozenset[type], connect: Callable[[], apsw.Connection]
    ) -> None:
        self._lane = lane
        self._token = trio.lowlevel.current_trio_token()
        self._foreign = foreign_work()
        self._fresh: list[_Slot] = []
        # True from the first queued write until a hand-over finds nothing: one is to come, or is out.
        self._scheduled = False
        self._turns = 0
        self._unsettled = 0
        self._draining = False
        self._closing: trio.lowlevel.Task | None = None
        self._handlers: dict[type, Callable[[Any, Any], Any]] = {}
        self._confirmations: dict[type, Callable[[Any, Any], Confirmation]] = {}
        self._single: set[type] = set()
        codes: set[str] = set()
        for part in parts:
            self._handlers.update(part.sqlite)
            self._confirmations.update(part.sqlite_confirm)
            self._single.update(part.single_statement)
            for script in part.migrations.get("sqlite", ()):
                codes.update(_CODE.findall(script))
        self._refusals = frozenset(codes)
        self._unowned = unowned
        # From here on used by turns only.
        self._connect = connect
        self._connection: apsw.Connection | None = None
        self._checkpoint_due = False
        self._now = 0.0
        self._retry_at = 0.0
        self._delays: Iterator[float] = _BACKOFF.delays()
        self.commits = 0

    # -- in the loop -------------------------------------------------------------------------------------------------

    async def write(self, mutation: Mutation[Any]) -> Any:
        """Queue a mutation and wait for its verdict, whatever happens."""
        slot = _Slot(mutation, trio.lowlevel.current_task())
        self._queue((slot,))
        await trio.lowlevel.wait_task_rescheduled(refuse_abort)
        if slot.error is not None:
            raise slot.error
        return slot.result

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Queue the reading back of a mutation and wait for it."""
        slot = _Slot(mutation, trio.lowlevel.current_task(), confirming=True)
        self._queue((slot,))
        await trio.lowlevel.wait_task_rescheduled(refuse_abort)
        if slot.error is not None:
            raise slot.error
        found: Confirmation = slot.result
        return found

    async def write_each(self, mutations: Sequence[Mutation[Any]]) -> list[Any]:
        """Queue mutations and wait once for all their verdicts."""
        if not mutations:
            return []
        group = _Group(trio.lowlevel.current_task(), len(mutations))
        slots = [_Slot(mutation, group) for mutation in mutations]
        self._queue(slots)
        await trio.lowlevel.wait_task_rescheduled(refuse_abort)
        return [slot.result if slot.error is None else slot.error for slot in slots]

    async def drain(self) -> None:
        """Refuse whatever comes from now on, and wait until everything queued has its verdict."""
        self._draining = True
        if self._unsettled:
            self._closing = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(refuse_abort)

    def check_known(self, mutation: Any) -> None:
        """Check that some part applies this mutation.

        Raises:
            InvalidRecordError: none does.
        """
        kind: type[object] = mutation.__class__
        if kind is Together:
            for inner in mutation.mutations:
                self.check_known(inner)
        elif kind not in self._handlers:
            raise InvalidRecordError(
                "mutation", f"no part of this store knows a {kind.__name__}; pass its StorePart to the store"
            )

    def _queue(self, slots: Sequence[_Slot]) -> None:
        if self._draining:
            raise WriteRefusedError("store-closed", detail="its block has ended")
        if not self._unsettled:
            self._foreign.begin()
        self._unsettled += len(slots)
        self._fresh.extend(slots)
        if not self._scheduled:
            # Not at once: a lane that is woken by the first of many would leave with that one alone.
            self._scheduled = True
            self._token.run_sync_soon(self._hand_over)

    def _gather(self, ticks: int) -> None:
        """Hand over when the tasks that run now have had so many ticks to queue, and this one has ended."""
        if ticks:
            self._token.run_sync_soon(self._gather, ticks - 1)
        else:
            self._token.run_sync_soon(self._hand_over)

    def _hand_over(self) -> None:
        slots, self._fresh = self._fresh, []
        if not slots:
            self._scheduled = False
            return
        now = trio.current_time()
        batches = [slots[first : first + BATCH_MAX] for first in range(0, len(slots), BATCH_MAX)]
        # Counted before the first leaves, since an inline lane delivers it from within.
        self._turns = len(batches)
        for batch in batches:
            self._lane.submit(partial(self._turn, batch, now), self._deliver)

    def _deliver(self, slots: list[_Slot]) -> None:
        self._turns -= 1
        if not self._turns:
            self._gather(_GATHERING_TICKS)
        self._unsettled -= len(slots)
        if not self._unsettled:
            self._foreign.end()
            if self._closing is not None:
                closing, self._closing = self._closing, None
                trio.lowlevel.reschedule(closing)
        for slot in slots:
            waiter = slot.waiter
            if isinstance(waiter, _Group):
                waiter.left -= 1
                if not waiter.left:
                    trio.lowlevel.reschedule(waiter.task)
            else:
                trio.lowlevel.reschedule(waiter)

    # -- in the lane -------------------------------------------------------------------------------------------------

    def open(self, connection: apsw.Connection) -> None:
        """Start with a connection to a file that is up to date."""
        self._connection = connection

    def close(self) -> None:
        """Give up the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _close(connection)

    def _turn(self, batch: list[_Slot], now: float) -> list[_Slot]:
        self._now = now
        try:
            for confirming, slots in groupby(batch, attrgetter("confirming")):
                if confirming:
                    for slot in slots:
                        self._read_back(slot)
                else:
                    self._write_batch(list(slots))
        except Exception:  # noqa: BLE001  a bug of ours: whoever waits must hear something, and only this is true
            _log.exception("a batch broke down; its writes are uncertain")
            self._lose_connection()
            for slot in batch:
                slot.error = WriteUncertainError(slot.mutation.identity, "the writer broke down")
        return batch

    def _write_batch(self, batch: list[_Slot]) -> None:
        while batch:
            connection = self._connected()
            if connection is None:
                _refuse(batch, "store-unavailable", "the file can't be opened again yet")
                return
            try:
                connection.execute("BEGIN IMMEDIATE")
                effects, others = self._apply_batch(connection, batch)
            except apsw.Error as problem:
                _refuse(batch, _transient_code(problem), str(problem))
                self._roll_back(connection)
                return
            try:
                connection.execute("COMMIT")
            except apsw.Error as problem:
                self._lose_connection()
                _log.warning("COMMIT raised, so %d writes are uncertain: %s", len(effects), problem)
                for slot in effects:
                    slot.error = WriteUncertainError(slot.mutation.identity, f"COMMIT raised: {problem}")
                if not effects:
                    _refuse(others, _transient_code(problem), str(problem))
                    return
                batch = others
            else:
                self.commits += 1
                return

    def _apply_batch(self, connection: apsw.Connection, batch: list[_Slot]) -> tuple[list[_Slot], list[_Slot]]:
        """Apply each and tell those that changed something from the others."""
        epochs: dict[str, int | None] = {}
        effects: list[_Slot] = []
        others: list[_Slot] = []
        changes = connection.total_changes()
        for slot in batch:
            slot.error = None
            try:
                slot.result = self._apply(connection, slot.mutation, epochs)
            except apsw.ConstraintError as problem:
                slot.error = self._refusal(problem)
            except apsw.Error:
                raise
            except Exception as problem:  # noqa: BLE001  a refusal, or a part's bug, which is told to its caller alone
                slot.error = problem
            before, changes = changes, connection.total_changes()
            if slot.error is None:
                (others if changes == before else effects).append(slot)
                continue
            others.append(slot)
            kept = changes != before and type(slot.mutation) in self._single
            if kept or not connection.in_transaction:
                raise apsw.AbortError(f"a refused {type(slot.mutation).__name__} left the batch half done")
        return effects, others

    def _apply(self, connection: apsw.Connection, mutation: Any, epochs: dict[str, int | None]) -> Any:
        kind: type[object] = mutation.__class__
        if kind in self._unowned:
            epochs.clear()
        else:
            # The writer's lock is held, so what was read once holds for the whole transaction.
            room = mutation.room
            if room not in epochs:
                epochs[room] = connection.execute(_EPOCH, (room,)).get
            if epochs[room] != mutation.epoch:
                raise WriteRefusedError("not-owner", detail=f"epoch {mutation.epoch} doesn't own room {room!r}")
        if kind in self._single:
            # RAISE(ABORT) and constraints undo the one statement and keep the transaction: no savepoint needed.
            return self._handlers[kind](connection, mutation)
        connection.execute("SAVEPOINT mutation")
        try:
            if kind is Together:
                result: Any = tuple(self._apply(connection, inner, epochs) for inner in mutation.mutations)
            else:
                result = self._handlers[kind](connection, mutation)
        except BaseException:
            connection.execute("ROLLBACK TO mutation")
            connection.execute("RELEASE mutation")
            raise
        connection.execute("RELEASE mutation")
        return result

    def _refusal(self, problem: apsw.ConstraintError) -> WriteRefusedError:
        reason: int = cast("Any", problem).extendedresult
        if reason == apsw.SQLITE_CONSTRAINT_TRIGGER and str(problem) in self._refusals:
            refusal = WriteRefusedError(str(problem))
        else:
            refusal = WriteRefusedError(_CONSTRAINTS.get(reason, "constraint"), detail=str(problem))
        refusal.__cause__ = problem
        return refusal

    def _read_back(self, slot: _Slot) -> None:
        connection = self._connected()
        try:
            if connection is None:
                slot.error = WriteUncertainError(slot.mutation.identity, "the file can't be read again yet")
            else:
                slot.result = self._confirm(connection, slot.mutation)
        except apsw.Error as problem:
            slot.error = WriteUncertainError(slot.mutation.identity, str(problem))

    def _confirm(self, connection: apsw.Connection, mutation: Any) -> Confirmation:
        if type(mutation) is not Together:
            return self._confirmations[type(mutation)](connection, mutation)
        found = {self._confirm(connection, inner) for inner in mutation.mutations}
        if Confirmation.CONFLICT in found:
            return Confirmation.CONFLICT
        return Confirmation.ABSENT if Confirmation.ABSENT in found else Confirmation.PRESENT

    # -- the connection, in the lane ---------------------------------------------------------------------------------

    def _connected(self) -> apsw.Connection | None:
        """Give a connection that may confirm and write, or None while there can't be one."""
        if self._connection is not None:
            return self._connection
        if self._now < self._retry_at:
            return None
        try:
            connection = self._connect()
            try:
                if self._checkpoint_due:
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.Error:
                _close(connection)
                raise
        except (apsw.Error, SchemaError) as problem:
            delay = next(self._delays)
            self._retry_at = self._now + delay
            _log.warning("the store can't be opened again, next attempt in %s s: %s", delay, problem)
            return None
        self._checkpoint_due = False
        self._delays = _BACKOFF.delays()
        self._connection = connection
        return connection

    def _lose_connection(self) -> None:
        self.close()
        self._checkpoint_due = True

    def _roll_back(self, connection: apsw.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            # Nothing was committed; without its connection the transaction is gone.
            self.close()


def _close(connection: apsw.Connection) -> None:
    try:
        connection.close(True)
    except apsw.Error as problem:
        _log.warning("a connection did not close cleanly: %s", problem)


def _transient_code(problem: apsw.Error) -> str:
    return next((code for kind, code in _TRANSIENT.items() if isinstance(problem, kind)), "store-failed")


def _refuse(slots: Iterable[_Slot], code: str, detail: str) -> None:
    for slot in slots:
        slot.error = WriteRefusedError(code, transient=True, detail=detail)
