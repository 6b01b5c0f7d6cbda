"""The operators' door: functions that change what is held, for code that has authority over a room.

No Run, tool, token or event reaches it. A process of the same user can do all of this and more by other means: it is
a door against mistakes, not against the user's own code.

Read first (`spindel.runs.observe_settlement`, `Room.held`), then act on exactly what was read: a revision names one
form of one hold, and goes stale when the hold changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import trio

from spindel.errors import InvalidRecordError, JobNotFoundError
from spindel.jobs._job import view_of_owner
from spindel.jobs._reads import owner_of
from spindel.runs._recovery import reconcile
from spindel.runs._recovery import recover_launch as _recover_launch

if TYPE_CHECKING:
    from spindel.ids import LaunchId, LeaseId, Revision, RunId
    from spindel.jobs import HoldLocator, JobView, RecoveryState
    from spindel.jobs._owner import JobOwner
    from spindel.runs import HeldObligation, LaunchFacts, LeaseFacts, LeasePhase, Room

__all__ = ["abandon_held", "reconcile_settlement", "recover", "recover_launch", "recovery_state"]


def recovery_state(room: Room, job_id: RunId) -> RecoveryState:
    """Give a Job's held stage, its private error, and the locator to act on. Changes nothing.

    Raises:
        JobNotFoundError: no such Job lives in this room.
        NotHeldError: no stage of it is held; `blocked_by` names held Runs that it waits for.
    """
    owner = _owner(room, job_id)
    return owner.recovery_state()


async def recover(room: Room, locator: HoldLocator, action: Literal["retry", "acknowledge"]) -> JobView:
    """Take a held stage of a Job up, exclusively, and let the walk go on.

    `retry` says that repeating the stage is safe. `acknowledge` attests what physically happened and never calls the
    callback; it is accepted for a callback always, elsewhere only on evidence: the exact write in the row, a family
    that has returned, a lease that is gone.

    Cancellation: checked once. Afterwards it ends this wait only: the recovery runs in the Job's own task.

    Returns:
        The Job as it is then.

    Raises:
        InvalidRecordError: the action is neither of the two.
        JobNotFoundError: no such Job lives in this room.
        NotHeldError, StaleRevisionError, RecoveryInProgressError: refused before any effect.
        StageHeldError: the stage failed again; the error has the new locator.
        AcknowledgeRefusedError: no attestation can stand in for this stage now; held under a new revision.
        RoomOwnershipLostError, RunAbandonedError: the Job ended meanwhile, and nobody may say how.
    """
    if action not in ("retry", "acknowledge"):
        # Anything else would be taken for a retry, which repeats a callback.
        raise InvalidRecordError("action", f"{action!r} is neither 'retry' nor 'acknowledge'")
    await trio.lowlevel.checkpoint_if_cancelled()
    owner = _owner(room, locator.job_id)
    run = owner.run
    assert run is not None, "a living owner has its Run"
    admission = owner.entry.admission
    assert admission is not None, "a living Job keeps its first row"
    await owner.recover(locator, action)
    return view_of_owner(owner, run, admission.started_at)


def _owner(room: Room, job_id: RunId) -> JobOwner:
    owner = owner_of(room, job_id)
    if owner is None or owner.run is None:
        raise JobNotFoundError(room.name, job_id)
    return owner


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

    It writes nothing and runs nothing: the Runs that owe it, and those above them, keep their rows as they are. Those
    that are `running` the next owner of the room adopts as orphans; a Job whose outcome was stored before keeps it, and
    is never settled without its adapter's witness. Their waiters get `RunAbandonedError`. Threads that have been
    entered are still waited for.

    Returns:
        What was given up.
    """
    return room.holds.abandon()
