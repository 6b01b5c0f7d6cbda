"""Making a failing schedule smaller: leave parts of its plan out, as long as it still fails in the same way."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spindel.testing.simulation._engine import Played
    from spindel.testing.simulation._plan import Plan

__all__ = ["shrink"]

_ATTEMPTS_MAX: Final = 300


def shrink(failed: Played, replay: Callable[[Plan], Played], *, seconds: float = 20.0) -> Played:
    """Find a smaller plan that fails in the same way.

    Halves are left out first, then quarters, down to single parts, and again until nothing more can be spared. What is
    left may still not be the smallest: leaving a part out moves everything after it.

    Args:
        failed: the schedule.
        replay: plays a plan.
        seconds: how long it tries, in real time.

    Returns:
        The smallest that was found; `failed` itself if none is smaller.
    """
    assert failed.failure is not None, "only a failure is made smaller"
    kind, until = failed.failure.kind, perf_counter() + seconds
    best, attempts = failed, 0
    size = max(1, len(best.plan.parts) // 2)
    while True:
        before = best
        for labels in _chunks([part.label for part in best.plan.parts], size):
            if attempts >= _ATTEMPTS_MAX or perf_counter() > until:
                return best
            attempts += 1
            smaller = replay(best.plan.without(labels))
            if smaller.failure is not None and smaller.failure.kind == kind:
                best = smaller
        if size > 1:
            size //= 2
        elif best is before:
            return best


def _chunks(labels: Sequence[str], size: int) -> list[list[str]]:
    # From the end: what comes late depends on what came early, seldom the other way round.
    return [list(labels[max(0, end - size) : end]) for end in range(len(labels), 0, -size)]
