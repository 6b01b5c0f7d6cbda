"""What is held in a room, in the form to act on, and acting on it: one command for stages, leases and launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from spindel.control._wire import Held, HeldFacts, Recovered
from spindel.errors import (
    AcknowledgeRefusedError,
    ControlRefusedError,
    NotHeldError,
    StaleRevisionError,
)
from spindel.ids import Revision, RunId
from spindel.jobs import HoldLocator, Stage
from spindel.jobs._owner import JobOwner
from spindel.jobs._reads import owner_of
from spindel.operator import abandon_held, reconcile_settlement, recover, recover_launch
from spindel.runs import LeasePhase
from spindel.runs._states import HoldKind

if TYPE_CHECKING:
    from spindel.control._wire import RecoverHeld
    from spindel.runs import Room
    from spindel.runs._holds import Hold

__all__ = ["give_up", "list_held", "recover_held"]


_HOLDS_MAX: Final = 10_000


def list_held(room: Room) -> Held:
    """Tell all that waits for an operator, the first 10,000 of it in full."""
    return _held(room, room.holds.present())


def give_up(room: Room) -> Held:
    """Give up all that is held at this moment, and tell what that was; what is being recovered is left to that."""
    facts = _held(room, tuple(hold for hold in room.holds.present() if not hold.claimed))
    abandon_held(room)
    return facts


async def recover_held(room: Room, request: RecoverHeld) -> Recovered:
    """Act on the hold that has exactly this Run, stage and revision.

    Raises:
        SpindelError: as the functions of `spindel.operator` say.
    """
    run_id, revision = RunId(request.run_id), Revision(request.revision)
    hold = _find(room, request)
    owner = owner_of(room, run_id)
    if owner is not None and (hold is None or owner.present_hold() is hold):
        # Also for what isn't there any more: its owner knows what has become of it, and says so.
        await _recover_stage(room, owner, request)
    elif hold is None:
        await _explain_absence(room, run_id)
    elif hold.kind is HoldKind.LEASE:
        await reconcile_settlement(
            room,
            run_id,
            lease_id=hold.entry.lease_id,
            phase=LeasePhase(hold.phase),
            revision=revision,
            action=request.action,
        )
    elif hold.launch_id is not None:
        if request.action == "acknowledge":
            raise AcknowledgeRefusedError(f"launch {hold.launch_id}", hold.phase)
        await recover_launch(room, hold.launch_id, revision=revision)
    else:
        raise ControlRefusedError(
            "not-recoverable", f"nobody knows how far the finisher of run {run_id} came; it can only be abandoned"
        )
    again = next((new for new in room.holds.of_run(run_id) if _is_same(hold, new)), None)
    return Recovered(run_id=run_id, stage=request.stage, held=None if again is None else _facts(again))


async def _recover_stage(room: Room, owner: JobOwner, request: RecoverHeld) -> None:
    try:
        stage = Stage(request.stage)
    except ValueError:
        raise StaleRevisionError(f"Job {request.run_id}") from None
    locator = HoldLocator(owner.job_id, room.incarnation, stage, Revision(request.revision))
    await recover(room, locator, request.action)


def _find(room: Room, request: RecoverHeld) -> Hold | None:
    for hold in room.holds.of_run(RunId(request.run_id)):
        if hold.revision == request.revision and request.stage == _facts(hold).stage:
            return hold
    return None


async def _explain_absence(room: Room, run_id: RunId) -> None:
    """Say why there is nothing to act on."""
    entry = room.find_entry(run_id)
    if entry is None and await room.load(run_id) is None:
        raise ControlRefusedError(
            "foreign-room", f"room {room.name!r} has no run {run_id}; ask the process that has it"
        )
    if room.holds.of_run(run_id):
        raise StaleRevisionError(f"run {run_id}")
    raise NotHeldError(f"run {run_id}")


def _is_same(before: Hold | None, hold: Hold) -> bool:
    """Tell whether a hold is what a recovered one has become; a launch's is a new one each time."""
    if before is None:
        return False
    return hold is before or (before.launch_id is not None and hold.launch_id == before.launch_id)


def _held(room: Room, holds: tuple[Hold, ...]) -> Held:
    return Held(
        room=room.name,
        incarnation=room.incarnation,
        held=tuple(map(_facts, holds[:_HOLDS_MAX])),
        omitted=max(0, len(holds) - _HOLDS_MAX),
    )


def _facts(hold: Hold) -> HeldFacts:
    entry = hold.entry
    what: Literal["stage", "lease", "launch", "finisher"]
    what, stage = "lease", hold.phase
    if hold.kind is HoldKind.STAGE:
        what = "stage" if isinstance(entry.finisher, JobOwner) and entry.finisher.hold is hold else "finisher"
    elif hold.kind is HoldKind.LAUNCH:
        what = "launch"
        if isinstance(entry.finisher, JobOwner) and entry.finisher.present_hold() is hold:
            # The join of a Job's family is a stage of it, and is acted on as one.
            what, stage = "stage", Stage.FAMILY_JOIN.value
    return HeldFacts(
        what=what,
        run_id=entry.run_id,
        kind=None if entry.admission is None else entry.admission.kind,
        stage=stage,
        code=hold.code,
        since=hold.since,
        revision=hold.revision,
        claimed=hold.claimed,
        lease_id=entry.lease_id if hold.kind is HoldKind.LEASE else None,
        launch_id=hold.launch_id,
    )
