"""How a room changes hands: the two mutations that need no ownership, since they make it and end it.

A store makes them itself, in `claim_room`, with the room's lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

if TYPE_CHECKING:
    from typing import ClassVar

__all__ = ["UNOWNED", "ClaimRoom", "LeaveRoom"]


class ClaimRoom(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Become the owner of a room, whose lock is held: one more epoch, a new incarnation. Returns the epoch."""

    part: ClassVar[str] = "runs"

    room: str
    incarnation: UUID
    owner: str
    at: int
    epoch: int = 0

    @property
    def identity(self) -> tuple[str, ...]:
        """This opening of the room."""
        return ("claim-room", self.room, str(self.incarnation))


class LeaveRoom(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Record that a room was left by the owner of this epoch."""

    part: ClassVar[str] = "runs"

    room: str
    epoch: int
    at: int

    @property
    def identity(self) -> tuple[str, ...]:
        """The end of this ownership."""
        return ("leave-room", self.room, str(self.epoch))


UNOWNED: Final = frozenset({ClaimRoom, LeaveRoom})
"""The mutation types that are applied whatever their epoch."""
