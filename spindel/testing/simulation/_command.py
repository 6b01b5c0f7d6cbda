"""`python -m spindel.testing.simulation`: many seeds of every scenario, or one of them with its trace."""

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from spindel.testing.simulation._plan import Faults
from spindel.testing.simulation._registry import SCENARIOS, find_scenario
from spindel.testing.simulation._simulate import SimulationError, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spindel.testing.simulation._engine import Played
    from spindel.testing.simulation._registry import Registered

__all__ = ["main"]

_FAILED: Final = 1
_TELL_EVERY: Final = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Gives 0 if every schedule was well, 1 if one failed; wrong arguments exit with 2."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        scenarios = [find_scenario(name) for name in asked.scenario or sorted(SCENARIOS)]
    except LookupError as problem:
        parser.error(str(problem.args[0]))
    if asked.seed is None and (asked.omit or asked.trace):
        parser.error("--omit and --trace need --seed")
    if asked.seed is not None and len(scenarios) != 1:
        parser.error("--seed needs one --scenario")
    told = [_simulate(scenario, asked) for scenario in scenarios]
    if asked.json:
        print(json.dumps({"name": "simulation", "scenarios": told}))  # noqa: T201  the command's output
    return _FAILED if any("failure" in result for result in told) else 0


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {known.name:10} {known.about}" for _, known in sorted(SCENARIOS.items()))
    parser = argparse.ArgumentParser(
        prog="python -m spindel.testing.simulation",
        description="Play scenarios under many seeds; each decides one schedule, with faults and crashes.",
        epilog=f"scenarios:\n{names}\n  module:function, an async function of a World, is one, too",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scenario", action="append", metavar="S", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=_positive, default=300, metavar="N", help="how many seeds of each (300)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    parser.add_argument("--seed", type=int, metavar="K", help="play this seed alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print virtual time, task and event")
    parser.add_argument(
        "--omit", default="", metavar="PARTS", help="with --seed: leave these parts out, comma-separated"
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="how many steps a scenario takes at most")
    parser.add_argument(
        "--faults", type=_faults, default=Faults(), metavar="F", help="'none', or changes: crashes=0,slow=5"
    )
    parser.add_argument("--store", choices=("memory", "sqlite"), help="this store only; else the seed decides")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _simulate(scenario: Registered, asked: argparse.Namespace) -> dict[str, Any]:
    seeds = [asked.seed] if asked.seed is not None else range(asked.first, asked.first + asked.seeds)
    progress = _Progress(scenario.name, len(seeds), silent=asked.json or not sys.stderr.isatty())
    told: dict[str, Any] = {"scenario": scenario.name, "first": seeds[0], "seeds": len(seeds)}
    omit = [label for label in asked.omit.split(",") if label]
    try:
        report = simulate(
            scenario.play,
            seeds=seeds,
            faults=asked.faults,
            steps=asked.steps or scenario.steps,
            store=asked.store,
            omit=omit,
            trace=asked.trace and not asked.json,
            progress=progress,
        )
    except SimulationError as problem:
        told |= {"failure": problem.kind, "seed": problem.seed, "command": problem.command}
        if not asked.json:
            # One line tells it where the whole trace was just shown.
            print(str(problem).partition("\n")[0] if asked.trace else problem)  # noqa: T201  the command's output
        return told
    finally:
        progress.end()
    told |= {"steps": report.steps, "writes": report.writes, "lives": report.lives, "seconds": round(report.seconds, 3)}
    told["schedules_per_minute"] = round(60 * report.seeds / max(report.seconds, 1e-9))
    if not asked.json:
        print(  # noqa: T201  the command's output
            f"{scenario.name}: {report.seeds} schedules passed, {report.steps} steps, {report.writes} writes,"
            f" {report.lives - report.seeds} restarts, {told['schedules_per_minute']} schedules a minute"
        )
    return told


class _Progress:
    """Tells a terminal now and then how far it is."""

    def __init__(self, name: str, seeds: int, *, silent: bool) -> None:
        self._name = name
        self._seeds = seeds
        self._silent = silent
        self._done = 0
        self._told_at = perf_counter()

    def __call__(self, _: Played) -> None:
        self._done += 1
        now = perf_counter()
        if not self._silent and now - self._told_at > _TELL_EVERY:
            self._told_at = now
            sys.stderr.write(f"\r{self._name}: {self._done} of {self._seeds} ")
            sys.stderr.flush()

    def end(self) -> None:
        if not self._silent:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _faults(text: str) -> Faults:
    try:
        return Faults.parse(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem
