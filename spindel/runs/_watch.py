"""Watching a room: a snapshot of its live Runs and every event after it, without a gap between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, final

import attrs

from spindel.errors import WatchLaggedError

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.observe import RoomEvent, Subscription
    from spindel.store import RunStatus

__all__ = ["RoomSnapshot", "RoomWatch", "RunSnapshot"]


@attrs.frozen
class RunSnapshot:
    """A live Run at one moment.

    Attributes:
        status: running or cancelling, or the stored outcome while its lease is still kept.
        started_at: UTC microseconds.
    """

    id: RunId
    parent_id: RunId | None
    kind: str
    actor: str
    status: RunStatus
    cancel_reason: str | None
    started_at: int


@attrs.frozen
class RoomSnapshot:
    """The live Runs at one moment, parents before children, and the number of the last event before it."""

    sequence: int
    runs: tuple[RunSnapshot, ...]


@final
class RoomWatch:
    """An async iterator of the events after `snapshot`; it ends when the room does.

    Attributes:
        snapshot: the live Runs when the watch began.
    """

    def __init__(self, room: str, snapshot: RoomSnapshot, subscription: Subscription) -> None:
        self._room = room
        self._subscription = subscription
        self.snapshot = snapshot

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RoomEvent:
        """Give the next event.

        Cancellation: a checkpoint; no event is lost.

        Raises:
            WatchLaggedError: the buffer overflowed; what was buffered has been given.
        """
        event = await self._subscription.receive()
        if event is None:
            if self._subscription.lagged:
                raise WatchLaggedError(self._room, self._subscription.buffer_max)
            raise StopAsyncIteration
        return event
