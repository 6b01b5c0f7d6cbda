"""`simulate`: play a scenario under many seeds, and tell the first failure so that one command shows it again."""

from __future__ import annotations

import gc
import shlex
from typing import TYPE_CHECKING, Final

import attrs

from spindel.testing.simulation._engine import play, quiet
from spindel.testing.simulation._plan import Faults, draw_plan
from spindel.testing.simulation._registry import SCENARIOS
from spindel.testing.simulation._rules import INVARIANTS
from spindel.testing.simulation._shrinking import shrink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from spindel.store import StorePart
    from spindel.testing.simulation._engine import Played
    from spindel.testing.simulation._invariants import Invariant
    from spindel.testing.simulation._plan import Plan, StoreKind
    from spindel.testing.simulation._world import World

__all__ = ["DEFAULT_STEPS", "SimulationError", "SimulationReport", "simulate"]

DEFAULT_STEPS: Final = 12
_LINES_TOLD: Final = 40
_COLLECT_EVERY: Final = 200


@attrs.frozen(kw_only=True)
class SimulationReport:
    """What many schedules came to, all of them well.

    Attributes:
        seeds: how many were played.
        steps: steps of tasks.
        writes: writes to the store, repeats included.
        lives: how often the program was started; more than `seeds` by the crashes and cut ends.
        seconds: of the processor.
    """

    seeds: int
    steps: int
    writes: int
    lives: int
    seconds: float


class SimulationError(AssertionError):
    """A schedule failed; the message tells how to play it again.

    Attributes:
        seed: the seed.
        kind: the broken rule, or the class of what was raised.
        plan: what the smallest schedule that still fails meets.
        command: plays it again with a trace; None if the scenario can't be named, being inside a function.
        trace: that trace, line by line.
    """

    def __init__(self, name: str, first: Played, smallest: Played, command: str | None) -> None:
        assert smallest.failure is not None, "an error needs a failure"
        self.seed = first.plan.seed
        self.kind = smallest.failure.kind
        self.plan = smallest.plan
        self.command = command
        self.trace = tuple(smallest.history.lines())
        parts = " ".join(part.label for part in smallest.plan.parts) or "nothing"
        again = command or f"simulate({name}, seeds=[{self.seed}], omit={sorted(self.plan.omitted)}, trace=True)"
        omitted = len(self.trace) - _LINES_TOLD
        super().__init__(
            "\n".join(
                (
                    f"scenario {name}, seed {self.seed}: {smallest.failure.text}",
                    f"left of {len(first.plan.parts)} parts on a {self.plan.store} store: {parts}",
                    f"play it again: {again}",
                    *([f"... {omitted} lines before"] if omitted > 0 else []),
                    *self.trace[-_LINES_TOLD:],
                )
            )
        )


def simulate(
    scenario: Callable[[World], Awaitable[object]],
    *,
    seeds: int | Iterable[int] = 100,
    faults: Faults | None = None,
    steps: int | None = None,
    store: StoreKind | None = None,
    invariants: Sequence[type[Invariant]] = INVARIANTS,
    parts: tuple[StorePart, ...] = (),
    omit: Collection[str] = (),
    trace: bool = False,
    progress: Callable[[Played], object] | None = None,
) -> SimulationReport:
    """Play a scenario under many seeds, each of which decides one schedule.

    A seed decides in which order tasks go on, how the virtual time passes, which ids are made, which writes fail and
    how, what is cancelled after which step, and when the process dies; after that the scenario is called again, as a
    program is started again. It is called outside Trio, and no schedule needs a thread or waits in real time.

    Args:
        scenario: the program: an async function of a `World`.
        seeds: which; a number means that many, from 0.
        faults: what goes wrong at most; `Faults.none()` for schedules alone.
        steps: how many steps `World.steps` gives at most.
        store: `memory` or `sqlite` only; by default the seed decides.
        invariants: the rules over each history; add yours to `INVARIANTS`.
        parts: what layers above keep in the store.
        omit: labels of parts to leave out, as a failure tells them.
        trace: print the trace of each schedule.
        progress: called after each schedule.

    Raises:
        SimulationError: a schedule failed; it was made as small as possible first.
    """
    faults = Faults() if faults is None else faults
    known = _registered(scenario)
    if steps is None:
        steps = DEFAULT_STEPS if known is None else SCENARIOS[known].steps
    played = all_steps = writes = lives = 0
    seconds = 0.0

    def replay(plan: Plan, *, traced: bool = False) -> Played:
        return play(scenario, plan, invariants=invariants, parts=parts, trace=traced)

    with quiet():
        for seed in range(seeds) if isinstance(seeds, int) else seeds:
            plan = draw_plan(seed, faults, steps, store)
            result = replay(plan.without(omit) if omit else plan, traced=trace)
            if trace:
                print("\n".join(result.history.lines()))  # noqa: T201  asked for
            if progress is not None:
                progress(result)
            if result.failure is not None:
                smallest = replay(shrink(result, replay).plan, traced=True)
                command = _command(scenario, smallest.plan, faults, steps, store)
                raise SimulationError(_name(scenario), result, smallest, command) from result.failure.error
            played += 1
            all_steps += result.steps
            writes += result.history.writes
            lives += result.lives
            seconds += result.seconds
            if played % _COLLECT_EVERY == 0:
                gc.collect()
    return SimulationReport(seeds=played, steps=all_steps, writes=writes, lives=lives, seconds=seconds)


def _registered(scenario: object) -> str | None:
    return next((name for name, known in SCENARIOS.items() if known.play is scenario), None)


def _name(scenario: object) -> str:
    return _registered(scenario) or str(getattr(scenario, "__qualname__", type(scenario).__qualname__))


def _command(
    scenario: Callable[[World], Awaitable[object]], plan: Plan, faults: Faults, steps: int, store: StoreKind | None
) -> str | None:
    """Give the command that plays a plan again, or None if it can't name the scenario."""
    name = _registered(scenario)
    if name is None:
        function = getattr(scenario, "__qualname__", "<")
        if "<" in function or "." in function or scenario.__module__ == "__main__":
            return None
        name = f"{scenario.__module__}:{function}"
    words = ["python", "-m", "spindel.testing.simulation", "--scenario", name, "--seed", str(plan.seed), "--trace"]
    if name not in SCENARIOS or steps != SCENARIOS[name].steps:
        words += ["--steps", str(steps)]
    if str(faults):
        words += ["--faults", str(faults)]
    if store is not None:
        words += ["--store", store]
    if plan.omitted:
        words += ["--omit", ",".join(sorted(plan.omitted))]
    return shlex.join(words)
