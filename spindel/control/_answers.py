"""What each command does in the room. Errors come out as they are; the door turns them into code and sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from spindel.control._dump import take_dump
from spindel.control._holds import give_up, list_held, recover_held
from spindel.control._wire import (
    AbandonHeld,
    CancelJob,
    Cursor,
    JobDetails,
    JobFacts,
    JobList,
    ListHeld,
    ListJobs,
    Problem,
    RecoverHeld,
    SettlementFacts,
    ShowJob,
    TakeDump,
    WaitJob,
)
from spindel.errors import ControlRefusedError, JobNotFoundError, SpindelError
from spindel.ids import RunId
from spindel.jobs import cancel_job, get_job, list_jobs, observe_settlement
from spindel.store import RunCursor

if TYPE_CHECKING:
    from uuid import UUID

    from spindel.control._wire import AnyRequest
    from spindel.jobs import JobView
    from spindel.runs import Room, RoomReader

__all__ = ["answer", "problem_of", "read_job", "read_jobs"]

_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


async def answer(room: Room, request: AnyRequest) -> msgspec.Struct:  # noqa: PLR0911  one for each command
    """Do what was asked.

    Raises:
        SpindelError: it was refused, or its outcome is unknown.
    """
    match request:
        case ListJobs():
            return await read_jobs(room, request)
        case ShowJob():
            return await read_job(room, request.job_id)
        case WaitJob():
            view = await get_job(room, RunId(request.job_id), wait_seconds=request.seconds)
            return _facts(room, request.job_id, view)
        case CancelJob():
            return _facts(room, request.job_id, await cancel_job(room, RunId(request.job_id)))
        case ListHeld():
            return list_held(room)
        case RecoverHeld():
            return await recover_held(room, request)
        case AbandonHeld():
            return give_up(room)
        case TakeDump():
            return take_dump(room)
        case _:
            assert_never(request)


async def read_jobs(room: Room | RoomReader, request: ListJobs) -> JobList:
    """Give a page of Jobs, live or cold.

    Raises:
        InvalidRecordError: the limit or the status is out of range.
    """
    before = None if request.before is None else RunCursor(request.before.started_at, RunId(request.before.id))
    page = await list_jobs(room, status=request.status, before=before, limit=request.limit)
    following = None if page.next is None else Cursor(started_at=page.next.started_at, id=page.next.id)
    return JobList(room=room.name, jobs=tuple(map(_convert, page.jobs)), next=following)


async def read_job(room: Room | RoomReader, job_id: UUID) -> JobDetails:
    """Give a Job and what can be proved about it, live or cold.

    Raises:
        JobNotFoundError: the room has no such Job.
    """
    report = await observe_settlement(room, RunId(job_id))
    job = _facts(room, job_id, await get_job(room, RunId(job_id)))
    return JobDetails(
        job=job,
        settlement=SettlementFacts(
            family=report.family.value,
            core=report.core.value,
            adapter=report.adapter.value,
            lease=report.lease.value,
            owner=report.owner.value,
            evidence=report.evidence,
        ),
    )


def problem_of(error: Exception) -> Problem:
    """Tell an error as code and sentence; of one that isn't ours only the class, since its message may hold anything."""
    if isinstance(error, ControlRefusedError):
        return Problem(code=error.code, sentence=str(error))
    if isinstance(error, SpindelError):
        name = type(error).__name__.removesuffix("Error")
        return Problem(code=_WORD.sub("-", name).lower(), sentence=str(error))
    return Problem(code="internal", sentence=f"the process met a {type(error).__qualname__}; its log tells more")


def _facts(room: Room | RoomReader, job_id: UUID, view: JobView | None) -> JobFacts:
    if view is None:
        raise JobNotFoundError(room.name, RunId(job_id))
    return _convert(view)


def _convert(view: Any) -> JobFacts:
    return msgspec.convert(view, JobFacts, from_attributes=True)
