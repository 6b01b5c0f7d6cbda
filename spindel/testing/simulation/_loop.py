"""One Trio run that a seed decides: the order of tasks, the time, what happens after which step, and when it dies.

Trio orders the tasks of a tick at random. Here the order comes from the schedule's own randomness, over tasks sorted by
their age, so nothing that differs between two processes (addresses, hash seeds, threads) has a say in it. Time is a
`MockClock` that jumps whenever every task waits.

Two private names of Trio make this possible; hypothesis and pytest-trio use the same two for the same purpose, and one
test guards them. Everything else is public: steps are counted by an instrument, and a run is killed by a clock that
raises where Trio's loop asks for the time.

A killed run is dropped as a killed process is: no `finally`, no `except` and no `__aexit__` of its tasks runs any more.
Python would run them as soon as it collects the tasks, so what is left of such a run is kept for good; it costs some
hundred kilobytes. `bury` does that with a record that its collector doesn't see and that refers to itself.
"""

from __future__ import annotations

from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import trio
import trio._core._run as trio_run
from trio.testing import MockClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from random import Random  # noqa: TID251  for annotations

__all__ = ["STEPS_MAX", "VIRTUAL_SECONDS_MAX", "Loop", "Order", "StuckError"]

STEPS_MAX: Final = 100_000
"""A schedule with more steps is taken for one that never ends."""

VIRTUAL_SECONDS_MAX: Final = 7 * 24 * 3600.0
"""As `STEPS_MAX`, in virtual time."""

_IDLE_MAX: Final = 3


class StuckError(AssertionError):
    """A schedule can't end: every task waits for something that nobody will do, or it goes on for ever."""


class _KilledError(BaseException):
    """Ends Trio's loop from the inside."""


class Order:
    """Puts the tasks of a tick in order; stands in for Trio's own source of randomness.

    Args:
        random: decides, or None for the order of their age.
        by_priority: give each task a priority when it is first seen and change it now and then, instead of a new
            order in each tick. Some races need one task to stay behind for long, which uniform orders hardly do.
    """

    def __init__(self, random: Random | None, *, by_priority: bool = False) -> None:
        self._random = random
        self._priorities: dict[trio.lowlevel.Task, float] | None = {} if by_priority else None
        # The tasks that are still to run in this tick; the last one is the next.
        self.batch: list[trio.lowlevel.Task] = []
        self.begin_tick: Callable[[], None] = lambda: None

    def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:
        """Order a tick's tasks in place; called by Trio, between two ticks."""
        self.batch = batch
        self.begin_tick()
        random, priorities = self._random, self._priorities
        if random is None:
            # The last one is the next, and Trio has sorted them by age.
            batch.reverse()
            return
        if priorities is None:
            random.shuffle(batch)
            return
        for task in batch:
            if task not in priorities or random.random() < 0.02:
                priorities[task] = random.random()
        batch.sort(key=priorities.__getitem__)


class Loop(trio.abc.Instrument):
    """One run: `run` plays it to its end, or until it is killed.

    Args:
        order: of the tasks.
        steps: how many steps the schedule has taken before this run.

    Attributes:
        clock: the run's virtual clock.
        steps: how many steps there were so far; a step is what one task does between two checkpoints.
        at_step: what is done after which step, between two steps, as another task might do it.
        each_tick: called before each tick; what it raises fails the schedule.
        each_step: called with the task before each step, if set: for traces.
        killed: why the run was dropped, or None.
        failure: what was raised by something called from here, or why the run is stuck.
    """

    def __init__(self, order: Order, steps: int = 0) -> None:
        self.clock = MockClock(autojump_threshold=0)
        self.steps = steps
        self.at_step: dict[int, Callable[[], object]] = {}
        self.each_tick: Callable[[], object] | None = None
        self.each_step: Callable[[trio.lowlevel.Task], object] | None = None
        self.killed: str | None = None
        self.failure: BaseException | None = None
        self._order = order
        self._idle = 0
        self._over = False
        # The class itself can't be extended.
        self._now = self.clock.current_time
        self._sleep_time = self.clock.deadline_to_sleep_time
        self.clock.current_time = self._current_time  # type: ignore[method-assign]
        self.clock.deadline_to_sleep_time = self._deadline_to_sleep_time  # type: ignore[method-assign]
        order.begin_tick = self._begin_tick

    def run(self, main: Callable[[], Awaitable[object]]) -> None:
        """Run `main` to its end, whatever that is.

        Raises:
            BaseException: what `main` raised.
        """
        with _ordered_by(self._order):
            try:
                trio.run(main, clock=self.clock, instruments=[self])
            except trio.TrioInternalError as error:
                if not isinstance(error.__cause__, _KilledError):
                    raise
            finally:
                self._over = True

    def kill(self, why: str) -> None:
        """Drop the run after the present step. Called from within the loop: by a task, or between two steps.

        A task that calls it must not go on: let it wait for something that never comes.
        """
        if self.killed is not None:
            return
        self.killed = why
        bury(trio.lowlevel.current_root_task())
        self._order.batch.clear()

    def fail(self, problem: BaseException) -> None:
        """Drop the run because of a problem."""
        if self.failure is None:
            self.failure = problem
        self.kill("failed")

    # -- Trio's calls ------------------------------------------------------------------------------------------------

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Tell a trace which task goes on."""
        if self.each_step is not None:
            self.each_step(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002  any task's steps count
        """Count a step and do what is due."""
        self._idle = 0
        self.steps += 1
        action = self.at_step.pop(self.steps, None)
        if action is None or self.killed is not None:
            return
        try:
            action()
        except BaseException as problem:  # noqa: ASYNC103, BLE001  Trio would only log what an instrument raises
            self.fail(problem)

    def _begin_tick(self) -> None:
        if self.steps > STEPS_MAX or self._now() > VIRTUAL_SECONDS_MAX:
            self.fail(
                StuckError(f"it goes on for ever; so far {self.steps} steps and {self._now():.0f} virtual seconds")
            )
        elif self.each_tick is not None and self.killed is None:
            try:
                self.each_tick()
            except Exception as problem:  # noqa: BLE001  a rule that is broken; told by whoever plays
                self.fail(problem)

    def _current_time(self) -> float:
        if self.killed is not None and not self._over:
            raise _KilledError
        return self._now()

    def _deadline_to_sleep_time(self, deadline: float) -> float:
        # Asked only while no task can run. Without a deadline nothing but a call from outside could go on, and there
        # is no outside; some rounds are let pass for calls that are already on their way.
        if deadline == inf:
            self._idle += 1
            if self._idle > _IDLE_MAX and self.killed is None:
                self.fail(StuckError("every task waits, and nothing will wake one:\n" + _parked_tasks()))
                raise _KilledError
        return self._sleep_time(deadline)


def _parked_tasks() -> str:
    root = trio.lowlevel.current_root_task()
    assert root is not None, "called inside a loop"
    lines: list[str] = []
    pending = [root]
    for task in pending:
        pending.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)
        frames = [f"{frame.f_code.co_name}:{line}" for frame, line in task.iter_await_frames()]
        lines.append(f"  {task.name}: {' > '.join(frames[-4:])}")
    return "\n".join(sorted(lines))


@contextmanager
def _ordered_by(order: Order) -> Generator[None]:
    """Let an `Order` stand in for Trio's source of randomness for the length of a block."""
    names = cast("Any", trio_run)
    before = names._r, names._ALLOW_DETERMINISTIC_SCHEDULING
    names._r, names._ALLOW_DETERMINISTIC_SCHEDULING = order, True
    try:
        yield
    finally:
        names._r, names._ALLOW_DETERMINISTIC_SCHEDULING = before


class _Grave(msgspec.Struct, gc=False):
    """Refers to itself out of the collector's sight, so neither it nor what it keeps is ever collected."""

    kept: Any
    itself: Any = None


def bury(kept: object) -> None:
    """Keep an object for good."""
    grave = _Grave(kept)
    grave.itself = grave
