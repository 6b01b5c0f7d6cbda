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
  they are judged again. The connection is given up, and the next one first makes sure that what it reads is true.

What a database is, and how it is asked, a backend knows.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import trio

from spindel.clock import Backoff, foreign_work
from spindel.errors import InvalidRecordError, WriteRefusedError, WriteUncertainError
from spindel.store._backend import BatchFailedError, LostReplyError, Slot, UnavailableError
from spindel.store._executor import refuse_abort
from spindel.store._mutations import Together

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from spindel.store._backend import Backend
    from spindel.store._contract import Confirmation
    from spindel.store._executor import Lane
    from spindel.store._mutations import Mutation

__all__ = ["BATCH_MAX", "Writer"]

BATCH_MAX: Final = 256
# One for the tasks that a delivery resumes, one for those that they wake: a settled Job's waiter starts the next Job.
_GATHERING_TICKS: Final = 2

_log: Final = logging.getLogger("spindel.store")
_BACKOFF: Final = Backoff(first_seconds=0.025, longest_seconds=5.0)


class _Group:
    """A task that waits for several mutations."""

    __slots__ = ("left", "task")

    def __init__(self, task: trio.lowlevel.Task, left: int) -> None:
        self.task = task
        self.left = left


class Writer:
    """Queues, batches and delivers. The public half is called in the loop, the turns run in the lane.

    Args:
        lane: where turns run.
        backend: what they ask; nobody else uses it meanwhile.
    """

    __slots__ = (
        "_backend",
        "_closing",
        "_delays",
        "_draining",
        "_foreign",
        "_fresh",
        "_lane",
        "_now",
        "_retry_at",
        "_scheduled",
        "_token",
        "_turns",
        "_unsettled",
        "commits",
        "committed",
    )

    def __init__(self, lane: Lane, backend: Backend) -> None:
        self._lane = lane
        self._token = trio.lowlevel.current_trio_token()
        self._foreign = foreign_work()
        self._fresh: list[Slot] = []
        # True from the first queued write until a hand-over finds nothing: one is to come, or is out.
        self._scheduled = False
        self._turns = 0
        self._unsettled = 0
        self._draining = False
        self._closing: trio.lowlevel.Task | None = None
        # From here on used by turns only.
        self._backend = backend
        self._now = 0.0
        self._retry_at = 0.0
        self._delays: Iterator[float] = _BACKOFF.delays()
        self.commits = 0
        self.committed = 0

    # -- in the loop -------------------------------------------------------------------------------------------------

    async def write(self, mutation: Mutation[Any]) -> Any:
        """Queue a mutation and wait for its verdict, whatever happens."""
        slot = Slot(mutation, trio.lowlevel.current_task())
        self._queue((slot,))
        await trio.lowlevel.wait_task_rescheduled(refuse_abort)
        if slot.error is not None:
            raise slot.error
        return slot.result

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Queue the reading back of a mutation and wait for it."""
        slot = Slot(mutation, trio.lowlevel.current_task(), confirming=True)
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
        slots = [Slot(mutation, group) for mutation in mutations]
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
        elif not self._backend.knows(kind):
            raise InvalidRecordError(
                "mutation", f"no part of this store knows a {kind.__name__}; pass its StorePart to the store"
            )

    def _queue(self, slots: Sequence[Slot]) -> None:
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

    def _deliver(self, slots: list[Slot]) -> None:
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

    def _turn(self, batch: list[Slot], now: float) -> list[Slot]:
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
            self._backend.lose()
            for slot in batch:
                slot.error = WriteUncertainError(slot.mutation.identity, "the writer broke down")
        return batch

    def _write_batch(self, batch: list[Slot]) -> None:
        backend = self._backend
        while batch:
            if not self._connect():
                _refuse(batch, "store-unavailable", "it can't be opened again yet")
                return
            try:
                backend.apply(batch)
            except BatchFailedError as problem:
                _refuse(batch, problem.code, str(problem))
                return
            try:
                backend.commit()
            except LostReplyError as problem:
                effects = [slot for slot in batch if slot.changed and slot.error is None]
                _log.warning("a commit failed, so %d writes are uncertain: %s", len(effects), problem)
                # The others were judged beside writes that may not be there.
                batch = [slot for slot in batch if not slot.changed or slot.error is not None]
                for slot in effects:
                    slot.error = WriteUncertainError(slot.mutation.identity, str(problem))
                if not effects:
                    _refuse(batch, problem.code, str(problem))
                    return
            else:
                self.commits += 1
                self.committed += len(batch)
                return

    def _read_back(self, slot: Slot) -> None:
        try:
            if self._connect():
                slot.result = self._backend.confirm(slot.mutation)
            else:
                slot.error = WriteUncertainError(slot.mutation.identity, "it can't be read again yet")
        except LostReplyError as problem:
            slot.error = WriteUncertainError(slot.mutation.identity, str(problem))

    def _connect(self) -> bool:
        """See that the backend has a connection; False while there can't be one."""
        if self._backend.connected:
            return True
        if self._now < self._retry_at:
            return False
        try:
            self._backend.connect()
        except UnavailableError as problem:
            delay = next(self._delays)
            self._retry_at = self._now + delay
            _log.warning("the store can't be opened again, next attempt in %s s: %s", delay, problem)
            return False
        self._delays = _BACKOFF.delays()
        return True


def _refuse(slots: Iterable[Slot], code: str, detail: str) -> None:
    for slot in slots:
        slot.error = WriteRefusedError(code, transient=True, detail=detail)
