"""Events to whoever watches: bounded, never waiting, never raising into the one who publishes.

Without a watch an event costs one addition: the event object is made only if somebody will see it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.observe._events import RoomEvent

__all__ = ["Emitter", "Subscription"]


class Subscription:
    """One watcher's buffer. It ends by itself when it overflows or when the emitter closes."""

    __slots__ = ("_buffer_max", "_closed", "_emitter", "_events", "_lot", "lagged")

    def __init__(self, emitter: Emitter, buffer_max: int) -> None:
        self._emitter = emitter
        self._buffer_max = buffer_max
        self._events: deque[RoomEvent] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._closed = False
        self.lagged = False

    @property
    def buffer_max(self) -> int:
        """How many events may wait to be read."""
        return self._buffer_max

    def push(self, event: RoomEvent) -> None:
        """Add an event, or end this subscription if it is full."""
        if len(self._events) >= self._buffer_max:
            # Only this watch ends; a slow reader costs neither memory nor anybody's time.
            self.lagged = True
            self._emitter.unsubscribe(self)
            self.close()
            return
        self._events.append(event)
        self._lot.unpark()

    def close(self) -> None:
        """Accept no more; what is buffered can still be read."""
        self._closed = True
        self._lot.unpark_all()

    async def receive(self) -> RoomEvent | None:
        """Wait for the next event; None once it is closed and drained.

        Cancellation: a checkpoint; no event is lost.
        """
        await trio.lowlevel.checkpoint()
        while not self._events:
            if self._closed:
                return None
            await self._lot.park()
        return self._events.popleft()


class Emitter:
    """Numbers events and hands them to subscriptions.

    Args:
        now_micros: the wall time for events that somebody sees.
    """

    __slots__ = ("_closed", "_now_micros", "_subscriptions", "sequence")

    def __init__(self, now_micros: Callable[[], int]) -> None:
        self._now_micros = now_micros
        self._subscriptions: list[Subscription] = []
        self._closed = False
        self.sequence = 0

    def emit(self, kind: Callable[..., RoomEvent], *facts: Any) -> None:
        """Publish `kind(sequence, at, *facts)`. Never waits and never raises."""
        self.sequence += 1
        if self._subscriptions:
            event = kind(self.sequence, self._now_micros(), *facts)
            for subscription in tuple(self._subscriptions):
                subscription.push(event)

    def subscribe(self, buffer_max: int) -> Subscription:
        """Open a subscription that sees every event from now on; at its end already if the emitter is closed."""
        subscription = Subscription(self, buffer_max)
        if self._closed:
            subscription.close()
        else:
            self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Send it nothing more. Idempotent."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def close(self) -> None:
        """End all subscriptions, and those to come."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()
