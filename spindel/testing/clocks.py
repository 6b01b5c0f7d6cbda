"""Time under a test's control: a loop clock that jumps over idle waits, and a wall clock that stands still."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from trio.testing import MockClock

from spindel.clock import foreign_work

if TYPE_CHECKING:
    import trio

__all__ = ["START_MICROS", "ManualWallClock", "autojump_clock"]

START_MICROS: Final = 1_800_000_000_000_000
"""Where a `ManualWallClock` starts: 2027-01-15 08:00 UTC."""


def autojump_clock(threshold_seconds: float = 0.0) -> MockClock:
    """Make a loop clock that jumps to the next deadline when all tasks wait, but never past real work.

    Trio's own autojump can't see threads: it jumps over a deadline while a store writes or a native launch runs. This
    one stands still as long as anything of spindel runs outside the loop. Pass it to `trio.run`, or return it from a
    fixture, for one run.

    Args:
        threshold_seconds: for how many real seconds all tasks must have been waiting.
    """
    clock = MockClock()

    def follow(busy: bool) -> None:
        clock.autojump_threshold = inf if busy else threshold_seconds

    # The count belongs to the loop, which starts the clock as its first act; the class itself can't be extended.
    start_clock = clock.start_clock

    def start_and_listen() -> None:
        start_clock()
        foreign_work().listen(follow)

    clock.start_clock = start_and_listen  # type: ignore[method-assign]
    return clock


class ManualWallClock:
    """A wall clock that moves only when it is told to, or with a loop's clock.

    Args:
        start_micros: its time at first, in UTC microseconds.
        follows: a loop clock whose progress it adds, such as the one of `autojump_clock`.
    """

    __slots__ = ("_follows", "_micros", "_zero")

    def __init__(self, start_micros: int = START_MICROS, *, follows: trio.abc.Clock | None = None) -> None:
        self._micros = start_micros
        self._follows = follows
        self._zero = 0.0 if follows is None else follows.current_time()

    def now_micros(self) -> int:
        """Give the time as UTC microseconds since the epoch."""
        if self._follows is None:
            return self._micros
        return self._micros + round((self._follows.current_time() - self._zero) * 1_000_000)

    def advance(self, seconds: float) -> None:
        """Move it; a negative number steps it back, as an operator or a time service may do."""
        self._micros += round(seconds * 1_000_000)
