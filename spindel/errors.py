"""Every error of spindel, sorted by who must act.

A name ends in `Error`; facts are attributes; the message is built from them and shows the offending value.
An unknown outcome is a kind of its own and never a subclass of a refusal or a failure.

The tree::

    SpindelError
    ├── CallerError                  the calling code is wrong; mend it
    │   ├── InvalidRecordError       a value that no record may hold (also a ValueError)
    │   ├── AdmissionTokenError      a token used up, foreign or expired
    │   ├── ParentNotLiveError       the parent is not a live Run of this room
    │   ├── DuplicateRunError        that run id is taken
    │   ├── WaitRefusedError         waiting here could never end
    │   ├── CausalStoreRequiredError causes need a store
    │   ├── RunNotFinishedError      a lease can't go before the outcome is stored
    │   ├── ForeignRoomError         that Run or hold belongs to another room
    │   └── DurableRoomRequiredError Jobs need a room with a store
    ├── RefusedError                 nothing happened; try later, elsewhere, or not at all
    │   ├── WriteRefusedError        the store refused a mutation
    │   ├── AdmissionRefusedError    the store refused a child's first row
    │   ├── FamilySealedError        the parent admits nobody any more
    │   ├── FamilyCancelledError     the parent was cancelled
    │   ├── RoomAdmissionClosedError the room is sealed, fenced, closed or lost
    │   ├── RoomInUseError           another process, or this one, owns the room
    │   ├── RoomCloseInProgressError another task is closing the room
    │   ├── NotConstructedError      a preparation refused before any effect
    │   ├── SchemaError              the file is newer, foreign or damaged
    │   ├── JobKeyConflictError      another Job lives under that key
    │   ├── JobNotFoundError         the room has no such Job
    │   └── ControlRefusedError      the operators' door isn't there, or refused what was asked
    ├── UnknownOutcomeError          it may have happened; nobody may say that it did not
    │   ├── WriteUncertainError      a mutation may have been committed
    │   ├── AdmissionUncertainError  a child's first row may exist
    │   ├── CauseNotDurableError     a cause may not be stored
    │   └── ControlLostError         the operators' door closed before it answered
    ├── OperatorError                somebody with authority must look
    │   ├── PreparationError         a construction failed; its cleanup is told
    │   ├── RoomCloseRefusedError    Runs or holds remain in the room
    │   ├── StaleRevisionError       the hold has changed since it was read
    │   ├── RecoveryInProgressError  somebody else is recovering it
    │   ├── NotHeldError             there is nothing to recover
    │   ├── CallbackNotExitedError   the admitting callback is still inside
    │   ├── AcknowledgeRefusedError  an attestation can't stand in for this step
    │   ├── ConstructionOwnerUnavailableError  nobody can dispose what was begun
    │   ├── LaunchNotRecoverableError          a launch that ran is never run again
    │   ├── FamilyUnsupportedError   the family state can't mint a witness
    │   └── StageHeldError           a retried stage failed again
    └── OutcomeError                 how a Run, a room or a watch ended
        ├── RunFailedError
        ├── RunCancelledError
        ├── RunWaitingError
        ├── RunAbandonedError
        ├── RoomOwnershipLostError
        └── WatchLaggedError

`AdmissionError` is a second base of everything that an admission raises, so that one `except` serves.
`RunWaiting` is no error: work raises it to end as *waiting*.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spindel.ids import LaunchId, LeaseId, RunId

__all__ = [
    "AcknowledgeRefusedError",
    "AdmissionError",
    "AdmissionRefusedError",
    "AdmissionTokenError",
    "AdmissionUncertainError",
    "CallbackNotExitedError",
    "CallerError",
    "CausalStoreRequiredError",
    "CauseNotDurableError",
    "ConstructionOwnerUnavailableError",
    "ControlLostError",
    "ControlRefusedError",
    "DuplicateRunError",
    "DurableRoomRequiredError",
    "FamilyCancelledError",
    "FamilySealedError",
    "FamilyUnsupportedError",
    "ForeignRoomError",
    "InvalidRecordError",
    "JobKeyConflictError",
    "JobNotFoundError",
    "LaunchNotRecoverableError",
    "NotConstructedError",
    "NotHeldError",
    "OperatorError",
    "OutcomeError",
    "ParentNotLiveError",
    "PreparationError",
    "RecoveryInProgressError",
    "RefusedError",
    "RoomAdmissionClosedError",
    "RoomCloseInProgressError",
    "RoomCloseRefusedError",
    "RoomInUseError",
    "RoomOwnershipLostError",
    "RunAbandonedError",
    "RunCancelledError",
    "RunFailedError",
    "RunNotFinishedError",
    "RunWaiting",
    "RunWaitingError",
    "SchemaError",
    "SpindelError",
    "StageHeldError",
    "StaleRevisionError",
    "UnknownOutcomeError",
    "WaitRefusedError",
    "WatchLaggedError",
    "WriteRefusedError",
    "WriteUncertainError",
]


class SpindelError(Exception):
    """The root of every error that spindel raises on purpose."""


class CallerError(SpindelError):
    """The calling code asked for something that can't be; nothing happened."""


class RefusedError(SpindelError):
    """Nothing happened, and nothing will from this request."""


class UnknownOutcomeError(SpindelError):
    """It may have happened. Neither success nor failure may be concluded."""


class OperatorError(SpindelError):
    """Somebody with authority over the room must look at it."""


class OutcomeError(SpindelError):
    """How a Run, a room or a watch ended, told to somebody who waited for it."""


class AdmissionError(SpindelError):
    """Any reason why a child or a root Run was not admitted."""


class InvalidRecordError(CallerError, ValueError):
    """A value that no record may hold, or an argument out of range.

    Attributes:
        key: the name of the field or argument, with a path inside it where there is one.
        problem: what is wrong with it.
    """

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        self.problem = problem
        super().__init__(f"{key}: {problem}")


class AdmissionTokenError(CallerError, AdmissionError):
    """An admission token that admits nothing here.

    Attributes:
        reason: `consumed`, `foreign-parent`, `foreign-context` or `expired`.
        run_id: the child id that the token was reserved for.
    """

    def __init__(self, reason: str, run_id: RunId) -> None:
        self.reason = reason
        self.run_id = run_id
        super().__init__(
            f"the admission token of run {run_id} admits nothing: {reason}; reserve a new one in the task that admits"
        )


class ParentNotLiveError(CallerError, AdmissionError):
    """The parent is not a live, original Run of this room and incarnation.

    Attributes:
        parent_id: the Run that was named as parent.
    """

    def __init__(self, parent_id: object) -> None:
        self.parent_id = parent_id
        super().__init__(f"run {parent_id} can't admit children: it isn't a live Run of this room and incarnation")


class DuplicateRunError(CallerError, AdmissionError):
    """The run id is already in use in this store.

    Attributes:
        run_id: the id that was asked for.
    """

    def __init__(self, run_id: RunId) -> None:
        self.run_id = run_id
        super().__init__(f"run {run_id} exists already; leave out run_id to get a fresh one")


class WaitRefusedError(CallerError):
    """Waiting here could never end, or would hold an exclusive stretch while it waits.

    Attributes:
        reason: `run-frontier`, `room-gate`, `host-line`, `no-task`, `self`, or one of a layer above.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"this wait is refused ({reason}): {_WAIT_ADVICE.get(reason, _WAIT_FRONTIER)}")


_WAIT_FRONTIER = "leave the exclusive stretch first, or wait in a task started outside it"
_WAIT_ADVICE = {
    "self": "it would wait for the very Run, ancestor or room that must wait for it; wait in a task outside",
    "no-task": "there is no Trio task to suspend; wait in a task of the loop",
}


class CausalStoreRequiredError(CallerError):
    """A cause was to be recorded in a room without a store.

    Attributes:
        room: the room's name.
    """

    def __init__(self, room: str) -> None:
        self.room = room
        super().__init__(f"room {room!r} has no store, so it can't record causes; open it with a store")


class RunNotFinishedError(CallerError):
    """A step of a Run's end was to be taken before the one that it needs: join, store the outcome, release the lease.

    Attributes:
        run_id: the Run.
        problem: what is missing, and what to do first.
    """

    def __init__(
        self, run_id: RunId, problem: str = "it has no stored outcome yet; persist it, then release its lease"
    ) -> None:
        self.run_id = run_id
        self.problem = problem
        super().__init__(f"run {run_id}: {problem}")


class ForeignRoomError(CallerError):
    """A Run, lease or launch of another room, or of another opening of this one.

    Attributes:
        room: the room that was asked.
        subject: what does not belong to it.
    """

    def __init__(self, room: str, subject: object) -> None:
        self.room = room
        self.subject = subject
        super().__init__(f"room {room!r} does not own {subject}; use the Room object that started it")


class DurableRoomRequiredError(CallerError, AdmissionError):
    """A Job was to be started in a room without a store.

    Attributes:
        room: the room's name.
    """

    def __init__(self, room: str) -> None:
        self.room = room
        super().__init__(f"room {room!r} has no store, so it can't keep Jobs; open it with a store")


class JobKeyConflictError(RefusedError, AdmissionError):
    """Another Job lives under that key, of another parent or for another offer.

    Attributes:
        key: the key.
        job_id: the living Job, or None while it is being started.
    """

    def __init__(self, key: str, job_id: RunId | None) -> None:
        self.key = key
        self.job_id = job_id
        who = "a Job that is being started" if job_id is None else f"Job {job_id}"
        super().__init__(
            f"key {key!r} belongs to {who}, of another parent or offer; use another key or wait for its end"
        )


class JobNotFoundError(RefusedError):
    """The room has no Job of that id.

    Attributes:
        room: the room's name.
        job_id: the id.
    """

    def __init__(self, room: str, job_id: RunId) -> None:
        self.room = room
        self.job_id = job_id
        super().__init__(f"room {room!r} has no Job {job_id}; it may be a plain Run, or of another room")


class ControlRefusedError(RefusedError):
    """The operators' door can't be opened or reached there, or what was asked through it was refused.

    Attributes:
        code: of the door itself `bad-path`, `bad-folder`, `in-use`, `unreachable`, `other-user`, `bad-request`, `busy`,
            `foreign-room`, `too-long` or `internal`; else the name of the error that refused, such as `stale-revision`.
    """

    def __init__(self, code: str, sentence: str) -> None:
        self.code = code
        super().__init__(sentence)


class WriteRefusedError(RefusedError):
    """The store refused a mutation: nothing was committed, nothing will be.

    Attributes:
        code: the rule that refused it, such as `terminal-fence`.
        transient: True if the same mutation may succeed later.
        detail: more for a human, or None.
    """

    def __init__(self, code: str, *, transient: bool = False, detail: str | None = None) -> None:
        self.code = code
        self.transient = transient
        self.detail = detail
        text = f"the store refused the write: {code}"
        if detail:
            text += f" ({detail})"
        if transient:
            text += "; nothing was stored, the same write may succeed later"
        super().__init__(text)


class AdmissionRefusedError(RefusedError, AdmissionError):
    """The store refused the first row of a Run, so it never began.

    Attributes:
        run_id: the Run.
        code: the store's code, such as `parent-not-live`.
        transient: True if a new start may succeed later.
    """

    def __init__(self, run_id: RunId, code: str, *, transient: bool = False, detail: str | None = None) -> None:
        self.run_id = run_id
        self.code = code
        self.transient = transient
        self.detail = detail
        text = f"run {run_id} was not admitted: the store refused its first row ({code})"
        if detail:
            text += f": {detail}"
        super().__init__(text)


class FamilySealedError(RefusedError, AdmissionError):
    """The Run has decided its outcome and takes no more children or tasks.

    Attributes:
        run_id: the parent.
    """

    def __init__(self, run_id: RunId) -> None:
        self.run_id = run_id
        super().__init__(f"run {run_id} is sealed: it takes no more children or plain tasks")


class FamilyCancelledError(RefusedError, AdmissionError):
    """The Run was cancelled, and cancellation is sticky.

    Attributes:
        run_id: the parent.
        reason: why it was cancelled.
    """

    def __init__(self, run_id: RunId, reason: str) -> None:
        self.run_id = run_id
        self.reason = reason
        super().__init__(f"run {run_id} was cancelled ({reason}) and takes no more children")


class RoomAdmissionClosedError(RefusedError, AdmissionError):
    """The room's gate is shut for this admission.

    Attributes:
        room: the room's name.
        state: its state.
    """

    def __init__(self, room: str, state: str) -> None:
        self.room = room
        self.state = state
        super().__init__(f"room {room!r} is {state} and admits no such Run; open the room again")


class RoomInUseError(RefusedError):
    """The room has a living owner.

    Attributes:
        room: the room's name.
        owner: what is recorded of the owner: `pid`, `host`, `since`, or empty if unreadable.
    """

    def __init__(self, room: str, owner: dict[str, Any]) -> None:
        self.room = room
        self.owner = owner
        who = f"process {owner['pid']}" if "pid" in owner else "another opener"
        if owner.get("host"):
            who += f" on {owner['host']}"
        if owner.get("command"):
            who += f" ({owner['command']})"
        if owner.get("since"):
            who += f", since {owner['since']}"
        super().__init__(
            f"room {room!r} is in use by {who}; end that one, or choose another room name (a cold read works meanwhile)"
        )


class RoomCloseInProgressError(RefusedError):
    """Another task is closing the room right now.

    Attributes:
        room: the room's name.
    """

    def __init__(self, room: str) -> None:
        self.room = room
        super().__init__(f"room {room!r} is being closed by another task; wait for that one")


class NotConstructedError(RefusedError, AdmissionError):
    """Raised by a preparation before any effect: nothing is owed.

    Attributes:
        problem: what stopped it.
    """

    def __init__(self, problem: str = "the preparation refused before any effect") -> None:
        self.problem = problem
        super().__init__(problem)


class SchemaError(RefusedError):
    """The file is no database, is newer than this version, foreign, read-only or damaged. It was not changed.

    Attributes:
        path: the file.
        problem: what is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class WriteUncertainError(UnknownOutcomeError):
    """A mutation may have been committed, and may still be.

    Attributes:
        identity: the mutation's identity; `Store.confirm` looks it up.
    """

    def __init__(self, identity: tuple[str, ...], detail: str | None = None) -> None:
        self.identity = identity
        self.detail = detail
        text = (
            f"it is unknown whether {'/'.join(identity)} was stored; confirm it by its identity or repeat it unchanged"
        )
        if detail:
            text += f" ({detail})"
        super().__init__(text)


class AdmissionUncertainError(UnknownOutcomeError, AdmissionError):
    """The first row of a Run may exist. Its body did not begin and never will.

    Attributes:
        run_id: the Run.
        lease_id: the admission lease that is held, or None for a root Run.
        fenced: True if a terminal fence was acknowledged, so nothing is owed any more.
        disposal: what became of its prepared things, if they were disposed after the fence.
    """

    def __init__(
        self, run_id: RunId, lease_id: LeaseId | None = None, *, fenced: bool = False, disposal: str | None = None
    ) -> None:
        self.run_id = run_id
        self.disposal = disposal
        self.lease_id = lease_id
        self.fenced = fenced
        state = "it was fenced as failed/admission-failed" if fenced else "it is held until it is fenced"
        super().__init__(
            f"it is unknown whether the first row of run {run_id} was stored; its body never began; {state}"
        )


class CauseNotDurableError(UnknownOutcomeError):
    """A value was there, but its cause link could not be shown to be stored.

    Attributes:
        run_id: the consumer.
        cause_id: the Run whose outcome was consumed.
    """

    def __init__(self, run_id: RunId, cause_id: RunId, detail: str) -> None:
        self.run_id = run_id
        self.cause_id = cause_id
        self.detail = detail
        super().__init__(f"run {run_id} could not show that its cause {cause_id} is stored: {detail}")


class ControlLostError(UnknownOutcomeError):
    """The operators' door closed before it answered, or answered what nobody here knows; it may have been done.

    Attributes:
        path: the socket.
    """

    def __init__(self, path: str, what: str = "closed before it answered") -> None:
        self.path = path
        super().__init__(f"{path} {what}, so what was asked may have been done; look before you repeat it")


class PreparationError(OperatorError, AdmissionError):
    """A construction failed. What it began was disposed, or is held.

    Attributes:
        run_id: the Run that was to begin.
        lease_id: its admission lease; only a child's can be held.
        disposal: `discarded`, another disposal, `nothing`, or None if unknown.
        held: True if an operator must act.
    """

    def __init__(self, run_id: RunId, lease_id: LeaseId | None, disposal: str | None, *, held: bool) -> None:
        self.run_id = run_id
        self.lease_id = lease_id
        self.disposal = disposal
        self.held = held
        state = "held for an operator" if held else f"cleanup: {disposal}"
        super().__init__(f"the preparation of run {run_id} failed; it never began; {state}")


class _Held(Protocol):
    """What this layer needs to know of something held; see `spindel.runs.HeldObligation`."""

    @property
    def run_id(self) -> RunId: ...
    @property
    def phase(self) -> str: ...


class RoomCloseRefusedError(OperatorError):
    """Runs or holds remain. The fence stays; `close` may be called again.

    Attributes:
        room: the room's name.
        remaining: ids of Runs that have not returned.
        held: what waits for an operator.
    """

    def __init__(self, room: str, remaining: Sequence[RunId], held: Sequence[_Held]) -> None:
        self.room = room
        self.remaining = tuple(remaining)
        self.held = tuple(held)
        holds = "nothing is held"
        if self.held:
            holds = "held: " + _first(f"run {hold.run_id} at {hold.phase}" for hold in self.held)
        super().__init__(
            f"room {room!r} can't close yet: {len(self.remaining)} Runs remain ({_first(map(str, self.remaining))}), "
            f"{holds}; it stays fenced: close it again when they have returned"
        )


def _first(names: Iterable[str], limit: int = 5) -> str:
    """Join the first few of many names."""
    every = tuple(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")


class StaleRevisionError(OperatorError):
    """The hold has changed since it was read; read it again.

    Attributes:
        subject: the lease, launch or Job.
    """

    def __init__(self, subject: object) -> None:
        self.subject = subject
        super().__init__(f"the hold of {subject} has changed since it was read; read it again, then decide")


class RecoveryInProgressError(OperatorError):
    """Another recovery has claimed this hold.

    Attributes:
        subject: the lease, launch or Job.
    """

    def __init__(self, subject: object) -> None:
        self.subject = subject
        super().__init__(f"{subject} is being recovered by another caller; wait for its end")


class NotHeldError(OperatorError):
    """There is nothing to recover.

    Attributes:
        subject: the lease, launch or Job.
        blocked_by: Runs that it waits for instead.
    """

    def __init__(self, subject: object, blocked_by: Sequence[RunId] = ()) -> None:
        self.subject = subject
        self.blocked_by = tuple(blocked_by)
        text = f"{subject} is not held"
        if self.blocked_by:
            text += f"; it waits for {', '.join(map(str, self.blocked_by))}"
        super().__init__(text)


class CallbackNotExitedError(OperatorError):
    """The callback that reserved the lease is still inside its block.

    Attributes:
        lease_id: the lease.
    """

    def __init__(self, lease_id: LeaseId) -> None:
        self.lease_id = lease_id
        super().__init__(f"lease {lease_id} can't be recovered while its reserving block is still open")


class AcknowledgeRefusedError(OperatorError):
    """An attestation can't stand in for this step; use `retry`.

    Attributes:
        subject: the lease or Job.
        phase: the phase or stage it is held in.
    """

    def __init__(self, subject: object, phase: str) -> None:
        self.subject = subject
        self.phase = phase
        super().__init__(f"{subject} is held at {phase}: an acknowledgement can't stand in for it; use retry")


class ConstructionOwnerUnavailableError(OperatorError):
    """Something may have been constructed, and nobody who could dispose it is known.

    Attributes:
        lease_id: the lease.
    """

    code = "construction-owner-unavailable"

    def __init__(self, lease_id: LeaseId) -> None:
        self.lease_id = lease_id
        super().__init__(f"lease {lease_id} can't be recovered: no owner was named before its construction failed")


class LaunchNotRecoverableError(OperatorError):
    """A launch that is running or has run is never run again.

    Attributes:
        launch_id: the launch.
        code: `launch-running` or `consumed`.
    """

    def __init__(self, launch_id: LaunchId, code: str) -> None:
        self.launch_id = launch_id
        self.code = code
        super().__init__(f"launch {launch_id} can't be recovered: {code}")


class FamilyUnsupportedError(OperatorError):
    """The registry entry has no family state of a supported version, so no witness can be minted.

    Attributes:
        run_id: the Run.
    """

    def __init__(self, run_id: RunId) -> None:
        self.run_id = run_id
        super().__init__(f"run {run_id} has no supported family state; it ends without a family witness")


class StageHeldError(OperatorError):
    """A held stage was retried and failed again; it is held under a new revision.

    Attributes:
        locator: the hold's new form.
        stage: the stage.
    """

    def __init__(self, locator: Any, stage: str) -> None:
        self.locator = locator
        self.stage = stage
        super().__init__(f"stage {stage} failed again and is held under a new revision; read it, then decide")


class RunFailedError(OutcomeError):
    """The Run failed. Its own error is the `__cause__`, if this process knows it.

    Attributes:
        run_id: the Run.
        reason: the stored reason, such as `orphaned`, or None.
    """

    def __init__(self, run_id: RunId, reason: str | None = None) -> None:
        self.run_id = run_id
        self.reason = reason
        super().__init__(f"run {run_id} failed" + (f" ({reason})" if reason else ""))


class RunCancelledError(OutcomeError):
    """The Run ended cancelled.

    Attributes:
        run_id: the Run.
        reason: why it was cancelled.
    """

    def __init__(self, run_id: RunId, reason: str | None = None) -> None:
        self.run_id = run_id
        self.reason = reason
        super().__init__(f"run {run_id} was cancelled" + (f" ({reason})" if reason else ""))


class RunWaitingError(OutcomeError):
    """The Run ended as *waiting*: another Run is to go on from here.

    Attributes:
        run_id: the Run.
        reason: what it waits for.
    """

    def __init__(self, run_id: RunId, reason: str | None = None) -> None:
        self.run_id = run_id
        self.reason = reason
        super().__init__(f"run {run_id} ended waiting" + (f" for {reason}" if reason else ""))


class RunAbandonedError(OutcomeError):
    """An operator abandoned the hold above this Run; its row keeps saying `running`.

    Attributes:
        run_id: the Run.
    """

    def __init__(self, run_id: RunId) -> None:
        self.run_id = run_id
        super().__init__(f"run {run_id} was abandoned by an operator; what became of it is unknown")


class RoomOwnershipLostError(OutcomeError):
    """A newer owner has the room; nothing more was claimed or written here.

    Attributes:
        room: the room's name.
        epoch: the epoch that this process held.
    """

    def __init__(self, room: str, epoch: int) -> None:
        self.room = room
        self.epoch = epoch
        super().__init__(
            f"room {room!r} was taken over (epoch {epoch} is old); its Runs were cancelled and not recorded"
        )


class WatchLaggedError(OutcomeError):
    """A watch fell behind its buffer and ended; open a new one for a fresh snapshot.

    Attributes:
        room: the room's name.
        buffer: how many events it could hold.
    """

    def __init__(self, room: str, buffer: int) -> None:
        self.room = room
        self.buffer = buffer
        super().__init__(f"a watch of room {room!r} fell more than {buffer} events behind; open a new one")


class RunWaiting(Exception):  # noqa: N818  a signal, not an error: the work ends well and another Run follows
    """Raise it in work to end the Run as *waiting*; a new Run goes on later.

    Attributes:
        reason: what is waited for, `[a-z0-9-]{1,64}`.

    Raises:
        InvalidRecordError: no row may hold that reason.
    """

    def __init__(self, reason: str = "waiting") -> None:
        # A member of an enumeration of texts is a fine reason; rows hold its text.
        self.reason = str.__str__(reason)
        if re.fullmatch(r"[a-z0-9-]{1,64}", self.reason) is None:
            raise InvalidRecordError("reason", f"{reason!r} is not 1 to 64 characters of [a-z0-9-]")
        super().__init__(self.reason)
