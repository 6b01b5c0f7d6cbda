"""The operators' door: functions that change what is held, for code that has authority over a room.

No Run, tool, token or event reaches it. A process of the same user can do all of this and more by other means: it is
a door against mistakes, not against the user's own code.

Read first (`spindel.runs.observe_settlement`, `Room.held`), then act on exactly what was read: a revision names one
form of one hold, and goes stale when the hold changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from spindel.runs._recovery import reconcile
from spindel.runs._recovery import recover_launch as _recover_launch

if TYPE_CHECKING:
    from spindel.ids import LaunchId, LeaseId, Revision, RunId
    from spindel.runs import HeldObligation, LaunchFacts, LeaseFacts, LeasePhase, Room

__all__ = ["abandon_held", "reconcile_settlement", "recover_launch"]


async def reconcile_settlement(
    room: Room,
    run_id: RunId,
    *,
    lease_id: LeaseId,
    phase: LeasePhase,
    revision: Revision,
    action: Literal["retry", "acknowledge"] = "retry",
) -> LeaseFacts:
    """Take up a held admission lease of this room where it stands.

    `retry` goes on from the held phase: a `starting` lease is fenced, others repeat their step, then walk on.
    `acknowledge` attests a publication instead of calling it again. No body, constructor or transfer is ever called,
    only frozen writes and retained callbacks.

    Durability: each step that passed is stored.

    Cancellation: checked once. Afterwards it ends this wait only; the recovery goes on.

    Args:
        room: the original Room object that owes it.
        run_id: whose own lease it is.
        lease_id: the lease, as read.
        phase: its phase, as read.
        revision: the hold's revision, as read.
        action: `retry` or `acknowledge`.

    Returns:
        The lease's facts afterwards: released, or held again under a new revision.

    Raises:
        ForeignRoomError: this room owes no such lease.
        CallbackNotExitedError: the reserving block is still open.
        StaleRevisionError: lease, phase or revision are no longer these.
        NotHeldError: the lease isn't held.
        RecoveryInProgressError: somebody else has claimed it.
        AcknowledgeRefusedError: only a publication can be attested.
        ConstructionOwnerUnavailableError: nobody is known who could dispose what was begun.
    """
    return await reconcile(room, run_id, lease_id, phase, revision, action)


async def recover_launch(room: Room, launch_id: LaunchId, *, revision: Revision) -> LaunchFacts:
    """Take up a held launch where it stands: construct it, or submit its own ticket again.

    It takes no callback, and one that was entered is never entered again. Only a join, being idempotent, gets a new
    attempt, once the old one is physically over.

    Cancellation: checked once.

    Returns:
        The launch's facts afterwards; held again under a new revision if the executor failed again.

    Raises:
        ForeignRoomError: this room has no such launch outstanding.
        StaleRevisionError: the hold has another revision by now.
        NotHeldError: it isn't held.
        LaunchNotRecoverableError: it runs (`launch-running`), or has run (`consumed`).
    """
    return await _recover_launch(room, launch_id, revision)


def abandon_held(room: Room) -> tuple[HeldObligation, ...]:
    """Give up everything that is held in the room at this moment, so that its block can end.

    It writes nothing and runs nothing: the Runs that owe it, and those above them, keep their `running` rows, which
    the next owner of the room adopts as orphans. Their waiters get `RunAbandonedError`. Threads that have been entered
    are still waited for.

    Returns:
        What was given up.
    """
    return room.holds.abandon()
