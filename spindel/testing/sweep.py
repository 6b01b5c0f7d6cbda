"""Act between every two steps of a program in turn: cancel it there, close its room there, take its room away there.

A program that is right wherever it is interrupted has no schedule that breaks it. So a test doesn't guess the moment:
it runs its scenario again and again, acts after the first step, then after the second, until there are none left.

    async def scenario(steps: Steps) -> None:
        async with open_room(store(), name="orders") as room:
            run = await room.start(program)
            steps.arm(run.cancel)
        ...  # what must hold, wherever it was cancelled

    assert await sweep_steps(scenario) > 100

A step is what one task does between two checkpoints, whatever task it is, also one of Trio's or of the store.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Steps", "sweep_steps"]

STEPS_MAX: Final = 10_000
"""`sweep_steps` gives up there: a scenario that never ends never runs out of steps."""


class Steps(trio.abc.Instrument):
    """Counts the steps of one attempt, and acts once. Made by `sweep_steps`.

    Attributes:
        number: after how many steps from `arm` on it acts.
        fired: True once it has acted.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.fired = False
        self._left = number
        self._action: Callable[[], object] | None = None
        self._problem: BaseException | None = None

    def arm(self, action: Callable[[], object]) -> None:
        """Count from here on, and call `action()` after the n-th step: between two steps, as another task might.

        Args:
            action: a plain function, such as `run.cancel` or an event's `set`. What it raises fails the attempt.
        """
        self._action = action

    def disarm(self) -> None:
        """Count no further: what comes now, such as the checks, isn't part of the program."""
        self._action = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002  any task's steps count
        """Count a step; called by Trio."""
        if self._action is None or self.fired:
            return
        self._left -= 1
        if self._left > 0:
            return
        self.fired = True
        try:
            self._action()
        except BaseException as problem:  # noqa: ASYNC103, BLE001  Trio would only log what an instrument raises
            self._problem = problem

    def check(self) -> None:
        """Raise what the action raised."""
        if self._problem is not None:
            raise self._problem


async def sweep_steps(scenario: Callable[[Steps], Awaitable[object]], *, first: int = 1, every: int = 1) -> int:
    """Run a scenario again and again, acting after its first step, then after its second, until it has no more.

    Each attempt must leave nothing behind: no task, and no thread of spindel's.

    Args:
        scenario: opens what it needs, arms the steps, and checks what must hold whatever happened.
        first: the first step to act after.
        every: act after every so many steps only, where each attempt is dear.

    Returns:
        After how many different steps it acted.

    Raises:
        AssertionError: an attempt left something behind, or the scenario still had steps after 10,000.
    """
    for acted, number in enumerate(count(first, every)):
        assert number < STEPS_MAX, f"the scenario took more than {STEPS_MAX} steps"
        tasks_before, threads_before = _count_tasks(), _own_threads()
        steps = Steps(number)
        trio.lowlevel.add_instrument(steps)
        try:
            await scenario(steps)
            steps.check()
        except BaseException as problem:
            problem.add_note(f"while acting after step {number}")
            raise
        finally:
            trio.lowlevel.remove_instrument(steps)
        assert _count_tasks() == tasks_before, f"acting after step {number} left a task behind"
        left = _own_threads() - threads_before
        assert not left, f"acting after step {number} left threads behind: {sorted(left)}"
        if not steps.fired:
            return acted
    raise AssertionError  # pragma: no cover  count() has no end


def _count_tasks() -> int:
    root = trio.lowlevel.current_root_task()
    assert root is not None, "called inside a loop"
    tasks = 0
    pending = [root]
    while pending:
        task = pending.pop()
        tasks += 1
        pending.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)
    return tasks


def _own_threads() -> set[str]:
    # Others, such as Trio's idle ones, come and go as they like.
    return {f"{thread.name} {thread.ident}" for thread in threading.enumerate() if thread.name.startswith("spindel")}
