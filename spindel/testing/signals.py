"""Wait for named points of the code under test, in the manner of: it has queued its write, now cancel it."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from spindel.observe._signals import listen_to_signals

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Signals", "open_signals"]


class Signals:
    """Every signal since the block was entered, and a way to wait for the next one of a name."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []
        self._unread: dict[str, deque[object]] = {}
        self._arrived = trio.lowlevel.ParkingLot()

    async def wait(self, name: str) -> object:
        """Wait for the next signal of this name that nobody waited for yet, and give its subject.

        Signals that came earlier count, so there is no race between reaching a point and waiting for it.

        Cancellation: a checkpoint; a cancelled wait takes no signal.
        """
        await trio.lowlevel.checkpoint()
        while not self._unread.get(name):
            await self._arrived.park()
        return self._unread[name].popleft()

    def count(self, name: str) -> int:
        """How often a point was reached so far."""
        return sum(1 for seen, _ in self.seen if seen == name)

    def _deliver(self, name: str, subject: object) -> None:
        self.seen.append((name, subject))
        self._unread.setdefault(name, deque()).append(subject)
        self._arrived.unpark_all()


@contextmanager
def open_signals() -> Generator[Signals, None, None]:
    """Listen to the signals of this process for the length of a block, inside Trio.

    Raises:
        RuntimeError: somebody listens already.
    """
    signals = Signals()
    token = trio.lowlevel.current_trio_token()
    home = threading.get_ident()

    def hear(name: str, subject: object) -> None:
        if threading.get_ident() == home:
            signals._deliver(name, subject)
        else:
            token.run_sync_soon(signals._deliver, name, subject)

    listen_to_signals(hear)
    try:
        yield signals
    finally:
        listen_to_signals(None)
