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
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple, cast

import attrs
import trio

from spindel.clock import foreign_work
from spindel.errors import (
    FamilySealedError,
    LaunchNotRecoverableError,
    NotHeldError,
    RunAbandonedError,
    StaleRevisionError,
)
from spindel.ids import LaunchId
from spindel.runs._entry import FamilyReturned
from spindel.runs._frontier import bind_launch, current_entry, launch_frontier
from spindel.runs._parking import park
from spindel.runs._states import HoldKind, LaunchKind, LaunchState, TicketState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from spindel.ids import Revision
    from spindel.runs._entry import Entry, FamilyState
    from spindel.runs._holds import Hold
    from spindel.runs._room import Room

__all__ = ["Executor", "Launch", "LaunchGivenUpError", "TaskExecutor", "Ticket", "WorkerPool"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Ticket:
    """A permission to run a launch, usable once, claimed from any thread.

    Args:
        launch_id: the launch it belongs to.
    """

    __slots__ = ("_lock", "_state", "id")

    def __init__(self, launch_id: LaunchId) -> None:
        self.id = launch_id
        self._state = TicketState.NEW
        self._lock = threading.Lock()

    @property
    def state(self) -> TicketState:
        """How far it is."""
        return self._state

    def claim(self) -> bool:
        """Take it from NEW to RUNNING; True for the one who did."""
        return self._swap(TicketState.NEW, TicketState.RUNNING)

    def cancel(self) -> bool:
        """Take it from NEW to CANCELLED, so that it never runs."""
        return self._swap(TicketState.NEW, TicketState.CANCELLED)

    def finish(self) -> None:
        """Take it from RUNNING to DONE."""
        self._swap(TicketState.RUNNING, TicketState.DONE)

    def _swap(self, old: TicketState, new: TicketState) -> bool:
        with self._lock:
            if self._state is not old:
                return False
            self._state = new
            return True


class Launch:
    """One callback that the pool is to run, and what became of it."""

    __slots__ = ("_id", "caller", "entry", "error", "exited", "fn", "hold", "kind", "result", "room", "state", "ticket")

    def __init__(self, room: Room, kind: LaunchKind, fn: Callable[[], Awaitable[Any]], entry: Entry) -> None:
        self.room = room
        self.kind = kind
        self.fn = fn
        self.entry = entry
        self._id: LaunchId | None = None
        self.ticket: Ticket | None = None
        self.state = LaunchState.RETAINED
        self.result: Any = None
        self.error: BaseException | None = None
        self.hold: Hold | None = None
        # True once the executor has reported that whatever ran the ticket is over.
        self.exited = False
        # Called once, in the turn in which the launch has come back or was given up.
        self.caller: Callable[[], None] | None = None

    @property
    def id(self) -> LaunchId:
        """The stable id, made when it is first needed."""
        if self._id is None:
            self._id = LaunchId(self.room.next_uuid())
        return self._id

    def tell(self) -> None:
        """Resume whoever waits for it."""
        caller, self.caller = self.caller, None
        if caller is not None:
            caller()


class LaunchGivenUpError(RunAbandonedError):
    """The launch itself was given up by an operator; never what its callback raised."""


class Executor(Protocol):
    """Where launches run. A port, so that tests can refuse, lose and delay."""

    def construct(self, launch: Launch) -> Ticket:
        """Make the launch's ticket. May raise; then nothing exists."""
        ...

    def submit(self, launch: Launch, run: Callable[[Launch], Awaitable[None]]) -> None:
        """Take the launch's registered ticket: `run(launch)` runs it, and `launch.exited` is set when that is over.

        May raise before or after it took the ticket.
        """
        ...


@attrs.frozen
class TaskExecutor:
    """Runs launches as tasks of a nursery, each in a fresh context."""

    nursery: trio.Nursery

    def construct(self, launch: Launch) -> Ticket:
        """Make a ticket."""
        return Ticket(launch.id)

    def submit(self, launch: Launch, run: Callable[[Launch], Awaitable[None]]) -> None:
        """Start the task."""
        Context().run(self.nursery.start_soon, self._run, launch, run)

    async def _run(self, launch: Launch, run: Callable[[Launch], Awaitable[None]]) -> None:
        await run(launch)
        launch.exited = True


class WorkerPool:
    """See the module.

    Args:
        room: the room it belongs to.
        nursery: the shielded nursery that its tasks run in.
        threads_max: how many threads may run at once.
    """

    def __init__(self, room: Room, nursery: trio.Nursery, threads_max: int) -> None:
        self._room = room
        self.tasks: Executor = TaskExecutor(nursery)
        self.limiter = trio.CapacityLimiter(threads_max)
        self.launches: dict[int, Launch] = {}

    async def join(self, entry: Entry, family: FamilyState) -> bool:
        """Wait, on a worker, until a sealed family has returned. Not cancellable.

        Returns:
            True once it has; False if an operator abandoned it, so that its return is unknown.
        """

        async def wait_for_family() -> FamilyReturned:
            if not family.returned:
                await park(lambda resume: setattr(family, "joined", resume))
            return FamilyReturned(entry.run_id, self._room.incarnation)

        launch = Launch(self._room, LaunchKind.JOIN, wait_for_family, entry)
        await self._run_to_end(launch)
        if launch.state is not LaunchState.RETURNED:
            return False
        return not family.abandoned

    async def call(self, kind: LaunchKind, fn: Callable[[], Awaitable[R]], entry: Entry) -> R:
        """Run `fn` as a task of the pool, bound to the Run, and wait for it. Not cancellable.

        Raises:
            BaseException: what `fn` raised.
            RunAbandonedError: the executor never took it, and an operator gave it up.
        """
        launch = Launch(self._room, kind, fn, entry)
        await self._run_to_end(launch)
        if launch.error is not None:
            raise launch.error
        if launch.state is not LaunchState.RETURNED:
            raise LaunchGivenUpError(entry.run_id)
        return cast("R", launch.result)

    async def call_native(self, fn: Callable[[*Ts], R], *args: *Ts, entry: Entry) -> R:
        """Run `fn(*args)` in a thread, bound to the Run, and wait for it.

        Cancellation: a checkpoint while it waits for a free thread; once the thread runs it is waited for.

        Raises:
            BaseException: what `fn` raised.
        """
        mark = launch_frontier()

        def bound() -> R:
            begin()
            current_entry.set(entry)
            bind_launch(mark)
            return fn(*args)

        with self.outside(entry) as begin:
            return await trio.to_thread.run_sync(Context().run, bound, limiter=self.limiter, abandon_on_cancel=False)

    @contextmanager
    def outside(self, entry: Entry) -> Generator[Callable[[], None]]:
        """Register a native launch for the length of a block; its Run doesn't end before the block does.

        The value is to be called, from any thread, when it really begins.

        Raises:
            FamilySealedError: the Run has ended, or its work and family have been joined.
        """
        if entry.joined or not entry.live:
            raise FamilySealedError(entry.run_id)
        launch = Launch(self._room, LaunchKind.NATIVE, _run_outside, entry)
        ticket = launch.ticket = Ticket(launch.id)
        launch.state = LaunchState.SUBMITTING

        def begin() -> None:
            ticket.claim()
            launch.state = LaunchState.RUNNING

        self.launches[id(launch)] = launch
        entry.outside += 1
        work = foreign_work()
        work.begin()
        try:
            yield begin
        finally:
            # Cancelled before a thread was free: its ticket is used up all the same, so that nothing can run it later.
            ticket.cancel()
            ticket.finish()
            work.end()
            del self.launches[id(launch)]
            entry.outside -= 1
            resume = entry.inside
            if resume is not None and not entry.outside:
                entry.inside = None
                resume()

    def start(
        self, kind: LaunchKind, fn: Callable[[], Awaitable[Any]], entry: Entry, back: Callable[[Launch], None]
    ) -> None:
        """Run `fn` as a task of the pool, bound to the Run, and call `back` in the turn in which it has come back."""
        launch = Launch(self._room, kind, fn, entry)

        def came_back() -> None:
            del self.launches[id(launch)]
            back(launch)

        launch.caller = came_back
        self.launches[id(launch)] = launch
        self._advance(launch)

    async def _run_to_end(self, launch: Launch) -> None:
        key = id(launch)
        self.launches[key] = launch
        self._advance(launch)
        # The ticket runs in a later turn at the earliest, so nothing can have come back yet; held, it waits too.
        await park(lambda resume: setattr(launch, "caller", resume))
        del self.launches[key]

    def _advance(self, launch: Launch) -> None:
        """Construct, register, submit: one turn, held where it fails."""
        try:
            if launch.ticket is None:
                launch.ticket = self.tasks.construct(launch)
                launch.state = LaunchState.REGISTERED
            launch.state = LaunchState.SUBMITTING
            self.tasks.submit(launch, self.run_ticket)
        except Exception as error:  # noqa: BLE001  an executor's failure is an input: the launch is held where it stands
            if launch.ticket is None:
                launch.state = LaunchState.RETAINED
            self._hold(launch, error)

    def find(self, launch_id: LaunchId) -> Launch | None:
        """Give an outstanding launch, or None."""
        return next((launch for launch in self.launches.values() if launch.id == launch_id), None)

    def recover(self, launch: Launch, revision: Revision) -> None:
        """Take a held launch up again where it stands, in one turn, with its own callback, id and ticket.

        Raises:
            StaleRevisionError: the hold has another revision by now.
            NotHeldError: it isn't held, and nothing has run.
            LaunchNotRecoverableError: it runs, or has run and is no join.
        """
        hold = launch.hold
        if hold is not None and hold.revision != revision:
            raise StaleRevisionError(f"launch {launch.id}")
        if launch.state is LaunchState.RUNNING:
            raise LaunchNotRecoverableError(launch.id, "launch-running")
        if launch.state in (LaunchState.RETURNED, LaunchState.FAILED) and (
            hold is None or launch.kind is not LaunchKind.JOIN
        ):
            raise LaunchNotRecoverableError(launch.id, "consumed")
        if hold is None:
            raise NotHeldError(f"launch {launch.id}")
        if launch.state is LaunchState.FAILED:
            # Joining is idempotent, so it alone may be attempted anew, once the old attempt is physically over.
            ticket = launch.ticket
            if not launch.exited or ticket is None or ticket.state is not TicketState.DONE:
                raise LaunchNotRecoverableError(launch.id, "launch-running")
            launch.ticket = None
            launch.result = launch.error = None
            launch.exited = False
            launch.state = LaunchState.RETAINED
        elif launch.ticket is not None and launch.ticket.state is TicketState.CANCELLED:
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
        if launch.ticket is not None:
            launch.ticket.cancel()
        self._room.holds.end(hold, "acknowledge")
        launch.tell()
        return True

    def _hold(self, launch: Launch, error: BaseException) -> None:
        launch.hold = self._room.holds.add(
            launch.entry,
            launch.kind.value,
            error,
            lambda action: self._resolved(launch, action),
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
        launch.tell()

    @trio.lowlevel.enable_ki_protection
    async def run_ticket(self, launch: Launch) -> None:
        """Run a submitted launch's ticket, if nobody has; what an executor is given to run."""
        assert launch.ticket is not None, "a ticket is registered before it is submitted"
        if not launch.ticket.claim():
            return
        if launch.hold is not None:
            # It was accepted after all, and only the answer was lost.
            self._room.holds.end(launch.hold, "retry")
        current_entry.set(launch.entry)
        launch.state = LaunchState.RUNNING
        try:
            launch.result = await launch.fn()
        except BaseException as error:  # noqa: ASYNC103, BLE001  delivered to the caller, or to the room if nobody else may have it
            launch.error = error
            launch.state = LaunchState.FAILED
            if not isinstance(error, Exception):
                self._room.interrupt(error)
        else:
            launch.state = LaunchState.RETURNED
        launch.ticket.finish()
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


async def _run_outside() -> None:
    """Stand for the callback of a native launch, which runs in a thread or a process of its own."""
    raise AssertionError("a native launch is never run as a task")
