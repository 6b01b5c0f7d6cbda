"""The worker pool: one a room, for everything that must not run in a Run's own task, and for threads.

Tasks (`join`, `publication`, `cleanup`, `recovery`, `wait`) run in a nursery of the pool's own, so that no full thread
limiter and no cancelled Run can starve them. Threads (`native`) are bounded by the room's limiter and never abandoned:
whoever called waits until the thread is back, whatever is cancelled. A native launch must not wait for another one, or
a full limiter would wait for itself.

| state | exists |
|---|---|
| retained | callback and id; construction may have failed |
| registered, submitting | and the exact ticket; the submission failed or its answer is unknown |
| running | the ticket was claimed, once |
| returned, failed | the result or the error |

Callback and id are retained before the ticket is constructed, and the ticket is registered before it is submitted. So
whatever fails, there is exactly one ticket, which runs at most once, and the launch is held where it failed.

A `wait` and a `native` launch are there for their waiter only, so they end with it: cancelled while the ticket is new,
held or not, it is used up and never submitted again. Later, a `wait` is cancelled, and a thread waited for.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple, cast

import trio

from spindel.clock import foreign_work
from spindel.errors import (
    FamilySealedError,
    LaunchNotRecoverableError,
    NotHeldError,
    RunAbandonedError,
    StaleRevisionError,
)
from spindel.runs._entry import FamilyReturned
from spindel.runs._frontier import carried_into_a_thread, carry, current_entry
from spindel.runs._launch import Executor, Launch, TaskExecutor, ThreadExecutor, Ticket
from spindel.runs._states import HoldKind, LaunchKind, LaunchState, TicketState
from spindel.store._executor import refuse_abort

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from spindel.ids import LaunchId, Revision, RunId
    from spindel.runs._entry import Entry, FamilyState
    from spindel.runs._room import Room

__all__ = ["Executor", "Launch", "LaunchGivenUpError", "Ticket", "WorkerPool"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_OVER: Final = frozenset({LaunchState.RETURNED, LaunchState.FAILED})
_END_WITH_THEIR_WAITER: Final = frozenset({LaunchKind.WAIT, LaunchKind.NATIVE})


class LaunchGivenUpError(RunAbandonedError):
    """The launch itself was given up by an operator; never what its callback raised."""


class WorkerPool:
    """See the module.

    Args:
        room: the room it belongs to.
        nursery: the shielded nursery that its tasks run in.
        threads_max: how many threads may run at once.
    """

    def __init__(self, room: Room, nursery: trio.Nursery, threads_max: int) -> None:
        self._room = room
        self.tasks: Executor = TaskExecutor(nursery, self._run_ticket)
        self.threads: Executor = ThreadExecutor()
        self.limiter = trio.CapacityLimiter(threads_max)
        self.launches: dict[int, Launch] = {}

    # -- launching --------------------------------------------------------------------------------------------------

    async def join(self, family: FamilyState) -> FamilyReturned:
        """Wait, on a worker, until a Run's sealed family has returned. Not cancellable.

        Returns:
            The family's own sentinel, which alone says that it returned.

        Raises:
            RunAbandonedError: an operator gave the launch up, so nobody says anything.
        """
        entry = family.parent
        assert entry is not None, "the room's own family is waited for by its block"
        sentinel = FamilyReturned(entry.run_id, self._room.incarnation)

        async def wait_for_family() -> FamilyReturned:
            await family.wait_returned()
            return sentinel

        launch = Launch(self._room, LaunchKind.JOIN, wait_for_family, entry)
        return cast("FamilyReturned", await self._run_to_end(launch))

    async def call(self, kind: LaunchKind, fn: Callable[[], Awaitable[R]], *, run_id: RunId) -> R:
        """Run `fn` as a task of the pool, bound to the Run, and wait for it.

        Cancellation: none; a `wait` is a checkpoint, and its callback is cancelled and waited for.

        Raises:
            BaseException: what `fn` raised.
            RunAbandonedError: the executor never took it, and an operator gave it up.
        """
        launch = Launch(self._room, kind, fn, self._room.entries[run_id.int])
        if kind is LaunchKind.WAIT:
            launch.scope = trio.CancelScope()
        return cast("R", await self._run_to_end(launch))

    @trio.lowlevel.enable_ki_protection
    async def call_native(self, fn: Callable[[*Ts], R], *args: *Ts, run_id: RunId) -> R:
        """Run `fn(*args)` in a thread, bound to the Run, and wait for it; the Run doesn't end before that.

        Cancellation: a checkpoint while it waits for a free thread, or is held; once the thread runs it is waited for.

        Raises:
            FamilySealedError: the Run has ended, or its work and family have been joined.
            BaseException: what `fn` raised.
            RunAbandonedError: no thread ever ran it, and an operator gave it up.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        marks = carried_into_a_thread()

        def bound() -> R:
            carry(marks)
            return fn(*args)

        launch = Launch(self._room, LaunchKind.NATIVE, bound, self._launching_entry(run_id))
        with self._kept_outside(launch):
            self._advance(launch)
            while launch.state not in _OVER:
                ticket, launch.offered = launch.offered, None
                if ticket is None:
                    await self._wait(launch)
                else:
                    await self._enter_thread(launch, ticket)
            return cast("R", _result_of(launch))

    @contextmanager
    def outside(self, run_id: RunId) -> Generator[None]:
        """Register a process for the length of a block, as a launch that runs; its Run doesn't end before the block.

        No executor takes it: what can't be started raises to whoever asked for it, before anything exists.

        Raises:
            FamilySealedError: the Run has ended, or its work and family have been joined.
        """
        launch = Launch(self._room, LaunchKind.NATIVE, _run_outside, self._launching_entry(run_id))
        launch.state = LaunchState.RUNNING
        work = foreign_work()
        with self._kept_outside(launch):
            work.begin()
            try:
                yield
            finally:
                work.end()

    def start(
        self, kind: LaunchKind, fn: Callable[[], Awaitable[Any]], entry: Entry, back: Callable[[Launch], None]
    ) -> None:
        """Run `fn` as a task of the pool, bound to the Run, and call `back` in the turn in which it has come back.

        It takes the entry, not its id: a publication belongs to the lease of a Run that has ended.
        """
        launch = Launch(self._room, kind, fn, entry)

        def came_back() -> None:
            self._forget(launch)
            back(launch)

        launch.caller = came_back
        self.launches[id(launch)] = launch
        self._advance(launch)

    # -- recovery ---------------------------------------------------------------------------------------------------

    def find(self, launch_id: LaunchId) -> Launch | None:
        """Give an outstanding launch, or None."""
        return next((launch for launch in self.launches.values() if launch.id == launch_id), None)

    def recover(self, launch: Launch, revision: Revision) -> None:
        """Take a held launch up again where it stands, in one turn, with its own callback, id and ticket.

        Raises:
            StaleRevisionError: the hold has another revision by now.
            NotHeldError: it isn't held, and nothing has run.
            LaunchNotRecoverableError: it runs, or has run and is no join, or its ticket was used up.
        """
        hold = launch.hold
        if hold is not None and hold.revision != revision:
            raise StaleRevisionError(f"launch {launch.id}")
        if launch.state is LaunchState.RUNNING:
            raise LaunchNotRecoverableError(launch.id, "launch-running")
        if launch.state in _OVER and (hold is None or launch.kind is not LaunchKind.JOIN):
            raise LaunchNotRecoverableError(launch.id, "consumed")
        if hold is None:
            raise NotHeldError(f"launch {launch.id}")
        ticket = launch.ticket
        if launch.state is LaunchState.FAILED:
            # Joining is idempotent, so it alone may be attempted anew, once the old attempt is physically over.
            if ticket is None or not ticket.exited or ticket.state is not TicketState.DONE:
                raise LaunchNotRecoverableError(launch.id, "launch-running")
            launch.ticket = None
            launch.result = launch.error = None
            launch.state = LaunchState.RETAINED
        elif ticket is not None and ticket.state is TicketState.CANCELLED:
            # Its executor used it up before it refused it.
            raise LaunchNotRecoverableError(launch.id, "consumed")
        launch.hold = None
        self._room.holds.end(hold, "retry")
        self._advance(launch)

    def acknowledge_join(self, launch: Launch, family: FamilyState) -> bool:
        """Take a held join as returned because its family observably is; False if it isn't."""
        hold = launch.hold
        if hold is None or not family.returned or family.abandoned:
            return False
        launch.state = LaunchState.RETURNED
        launch.result = FamilyReturned(launch.entry.run_id, self._room.incarnation)
        launch.error = None
        if launch.ticket is not None:
            launch.ticket.cancel()
        self._room.holds.end(hold, "acknowledge")
        launch.tell()
        return True

    # -- inside -----------------------------------------------------------------------------------------------------

    def _launching_entry(self, run_id: RunId) -> Entry:
        entry = self._room.entries.get(run_id.int)
        if entry is None or entry.joined or not entry.live:
            raise FamilySealedError(run_id)
        return entry

    async def _run_to_end(self, launch: Launch) -> Any:
        self.launches[id(launch)] = launch
        try:
            self._advance(launch)
            # The ticket runs in a later turn at the earliest, so nothing can have come back yet; held, it waits too.
            await self._wait(launch)
        finally:
            self._forget(launch)
        return _result_of(launch)

    def _forget(self, launch: Launch) -> None:
        del self.launches[id(launch)]
        # Ticket and launch refer to each other; what is over is not left to the collector.
        launch.ticket = launch.offered = None

    def _advance(self, launch: Launch) -> None:
        """Construct, register, submit: one turn, held where it fails."""
        executor = self.threads if launch.kind is LaunchKind.NATIVE else self.tasks
        try:
            if launch.ticket is None:
                launch.ticket = executor.construct(launch)
                launch.state = LaunchState.REGISTERED
            launch.state = LaunchState.SUBMITTING
            executor.submit(launch.ticket)
        except Exception as error:  # noqa: BLE001  an executor's failure is an input: the launch is held where it stands
            self._hold(launch, error)

    async def _wait(self, launch: Launch) -> None:
        """Sleep until the launch is back or given up, or its ticket is offered."""
        task = trio.lowlevel.current_task()
        launch.caller = lambda: trio.lowlevel.reschedule(task)
        if launch.kind not in _END_WITH_THEIR_WAITER:
            await trio.lowlevel.wait_task_rescheduled(refuse_abort)
            return
        refused: list[Callable[[], object]] = []

        def aborted(raise_cancel: Callable[[], object]) -> trio.lowlevel.Abort:
            if self._withdraw(launch):
                return trio.lowlevel.Abort.SUCCEEDED
            refused.append(raise_cancel)
            if launch.scope is not None:
                launch.scope.cancel()
            return trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(aborted)
        if launch.scope is not None and launch.scope.cancelled_caught:
            refused[0]()

    def _withdraw(self, launch: Launch) -> bool:
        """Use the ticket up, because the waiter leaves; False if it was claimed before, so that something runs."""
        ticket = launch.ticket
        if ticket is not None and not ticket.cancel() and ticket.state is not TicketState.CANCELLED:
            return False
        launch.caller = None
        launch.state = LaunchState.FAILED
        if launch.hold is not None:
            self._room.holds.end(launch.hold, "withdraw")
        return True

    @contextmanager
    def _kept_outside(self, launch: Launch) -> Generator[None]:
        """Keep a Run from ending while something of it is outside the loop."""
        entry = launch.entry
        self.launches[id(launch)] = launch
        entry.outside += 1
        try:
            yield
        finally:
            self._forget(launch)
            entry.outside -= 1
            resume, entry.inside = entry.inside, None
            if resume is not None:
                resume()

    async def _enter_thread(self, launch: Launch, ticket: Ticket) -> None:
        """Run an offered ticket in a thread, entered by this task; held if there can be none."""
        if launch.hold is not None:
            # It was accepted after all, and only the answer was lost.
            self._room.holds.end(launch.hold, "retry")
        work = foreign_work()
        work.begin()
        try:
            await trio.to_thread.run_sync(
                lambda: Context().run(_run_in_thread, ticket),
                # Where a process is looked at from outside, nothing else tells whose thread it is.
                thread_name=f"run {launch.entry.run_id}",
                limiter=self.limiter,
            )
        except trio.Cancelled:
            # Cancelled before a thread was free.
            self._withdraw(launch)
            raise
        except Exception as error:  # noqa: BLE001  the callback's own errors are kept, so no thread could be started
            self._hold(launch, error)
        else:
            ticket.exited = True
        finally:
            work.end()

    def _hold(self, launch: Launch, error: BaseException) -> None:
        launch.hold = self._room.holds.add(
            launch.entry,
            launch.kind.value,
            error,
            partial(self._resolved, launch),
            kind=HoldKind.LAUNCH,
            launch_id=launch.id,
        )

    def _resolved(self, launch: Launch, action: str) -> None:
        """Let go of a held launch: taken up again, or given up, so that its ticket never runs."""
        launch.hold = None
        if action != "abandon":
            return
        if launch.ticket is not None:
            launch.ticket.cancel()
        launch.state = LaunchState.FAILED
        launch.error = None
        launch.tell()

    @trio.lowlevel.enable_ki_protection
    async def _run_ticket(self, ticket: Ticket) -> None:
        """Run a submitted ticket as a task, if nobody has."""
        if not ticket.claim():
            return
        launch = ticket.launch
        if launch.hold is not None:
            # It was accepted after all, and only the answer was lost.
            self._room.holds.end(launch.hold, "retry")
        current_entry.set(launch.entry)
        launch.state = LaunchState.RUNNING
        try:
            if launch.scope is None:
                launch.result = await launch.fn()
            else:
                with launch.scope:
                    launch.result = await launch.fn()
        except BaseException as error:  # noqa: ASYNC103, BLE001  delivered to the caller, or to the room if nobody else may have it
            launch.error = error
            launch.state = LaunchState.FAILED
            if not isinstance(error, Exception):
                self._room.interrupt(error)
        else:
            launch.state = LaunchState.RETURNED
        ticket.finish()
        if launch.kind is LaunchKind.JOIN and not self._acknowledges(launch):
            launch.state = LaunchState.FAILED
            self._hold(launch, launch.error or TypeError("the join gave no sentinel of its family"))
            return
        launch.tell()

    def _acknowledges(self, launch: Launch) -> bool:
        """Only the family's own sentinel says that it returned; True, None or another family's say nothing."""
        sentinel = launch.result
        return (
            launch.state is LaunchState.RETURNED
            and type(sentinel) is FamilyReturned
            and sentinel == FamilyReturned(launch.entry.run_id, self._room.incarnation)
        )


def _run_in_thread(ticket: Ticket) -> None:
    """Run a submitted ticket in this thread, if nobody has."""
    if not ticket.claim():
        return
    launch = ticket.launch
    current_entry.set(launch.entry)
    launch.state = LaunchState.RUNNING
    try:
        launch.result = launch.fn()
    except BaseException as error:  # noqa: ASYNC103, BLE001  delivered to the caller
        launch.error = error
        launch.state = LaunchState.FAILED
    else:
        launch.state = LaunchState.RETURNED
    ticket.finish()


def _result_of(launch: Launch) -> Any:
    """Give the result of a launch that is over.

    Raises:
        BaseException: what its callback raised.
        LaunchGivenUpError: it was given up.
    """
    error, launch.error = launch.error, None
    if error is not None:
        try:
            raise error
        finally:
            # The traceback holds this frame.
            del error
    if launch.state is not LaunchState.RETURNED:
        raise LaunchGivenUpError(launch.entry.run_id)
    return launch.result


def _run_outside() -> None:
    """Stand for the callback of a process."""
    raise AssertionError("a process is never run by the pool")
