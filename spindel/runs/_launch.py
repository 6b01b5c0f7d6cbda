"""Launches: what the pool is to run, the ticket that runs it at most once, and the executors that take tickets."""

from __future__ import annotations

import threading
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from spindel.ids import LaunchId
from spindel.runs._states import LaunchKind, LaunchState, TicketState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import trio

    from spindel.runs._entry import Entry
    from spindel.runs._holds import Hold
    from spindel.runs._room import Room

__all__ = ["Executor", "Launch", "TaskExecutor", "ThreadExecutor", "Ticket"]


class Ticket:
    """A permission to run a launch, usable once, claimed from any thread.

    Attributes:
        launch: the launch it belongs to.
        exited: True once its executor has reported that whatever ran it is over.
    """

    __slots__ = ("_lock", "_state", "exited", "launch")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.exited = False
        self._state = TicketState.NEW
        self._lock = threading.Lock()

    @property
    def id(self) -> LaunchId:
        """The id of its launch."""
        return self.launch.id

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

    __slots__ = (
        "_id",
        "caller",
        "entry",
        "error",
        "fn",
        "hold",
        "kind",
        "offered",
        "result",
        "room",
        "scope",
        "state",
        "ticket",
    )

    def __init__(self, room: Room, kind: LaunchKind, fn: Callable[[], Any], entry: Entry) -> None:
        self.room = room
        self.kind = kind
        # Async for a task, a plain function for a thread.
        self.fn = fn
        self.entry = entry
        self._id: LaunchId | None = None
        self.ticket: Ticket | None = None
        self.state = LaunchState.RETAINED
        self.result: Any = None
        self.error: BaseException | None = None
        self.hold: Hold | None = None
        # Called once, in the turn in which the launch has come back or was given up, or its ticket is offered.
        self.caller: Callable[[], None] | None = None
        # A thread's ticket that was submitted, for the task that waits for it to enter the thread.
        self.offered: Ticket | None = None
        # Around a callback that ends with its waiter.
        self.scope: trio.CancelScope | None = None

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


class Executor(Protocol):
    """Where launches run: one for tasks, one for threads. A port, so that tests can refuse, lose and delay."""

    def construct(self, launch: Launch) -> Ticket:
        """Make the launch's ticket. May raise; then nothing exists."""
        ...

    def submit(self, ticket: Ticket) -> None:
        """Take a registered ticket, have it run in a later turn, and note on it when that is over.

        May raise before or after it took the ticket.
        """
        ...


@attrs.frozen
class TaskExecutor:
    """Runs tickets as tasks of a nursery, each in a fresh context.

    Attributes:
        nursery: where they run.
        run: runs a ticket, if nobody has.
    """

    nursery: trio.Nursery
    run: Callable[[Ticket], Awaitable[None]]

    def construct(self, launch: Launch) -> Ticket:
        """Make a ticket."""
        return Ticket(launch)

    def submit(self, ticket: Ticket) -> None:
        """Start the task."""
        Context().run(self.nursery.start_soon, self._run, ticket)

    async def _run(self, ticket: Ticket) -> None:
        await self.run(ticket)
        ticket.exited = True


class ThreadExecutor:
    """Hands tickets to the tasks that wait for them, each of which enters its own thread.

    A task of the pool's could enter it, too. But `trio.from_thread` calls back into the task that entered the thread,
    and that has to be the caller's: it is in its cancel scopes, holds its locks, and its frontiers cover it.
    """

    def construct(self, launch: Launch) -> Ticket:
        """Make a ticket."""
        return Ticket(launch)

    def submit(self, ticket: Ticket) -> None:
        """Offer it."""
        ticket.launch.offered = ticket
        ticket.launch.tell()
