"""Undoing an admission that will never be: fence, dispose, project, release.

    fencing ──> disposing ──> projecting ──> released

**Fence**: the frozen `failed`/`admission-failed` row under the Run's own id and timestamps. Until it is acknowledged,
nothing is disposed: the first row may still arrive, and a Run that begins must find its things. **Dispose**: what was
begun, in reverse; only `DISCARDED` counts. **Project**: the disposal is stored on the fence. Then the lease goes.

A refused first row, or a room without a store, needs no fence and no projection. Each step is tried once; one that
fails leaves the lease held in its phase, and a retry goes on from there: an acknowledged step never repeats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spindel.errors import (
    ConstructionOwnerUnavailableError,
    SpindelError,
)
from spindel.runs._preparation import Custody, Disposal
from spindel.runs._states import LaunchKind, LeasePhase
from spindel.store import FenceAdmission, RecordDisposal

if TYPE_CHECKING:
    from spindel.runs._entry import Entry

__all__ = ["UndisposedError", "hold_admission", "undo", "undo_at_once"]


class UndisposedError(SpindelError):
    """A dispose callback said something else than `DISCARDED`; private to the walk.

    Attributes:
        code: the disposal that it said, or `no-disposal`.
    """

    def __init__(self, answer: object) -> None:
        self.code = answer.value if isinstance(answer, Disposal) else "no-disposal"
        super().__init__(f"a dispose callback answered {self.code} (a {type(answer).__qualname__}), not discarded")


async def undo_at_once(entry: Entry, phase: LeasePhase) -> BaseException | None:
    """Walk all steps now, on the pool, each tried once, not cancellable.

    Args:
        entry: an admission that will never be.
        phase: where to begin: `fencing`, or `disposing` when there is nothing to fence.

    Returns:
        None once it is undone; else what went wrong, with the phase left where it did.
    """
    custody = entry.custody or Custody()
    entry.custody = custody
    if entry.phase is LeasePhase.PREPARING and not custody.is_accounted_for:
        # Something may exist that nobody can take down, and no row was issued that would need a fence.
        return ConstructionOwnerUnavailableError(entry.lease_id)
    entry.phase = phase
    try:
        await entry.room.pool.call(LaunchKind.CLEANUP, lambda: undo(entry), run_id=entry.run_id)
    except BaseException as error:  # noqa: ASYNC103, BLE001  a failed step is the hold's; the pool tells of interrupts
        return error  # noqa: ASYNC104  the pool is shielded, so it is no Cancelled of this task
    return None


async def undo(entry: Entry) -> None:
    """Walk from the present phase to the release. Raises at the step that fails; the phase says which.

    Raises:
        WriteRefusedError, WriteUncertainError: a frozen write was not acknowledged.
        UndisposedError: a dispose callback did not answer DISCARDED.
        Exception: what a dispose callback raised.
        RoomOwnershipLostError: a newer owner has the room.
    """
    custody = entry.custody
    assert custody is not None, "an admission to be undone has its custody"
    if entry.phase is LeasePhase.STARTING:
        entry.phase = LeasePhase.FENCING
    if entry.phase is LeasePhase.FENCING:
        await _fence(entry, custody)
        custody.fenced = True
        entry.phase = LeasePhase.DISPOSING
    if entry.phase is LeasePhase.DISPOSING:
        if not custody.is_accounted_for:
            raise ConstructionOwnerUnavailableError(entry.lease_id)
        for owned in reversed(custody.owned):
            if not owned.discarded:
                answer = await owned.dispose()
                if answer is not Disposal.DISCARDED:
                    raise UndisposedError(answer)
                owned.discarded = True
        entry.phase = LeasePhase.PROJECTING
    if custody.fence is not None and custody.owned:
        await entry.room.write(
            RecordDisposal(
                room=entry.room.name,
                epoch=entry.room.epoch,
                id=entry.run_id,
                at=custody.fence.ended_at,
                disposal=Disposal.DISCARDED.value,
            ),
        )


async def _fence(entry: Entry, custody: Custody) -> None:
    assert entry.admission is not None, "a fence freezes the admission's own row"
    if custody.fence is None:
        custody.fence = FenceAdmission(admission=entry.admission, error=custody.error, ended_at=entry.room.now_micros())
    await entry.room.write(custody.fence)


def hold_admission(entry: Entry, error: BaseException) -> None:
    """Hold an admission in its phase until an operator acts."""
    if entry.custody is None:
        entry.custody = Custody()

    async def retry() -> None:
        await undo(entry)

    unavailable = isinstance(error, ConstructionOwnerUnavailableError)

    def resolve(action: str) -> None:
        if action == "abandon":
            entry.owner.abandoned = True
        entry.finish_unadmitted("abandoned" if action == "abandon" else "finished")

    entry.room.holds.add(entry, entry.phase.value, error, resolve, retry=None if unavailable else retry)
