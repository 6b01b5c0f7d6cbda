"""Launches of a simulated room: the executor refuses some, takes some without an answer, and threads take virtual time.

A real thread would end all determinism. So a native launch runs in the loop here, after a while for a free thread and
a while in it, during which its Run may be cancelled and everything else goes on.
"""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING

import trio

from spindel.runs._frontier import current_entry
from spindel.runs._launch import Ticket
from spindel.runs._states import LaunchState, TicketState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.runs import Executor, Launch, Room
    from spindel.testing.simulation._history import History
    from spindel.testing.simulation._plan import Part

__all__ = ["simulate_launches"]


class LaunchRefusedError(Exception):
    """A simulated executor refused a launch, or lost its answer."""


def simulate_launches(
    room: Room, history: History, pause: Callable[[], Awaitable[None]], next_fault: Callable[[], Part | None]
) -> None:
    """Put simulated executors into a room's worker pool.

    Args:
        room: the room.
        history: where it is noted.
        pause: takes as long as a hop to a thread.
        next_fault: gives what the next launch meets.
    """
    room.pool.tasks = _FaultyExecutor(room.pool.tasks, history, next_fault)
    room.pool.threads = _FaultyExecutor(_VirtualThreads(room, pause), history, next_fault)


class _FaultyExecutor:
    """Passes tickets on; what is planned is refused before it is taken, or taken and answered with an error."""

    def __init__(self, executor: Executor, history: History, next_fault: Callable[[], Part | None]) -> None:
        self._executor = executor
        self._history = history
        self._next_fault = next_fault
        self._met = 0.0

    def construct(self, launch: Launch) -> Ticket:
        fault = self._next_fault()
        self._met = 1.0 if fault is None else fault.choice
        if self._met < 1 / 3:
            self._history.note("no ticket could be made")
            raise LaunchRefusedError
        return self._executor.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        # A recovery submits again; the fault was met once.
        met, self._met = self._met, 1.0
        if met < 2 / 3:
            self._history.note("a launch is refused")
            raise LaunchRefusedError
        self._executor.submit(ticket)
        if met < 1:
            self._history.note("a launch is taken, and the answer lost")
            raise LaunchRefusedError


class _VirtualThreads:
    """Runs native tickets in the loop, as threads would: some time later, deaf to cancellation."""

    def __init__(self, room: Room, pause: Callable[[], Awaitable[None]]) -> None:
        self._room = room
        self._pause = pause

    def construct(self, launch: Launch) -> Ticket:
        return Ticket(launch)

    def submit(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.NEW:
            trio.lowlevel.spawn_system_task(self._run, ticket, name="thread")

    async def _run(self, ticket: Ticket) -> None:
        await self._pause()
        if not ticket.claim():
            return
        launch = ticket.launch
        if launch.hold is not None:
            # It was accepted after all, and only the answer was lost.
            self._room.holds.end(launch.hold, "retry")
        launch.state = LaunchState.RUNNING
        await self._pause()
        context = Context()
        context.run(current_entry.set, launch.entry)
        try:
            launch.result = context.run(launch.fn)
        except BaseException as error:  # noqa: ASYNC103, BLE001  delivered to the caller
            launch.error = error
            launch.state = LaunchState.FAILED
        else:
            launch.state = LaunchState.RETURNED
        ticket.finish()
        ticket.exited = True
        launch.tell()
