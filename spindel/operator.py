"""The operators' door: functions that change what is held, for code that has authority over a room.

No Run, tool, token or event reaches it. A process of the same user can do all of this and more by other means: it is
a door against mistakes, not against the user's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spindel.runs import HeldObligation, Room

__all__ = ["abandon_held"]


def abandon_held(room: Room) -> tuple[HeldObligation, ...]:
    """Give up everything that is held in the room at this moment, so that its block can end.

    It writes nothing and runs nothing: the Runs that owe it, and those above them, keep their `running` rows, which
    the next owner of the room adopts as orphans. Their waiters get `RunAbandonedError`. Threads that have been entered
    are still waited for.

    Returns:
        What was given up.
    """
    return room.abandon_held()
