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
    from spindel.runs import Executor, Launch, Room
    from spindel.testing.simulation._world import World

__all__ = ["simulate_launches"]


class LaunchRefusedError(Exception):
    """A simulated executor refused a launch, or lost its answer."""


def simulate_launches(room: Room, world: World) -> None:
    """Put simulated executors into a room's worker pool."""
    room.pool.tasks = _FaultyExecutor(room.pool.tasks, world)
    room.pool.threads = _FaultyExecutor(_VirtualThreads(room, world), world)


class _FaultyExecutor:
    """Passes tickets on; what is planned is refused before it is taken, or taken and answered with an error."""

    def __init__(self, executor: Executor, world: World) -> None:
        self._executor = executor
        self._world = world
        self._met = 0.0

    def construct(self, launch: Launch) -> Ticket:
        fault = self._world.next_launch_fault()
        self._met = 1.0 if fault is None else fault.choice
        if self._met < 1 / 3:
            self._world.history.note("no ticket could be made")
            raise LaunchRefusedError
        return self._executor.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        # A recovery submits again; the fault was met once.
        met, self._met = self._met, 1.0
        if met < 2 / 3:
            self._world.history.note("a launch is refused")
            raise LaunchRefusedError
        self._executor.submit(ticket)
        if met < 1:
            self._world.history.note("a launch is taken, and the answer lost")
            raise LaunchRefusedError


class _VirtualThreads:
    """Runs native tickets in the loop, as threads would: some time later, deaf to cancellation."""

    def __init__(self, room: Room, world: World) -> None:
        self._room = room
        self._world = world

    def construct(self, launch: Launch) -> Ticket:
        return Ticket(launch)

    def submit(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.NEW:
            trio.lowlevel.spawn_system_task(self._run, ticket, name="thread")

    async def _run(self, ticket: Ticket) -> None:
        await self._world.pause()
        if not ticket.claim():
            return
        launch = ticket.launch
        if launch.hold is not None:
            # It was accepted after all, and only the answer was lost.
            self._room.holds.end(launch.hold, "retry")
        launch.state = LaunchState.RUNNING
        await self._world.pause()
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
