"""Reading Jobs: from their owners while they live, from their rows afterwards, also after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs
import trio

from spindel.errors import DurableRoomRequiredError, InvalidRecordError, JobNotFoundError, WaitRefusedError
from spindel.jobs._job import JobView, ResultState, view_of_owner
from spindel.jobs._owner import JobOwner
from spindel.runs import Room, RoomReader
from spindel.runs._frontier import check_wait, held_frontier
from spindel.runs._settlement import is_settled, read_settlement
from spindel.store import RunCursor, RunQuery, RunStatus, check_limit

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.runs import SettlementReport
    from spindel.store import RunRecord, Store

__all__ = ["JobPage", "cancel_job", "get_job", "list_jobs", "observe_settlement", "owner_of"]

WAIT_SECONDS_MAX = 25.0


@attrs.frozen
class JobPage:
    """A page of Jobs and where the next one starts, None at the end."""

    jobs: tuple[JobView, ...]
    next: RunCursor | None


def owner_of(room: Room, job_id: RunId) -> JobOwner | None:
    """Give the living owner of a Job, or None."""
    entry = room.find_entry(job_id)
    finisher = None if entry is None else entry.finisher
    return finisher if isinstance(finisher, JobOwner) else None


async def get_job(room: Room | RoomReader, job_id: RunId, *, wait_seconds: float = 0) -> JobView | None:
    """See a Job; None if the room has none of that id.

    Cancellation: a checkpoint; ends the wait only.

    Args:
        room: the room, or a cold reader of it.
        job_id: the Job.
        wait_seconds: wait so long, at most 25, until it is done or held.

    Raises:
        WaitRefusedError: a wait was asked for that could never end.
    """
    await trio.lowlevel.checkpoint()
    owner = owner_of(room, job_id) if isinstance(room, Room) else None
    _check_wait(owner, wait_seconds)
    if owner is not None and owner.run is not None and owner.end is None:
        admission = owner.entry.admission
        assert admission is not None, "a living Job keeps its first row"
        if wait_seconds > 0:
            with trio.move_on_after(min(wait_seconds, WAIT_SECONDS_MAX)):
                await owner.wait_done_or_held()
        return view_of_owner(owner, owner.run, admission.started_at)
    # Its owner has gone already, so this row is the last.
    row = None if room.store is None else await room.store.load_run(room.name, job_id)
    return None if row is None or row.job_version is None else _view_of_row(room, row)


async def cancel_job(room: Room, job_id: RunId, *, wait_seconds: float = 0) -> JobView | None:
    """Ask a Job to stop, and see it as `get_job` does; a finished one stays as it is.

    Raises:
        WaitRefusedError: a wait was asked for that could never end.
    """
    owner = owner_of(room, job_id)
    _check_wait(owner, wait_seconds)
    if owner is not None and owner.run is not None:
        owner.run.cancel()
    return await get_job(room, job_id, wait_seconds=wait_seconds)


async def list_jobs(
    room: Room | RoomReader,
    *,
    status: RunStatus | None = None,
    parent: RunId | None = None,
    before: RunCursor | None = None,
    limit: int = 20,
) -> JobPage:
    """See a page of Jobs: newest start first, ids descending among equal starts; filtered before the limit.

    Raises:
        InvalidRecordError: the limit is not 1 to 100, or the status is `cancelling`, which is never stored.
        DurableRoomRequiredError: the room has no store.
    """
    check_limit(limit)
    if status is RunStatus.CANCELLING:
        raise InvalidRecordError("status", "'cancelling' is never stored; such a Job is still running")
    store: Store | None = room.store
    if store is None:
        raise DurableRoomRequiredError(room.name)
    query = RunQuery(room=room.name, status=status, parent=parent, before=before, jobs=True, limit=limit)
    page = await store.list_runs(query)
    views: list[JobView] = []
    ended: list[tuple[int, RunId]] = []
    # In one turn, so that the page shows the Jobs of one moment.
    for place, row in enumerate(page.runs):
        owner = owner_of(room, row.id) if isinstance(room, Room) else None
        if owner is not None and owner.run is not None:
            views.append(view_of_owner(owner, owner.run, row.started_at))
        else:
            views.append(_view_of_row(room, row))
            if isinstance(room, Room) and row.incarnation == room.incarnation and _may_have_ended(row):
                ended.append((place, row.id))
    for place, job_id in ended:
        views[place] = await get_job(room, job_id) or views[place]
    return JobPage(tuple(views), page.next)


async def observe_settlement(room: Room | RoomReader, job_id: RunId) -> SettlementReport:
    """Observe what can be proved about a Job: outcome, three witnesses, lease, owner, each a fact of its own.

    Cancellation: a checkpoint.

    Raises:
        JobNotFoundError: the room has no Job of that id.
    """
    row, report = await read_settlement(room, job_id)
    if row is None or row.job_version is None:
        raise JobNotFoundError(room.name, job_id)
    return report


def _check_wait(owner: JobOwner | None, wait_seconds: float) -> None:
    """Refuse a wait that could never end, and under a frontier every wait: that must not depend on how far a Job is."""
    if wait_seconds <= 0:
        return
    reason = held_frontier()
    if reason is not None:
        raise WaitRefusedError(reason)
    if owner is not None and owner.run is not None:
        check_wait(owner.entry)


def _may_have_ended(row: RunRecord) -> bool:
    """Tell whether a row lacks what its Job, which has no owner any more, may have stored since it was read."""
    return row.status is RunStatus.RUNNING or (row.status.terminal and row.job_adapter_cleanup_ack is None)


def _view_of_row(room: Room | RoomReader, row: RunRecord) -> JobView:
    return JobView(
        id=row.id,
        room=row.room,
        kind=row.kind,
        actor=row.actor,
        key=row.job_key,
        parent_id=row.parent_id,
        status=row.status,
        reason=row.reason,
        error=row.error,
        started_at=row.started_at,
        ended_at=row.ended_at,
        cancel_requested=row.status is RunStatus.CANCELLED,
        stage=None,
        settled=is_settled(room, row),
        cleanup_required=False,
        cleanup_stage=None,
        blocked_by=(),
        offer=row.job_offer,
        experiment=row.job_experiment,
        result_state=cast("ResultState | None", row.job_result_state),
        scorecard=row.job_scorecard,
    )
