"""Time: Trio's clock for waiting, a wall clock for what is stored, and work that a virtual clock can't see.

Waiting always goes through Trio (`trio.sleep`, cancel scopes), so a test's clock governs it. What is stored in rows
comes from an injected wall clock, in UTC microseconds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Backoff", "ForeignWork", "SystemClock", "WallClock", "foreign_work"]


class WallClock(Protocol):
    """What a room asks for the time of its rows."""

    def now_micros(self) -> int:
        """Give the time as UTC microseconds since the epoch."""
        ...


class SystemClock:
    """The machine's own wall clock."""

    __slots__ = ()

    def now_micros(self) -> int:
        """Give the machine's time as UTC microseconds since the epoch."""
        return time.time_ns() // 1000


@attrs.frozen
class Backoff:
    """Delays that double from a first one to a largest one.

    Attributes:
        first_seconds: the first delay.
        longest_seconds: no delay is longer.
    """

    first_seconds: float = 1.0
    longest_seconds: float = 60.0

    def delays(self) -> Iterator[float]:
        """Give the delays, in seconds, without end."""
        delay = self.first_seconds
        while True:
            yield min(delay, self.longest_seconds)
            delay = min(delay * 2, self.longest_seconds)


class ForeignWork:
    """Counts what runs outside the loop for it: store writes in a thread, native launches, processes.

    A virtual clock must not jump while something real is in flight, or a deadline would pass that nobody waited for.
    It listens here. There is one counter for each Trio loop; get it with `foreign_work`. Use it from the loop only.
    """

    __slots__ = ("_count", "_listener")

    def __init__(self) -> None:
        self._count = 0
        self._listener: Callable[[bool], None] | None = None

    @property
    def count(self) -> int:
        """How many pieces of foreign work are in flight."""
        return self._count

    def begin(self) -> None:
        """Note that a piece of work left the loop."""
        self._count += 1
        if self._count == 1 and self._listener is not None:
            self._listener(True)

    def end(self) -> None:
        """Note that a piece of work came back."""
        assert self._count > 0, "foreign work ended more often than it began"
        self._count -= 1
        if self._count == 0 and self._listener is not None:
            self._listener(False)

    def listen(self, listener: Callable[[bool], None] | None) -> None:
        """Call `listener(busy)` whenever the count leaves or reaches zero; None stops it."""
        self._listener = listener
        if listener is not None:
            listener(self._count > 0)


_foreign_work: Final[trio.lowlevel.RunVar[ForeignWork]] = trio.lowlevel.RunVar("spindel foreign work")


def foreign_work() -> ForeignWork:
    """Give the counter of the running loop."""
    try:
        return _foreign_work.get()
    except LookupError:
        counter = ForeignWork()
        _foreign_work.set(counter)
        return counter
