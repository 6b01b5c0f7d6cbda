"""`Job`: a handle on a Run with staged cleanup, and how it is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast, final

import attrs
import trio

from spindel.errors import RoomOwnershipLostError, RunAbandonedError
from spindel.jobs._stages import Stage
from spindel.runs import Outcome
from spindel.runs._frontier import check_wait
from spindel.runs._outcome import error_text
from spindel.store import RunStatus

if TYPE_CHECKING:
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.jobs._owner import JobOwner
    from spindel.runs import Room, Run

__all__ = ["Job", "JobView", "ResultState", "view_of_owner"]

T = TypeVar("T")
ResultState = Literal["available", "unavailable"]


@attrs.frozen(kw_only=True)
class JobView:
    """A Job as anybody may see it. Never the private error of a held stage.

    Attributes:
        status: its status; terminal once the outcome is stored, which may be before it is settled.
        reason, error: of the work only.
        stage: where the walk is, None after a restart.
        settled: True once every stage has passed with its evidence; then for ever.
        cleanup_required: True while an operator is needed: a stage of it is held, or its join waits for what is. A Job
            whose work goes on is not held by what is held below it.
        cleanup_stage: the held stage, or None.
        blocked_by: held Runs that its join waits for, to be recovered instead of it; at most 20.
        result_state, scorecard: of an observed Job, stored with its outcome.
    """

    id: RunId
    room: str
    kind: str
    actor: str
    key: str | None
    parent_id: RunId | None
    status: RunStatus
    reason: str | None
    error: str | None
    started_at: int
    ended_at: int | None
    cancel_requested: bool
    stage: Stage | None
    settled: bool
    cleanup_required: bool
    cleanup_stage: Stage | None
    blocked_by: tuple[RunId, ...]
    offer: UUID | None
    experiment: UUID | None
    result_state: ResultState | None
    scorecard: UUID | None


@final
class Job(Generic[T]):
    """A live Job's handle. Made by `start_job` only.

    Attributes:
        id: the Job, which is a Run.
        key: what it was started under, or None.
    """

    __slots__ = ("_owner", "_run", "_started_at", "id", "key")

    def __init__(self, owner: JobOwner, run: Run[T]) -> None:
        admission = run._entry.admission
        assert admission is not None, "a Job is made when its row is stored"
        self._owner = owner
        self._run = run
        self._started_at = admission.started_at
        self.id: RunId = run.id
        self.key: str | None = owner.key

    def __repr__(self) -> str:
        return f"<Job {self.id} {self._run.kind} {self._run.status.value} at {self._owner.stage.value}>"

    @property
    def run(self) -> Run[T]:
        """The Run that it is."""
        return self._run

    def view(self) -> JobView:
        """See it, from memory."""
        return view_of_owner(self._owner, self._run, self._started_at)

    def cancel(self, reason: str = "cancel-requested") -> bool:
        """Ask the work, and all below it, to stop. Sticky.

        Returns:
            True while the outcome is undecided; False afterwards: no stage is stopped.
        """
        return self._run.cancel(reason)

    async def outcome(self) -> Outcome[T]:
        """Wait until it is done and give the outcome. Awaited by a Run of the room, it becomes a stored cause.

        Cancellation: a checkpoint; ends the wait only.

        Raises:
            WaitRefusedError: this wait could never end.
            RoomOwnershipLostError, RunAbandonedError: it ended, and nobody may say how.
        """
        check_wait(self._run._entry)
        await self._owner.wait_done()
        self._raise_if_lost()
        return await self._run._consume()

    async def result(self) -> T:
        """Wait until it is done and give the value.

        Raises:
            RunFailedError, RunCancelledError, RunWaitingError: it ended otherwise.
        """
        return (await self.outcome()).unwrap()

    async def wait_done_or_held(self) -> JobView:
        """Wait until it is done, or an operator is needed.

        Cancellation: a checkpoint; ends the wait only.

        Raises:
            WaitRefusedError: this wait could never end.
        """
        check_wait(self._run._entry)
        await trio.lowlevel.checkpoint()
        await self._owner.wait_done_or_held()
        return self.view()

    def _raise_if_lost(self) -> None:
        room: Room = self._owner.room
        if self._owner.end == "lost":
            raise RoomOwnershipLostError(room.name, room.epoch)
        if self._owner.end == "abandoned":
            raise RunAbandonedError(self.id)


def view_of_owner(owner: JobOwner, run: Run[T], started_at: int) -> JobView:
    """See a Job that this process owns, or has owned, from memory."""
    blocked = owner.blocked_by()
    held = owner.held_stage() or (Stage.FAMILY_JOIN if blocked else None)
    stored = run.status not in (RunStatus.RUNNING, RunStatus.CANCELLING)
    return JobView(
        id=run.id,
        room=run.room_name,
        kind=run.kind,
        actor=run.actor,
        key=owner.key,
        parent_id=run.parent_id,
        status=run.status,
        reason=owner.reason if stored else None,
        error=error_text(owner.error) if stored else None,
        started_at=started_at,
        ended_at=owner.ended_at if run.status.terminal else None,
        cancel_requested=run.cancel_requested,
        stage=owner.stage,
        settled=owner.end == "done" and run.status.terminal and owner.family_vouched,
        cleanup_required=held is not None,
        cleanup_stage=held,
        blocked_by=blocked,
        offer=owner.job.offer,
        experiment=owner.job.experiment,
        result_state=cast("ResultState | None", owner.result_state if stored else None),
        scorecard=owner.scorecard if stored else None,
    )
