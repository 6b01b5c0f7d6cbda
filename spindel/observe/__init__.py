"""What happened, as data: the catalogue of events, their delivery, and named signals for tests."""

from spindel.observe._emitter import Emitter, Subscription
from spindel.observe._events import (
    RoomEvent,
    RoomFenced,
    RoomHeld,
    RoomSealed,
    RunCancelRequested,
    RunFinished,
    RunHeld,
    RunProgress,
    RunRecovered,
    RunStarted,
)

__all__ = [
    "Emitter",
    "RoomEvent",
    "RoomFenced",
    "RoomHeld",
    "RoomSealed",
    "RunCancelRequested",
    "RunFinished",
    "RunHeld",
    "RunProgress",
    "RunRecovered",
    "RunStarted",
    "Subscription",
]
