"""Recovery of what is held: exclusive, of the exact hold that was read, by the one who owns the room.

A hold is claimed before any I/O, in the turn in which all checks pass, so two recoveries can't both act. The step
itself runs on the pool, shielded: whoever asked for it may be cancelled, which ends its wait only. It runs frozen
writes and retained callbacks; it never calls a body, a constructor or a replacement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import trio

from spindel.errors import (
    AcknowledgeRefusedError,
    CallbackNotExitedError,
    ConstructionOwnerUnavailableError,
    ForeignRoomError,
    InvalidRecordError,
    NotHeldError,
    RecoveryInProgressError,
    StaleRevisionError,
)
from spindel.runs._settlement import launch_facts, lease_facts
from spindel.runs._states import HoldKind, LaunchKind, LaunchState, LeasePhase, RoomState

if TYPE_CHECKING:
    from spindel.ids import LaunchId, LeaseId, Revision, RunId
    from spindel.runs._entry import Entry
    from spindel.runs._holds import Hold
    from spindel.runs._pool import Launch
    from spindel.runs._room import Room
    from spindel.runs._settlement import LaunchFacts, LeaseFacts

__all__ = ["reconcile", "recover_launch"]


@trio.lowlevel.enable_ki_protection
async def reconcile(
    room: Room,
    run_id: RunId,
    lease_id: LeaseId,
    phase: LeasePhase,
    revision: Revision,
    action: Literal["retry", "acknowledge"],
) -> LeaseFacts:
    """See `spindel.operator.reconcile_settlement`."""
    if action not in ("retry", "acknowledge"):
        raise InvalidRecordError("action", f"{action!r} is neither 'retry' nor 'acknowledge'")
    await trio.lowlevel.checkpoint_if_cancelled()
    entry, hold = _claim(room, run_id, lease_id, phase, revision, action)
    if action == "acknowledge":
        room.holds.end(hold, action)
        return lease_facts(room, entry)
    retry = hold.retry
    assert retry is not None, "a lease that can't be retried is refused before"
    done = trio.Event()

    def back(launch: Launch) -> None:
        error = launch.error
        if launch.state is LaunchState.RETURNED:
            room.holds.end(hold, "retry")
        elif error is None or room.state is RoomState.LOST:
            room.holds.end(hold, "abandon")
        else:
            # Walking on may have passed steps, so it is held where the lease stands now.
            room.holds.again(hold, hold.phase, error)
        done.set()

    room.pool.start(LaunchKind.RECOVERY, retry, entry, back)
    await done.wait()
    return lease_facts(room, entry)


@trio.lowlevel.enable_ki_protection
async def recover_launch(room: Room, launch_id: LaunchId, revision: Revision) -> LaunchFacts:
    """See `spindel.operator.recover_launch`."""
    await trio.lowlevel.checkpoint_if_cancelled()
    launch = room.pool.find(launch_id)
    if launch is None:
        raise ForeignRoomError(room.name, f"launch {launch_id}")
    room.pool.recover(launch, revision)
    await trio.lowlevel.cancel_shielded_checkpoint()
    return launch_facts(launch)


def _claim(
    room: Room, run_id: RunId, lease_id: LeaseId, phase: LeasePhase, revision: Revision, action: str
) -> tuple[Entry, Hold]:
    """Check everything and claim, in one turn."""
    entry = room.find_entry(run_id)
    if entry is None:
        raise ForeignRoomError(room.name, f"a lease of run {run_id}")
    if not entry.callback_exited:
        raise CallbackNotExitedError(lease_id)
    hold = room.holds.of(entry, HoldKind.LEASE)
    if entry.lease_id != lease_id or entry.phase != phase or (hold is not None and hold.revision != revision):
        raise StaleRevisionError(f"lease {lease_id}")
    if hold is None:
        raise NotHeldError(f"lease {lease_id}")
    if hold.claimed:
        raise RecoveryInProgressError(f"lease {lease_id}")
    if action == "acknowledge" and not hold.acknowledgeable:
        raise AcknowledgeRefusedError(f"lease {lease_id}", phase.value)
    if hold.retry is None:
        raise ConstructionOwnerUnavailableError(lease_id)
    hold.claimed = True
    return entry, hold
