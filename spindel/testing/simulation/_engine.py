"""Playing a plan: one life of the program after the other, then the rules over everything that happened."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from time import process_time
from typing import TYPE_CHECKING, cast

import attrs

from spindel.testing.simulation._disk import make_disk
from spindel.testing.simulation._history import History
from spindel.testing.simulation._invariants import InvariantError, check_invariants
from spindel.testing.simulation._loop import Loop, Order, StuckError
from spindel.testing.simulation._rules import INVARIANTS
from spindel.testing.simulation._world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from spindel.store import StorePart
    from spindel.testing.simulation._invariants import Invariant
    from spindel.testing.simulation._plan import Plan

__all__ = ["Failure", "Played", "play", "quiet"]


@attrs.frozen
class Failure:
    """What went wrong in a schedule.

    Attributes:
        kind: a broken rule's name, or the class of what was raised; two failures of one kind are taken for the same.
        error: what was raised.
        step: after how many steps.
    """

    kind: str
    error: BaseException
    step: int

    @property
    def text(self) -> str:
        """Tell it in one piece."""
        problem = _leaf(self.error)
        said = str(problem) or type(problem).__name__
        return said if isinstance(problem, InvariantError | StuckError) else f"{type(problem).__name__}: {said}"


@attrs.frozen
class Played:
    """One schedule, played.

    Attributes:
        plan: what it was.
        failure: what went wrong, or None.
        history: what happened.
        steps: how many steps of tasks it took.
        lives: how often the program was started.
        seconds: how much of the processor it took.
    """

    plan: Plan
    failure: Failure | None
    history: History
    steps: int
    lives: int
    seconds: float


def play(
    scenario: Callable[[World], Awaitable[object]],
    plan: Plan,
    *,
    invariants: Sequence[type[Invariant]] = INVARIANTS,
    parts: tuple[StorePart, ...] = (),
    trace: bool = False,
) -> Played:
    """Play a plan to its end. The same plan gives the same history, in any process.

    Args:
        scenario: the program.
        plan: see `draw_plan`.
        invariants: the rules that are checked at the end.
        parts: what layers above keep in the store.
        trace: let the history keep every step.
    """
    began = process_time()
    history = History(trace=trace)
    disk = make_disk(plan.store, parts)
    steps = 0
    world = World(plan, history, disk)
    order = Order(plan.stream("order") if plan.has("order") else None, by_priority=plan.has("priorities"))
    failure: Failure | None = None
    try:
        while True:
            loop = world.loop = Loop(order, steps)
            if trace:
                loop.each_step = history.stepped
            problem = _run(loop, world, scenario)
            steps = loop.steps
            if problem is not None:
                failure = Failure(_kind(problem), problem, steps)
                break
            if not world.restart(loop.killed):
                break
        if failure is None:
            failure = _check(history, invariants, steps)
    finally:
        disk.close()
    return Played(plan, failure, history, steps, world.incarnation + 1, process_time() - began)


def _run(loop: Loop, world: World, scenario: Callable[[World], Awaitable[object]]) -> BaseException | None:
    async def main() -> None:
        await world.live(scenario)

    try:
        loop.run(main)
    except Exception as problem:  # noqa: BLE001  whatever it is, the schedule has failed
        return loop.failure or problem
    return loop.failure


def _check(history: History, invariants: Sequence[type[Invariant]], steps: int) -> Failure | None:
    try:
        check_invariants(history, invariants)
    except Exception as problem:  # noqa: BLE001  a rule may be anybody's
        return Failure(_kind(problem), problem, steps)
    return None


def _kind(problem: BaseException) -> str:
    leaf = _leaf(problem)
    return leaf.rule if isinstance(leaf, InvariantError) else type(leaf).__name__


def _leaf(problem: BaseException) -> BaseException:
    while isinstance(problem, BaseExceptionGroup):
        problem = cast("BaseExceptionGroup[BaseException]", problem).exceptions[0]
    return problem


@contextmanager
def quiet() -> Generator[None]:
    """Play many schedules: without logs, and with a collector that comes only when it is called.

    A collection at an accidental moment finishes what was dropped there, so it doesn't belong into a schedule; and
    nothing of ours leaves much to it.
    """
    logger = logging.getLogger("spindel")
    level, enabled = logger.level, gc.isenabled()
    logger.setLevel(logging.CRITICAL + 1)
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
        logger.setLevel(level)
