"""Finishing: join the family, store the outcome, release the lease, publish. Never cancelled, without a deadline.

| step | what | if it fails |
|---|---|---|
| 1 | join the family on a pool worker, close the nurseries | the launch is held |
| 2 | one write: the frozen outcome with the family witness | uncertain, transient: the same write again; else held |
| 3 | release the execution lease: event, waiters | it can't |
| 4 | publish on the pool; then the admission lease goes | held |

Steps 1 to 3 run in the Run's own task, which then returns. A layer that has more to do between them brings a
`Finisher`, which walks its own stages over the same steps: there is one engine.

Three things end a Run otherwise. `lost`: a newer owner has the room, so nothing is written or claimed any more.
`abandoned`: an operator gave up a hold of this Run or below it, so nobody can say that the family returned; the row
keeps saying `running`. Both wake the waiters with an error of their own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from spindel.clock import Backoff
from spindel.errors import (
    FamilyUnsupportedError,
    InvalidRecordError,
    RunAbandonedError,
    RunNotFinishedError,
    WaitRefusedError,
    WriteRefusedError,
)
from spindel.observe import RunFinished
from spindel.runs._cancelling import request_cancel
from spindel.runs._frontier import held_frontier
from spindel.runs._outcome import Decision, Outcome, error_text, without_cancelled
from spindel.runs._parking import park, sleep_shielded
from spindel.runs._states import HoldKind, LaunchKind, LaunchState, LeasePhase, Publication, RoomState
from spindel.store import FAMILY_VERSION, AppendWitnesses, Confirmation, FinishRun, RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.runs._entry import Entry, FamilyState
    from spindel.runs._pool import Launch
    from spindel.store import Mutation, RunRecord

__all__ = ["Finisher", "Finishing", "finish", "outcome_of", "release", "set_verdict"]

_log: Final = logging.getLogger("spindel.runs")
_RETRY: Final = Backoff(0.025, 5.0)
_LOG_SECONDS: Final = 60.0


class Finisher(Protocol):
    """What a layer above does instead of steps 1 to 3, in the Run's own task.

    A cancelled family's scope may lie around that task. No step of `Finishing` can be cancelled; whatever else is
    awaited is to be shielded. There is no shield around all of it, since that costs as much as a write.

    One with an attribute `job`, a `JobIdentity`, makes its Run a Job: the first row says so.
    """

    async def finish(self, finishing: Finishing) -> None:
        """Walk the stages. On return the lease must have been released.

        Raises:
            RunAbandonedError, RoomOwnershipLostError: passed on from a step; the Run ends so.
        """
        ...


async def finish(entry: Entry) -> None:
    """End a Run whose work is over."""
    if entry.finisher is not None:
        await _finish_by(entry, entry.finisher)
        return
    try:
        end = await _persist(entry) if await _join(entry) else _given_up(entry)
    except BaseException as bug:  # noqa: ASYNC103, BLE001  the Run's task never raises into its parent's nursery
        # Nothing here raises on purpose. If something does all the same, it has a name, and the room isn't stuck.
        _log.exception("the end of run %s broke down", entry.run_id, extra={"run_id": str(entry.run_id)})
        await _hold_broken(entry, bug)  # noqa: ASYNC102  no wait in it can be cancelled
        await _all_back(entry)  # noqa: ASYNC102  as above
        end = "abandoned"
    release(entry, end)


async def _finish_by(entry: Entry, finisher: Finisher) -> None:
    """Let a layer above walk its stages; whatever comes out of it, the Run ends or is held by name."""
    problem: BaseException | None = None
    try:
        await finisher.finish(Finishing(entry))
    except BaseException as error:  # noqa: ASYNC103, BLE001  kept; the Run's task never raises into its parent's nursery
        problem = error
    if entry.end is not None:
        _leave(entry)
        return
    if entry.room.state is RoomState.LOST:
        await _all_back(entry)
        release(entry, "lost")
        _leave(entry)
        return
    if not isinstance(problem, RunAbandonedError):
        rest = without_cancelled(problem) if problem is not None else None
        if rest is not None and not isinstance(rest, Exception):
            # A `Cancelled` is of a scope around this task, which an unshielded wait met; no room raises it for another.
            entry.room.interrupt(rest)
        await _hold_broken(entry, problem or RunNotFinishedError(entry.run_id))
    await _all_back(entry)
    release(entry, "abandoned")
    _leave(entry)


def _given_up(entry: Entry) -> str:
    """Tell how a Run leaves whose family nobody vouches for: in a lost room that was no operator's word."""
    return "lost" if entry.room.state is RoomState.LOST else "abandoned"


async def _hold_broken(entry: Entry, problem: BaseException) -> None:
    """Hold an end that broke its promise: nobody else may say how far it came, so only abandoning ends it."""
    await park(lambda resume: entry.room.holds.add(entry, "finisher", problem, lambda _: resume(), kind=HoldKind.STAGE))


def set_verdict(entry: Entry, decision: Decision) -> None:
    """Choose the outcome, once."""
    assert entry.verdict is None, "an outcome is decided once"
    entry.verdict = decision.status
    entry.reason = decision.reason
    entry.error = decision.error
    if decision.status is not RunStatus.COMPLETED:
        entry.value = None
    if decision.status is RunStatus.FAILED and entry.parent is not None:
        _child_failed(entry.parent, decision.error)


def _child_failed(parent: Entry, error: BaseException | None) -> None:
    """Tell a parent with the policy `cancel` that a child failed: the first failure cancels the rest, sticky."""
    if parent.on_child_failure != "cancel" or parent.verdict is not None:
        return
    assert error is not None, "a failure has an error"
    if parent.first_failure is None:
        parent.first_failure = [error]
        request_cancel((parent,), "child-failed")
    elif parent.first_failure:
        # An empty list says that the work failed first; children that fail then change nothing.
        parent.first_failure.append(error)


def outcome_of(entry: Entry) -> Outcome[Any]:
    """Give the decided outcome, made when somebody first looks at it.

    Raises:
        RunNotFinishedError: nothing is decided.
    """
    if entry.outcome is None:
        if entry.verdict is None:
            raise RunNotFinishedError(entry.run_id)
        entry.outcome = Outcome(entry.run_id, entry.verdict, entry.value, entry.error, entry.reason)
    return entry.outcome


class Finishing:
    """The steps of one Run's end, for its `Finisher`."""

    __slots__ = ("_entry", "_frozen", "_joining", "_persisting", "_returned")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._frozen: FinishRun | None = None
        self._joining = False
        self._persisting = False
        # What the join said: None before it, False if its word was given up.
        self._returned: bool | None = None

    @property
    def run_id(self) -> RunId:
        """The Run."""
        return self._entry.run_id

    @property
    def outcome(self) -> Outcome[Any]:
        """What was decided; under the policy `cancel` only after `join`."""
        return outcome_of(self._entry)

    async def join(self) -> None:
        """Join the sealed family on a pool worker and close the nurseries. Once is enough; again is harmless.

        Cancellation: none.

        Raises:
            WaitRefusedError: under a frontier; a child may need it in order to end.
            RunAbandonedError: an operator gave up a hold below, or the join itself, so the return is unknown.
            RuntimeError: another task is joining it.
        """
        reason = held_frontier()
        if reason is not None:
            raise WaitRefusedError(reason)
        if self._joining:
            raise RuntimeError(f"the family of run {self._entry.run_id} is being joined by another task")
        if self._returned is None:
            self._joining = True
            try:
                self._returned = await _join(self._entry)
            finally:
                self._joining = False
        self._require_joined()

    def _require_joined(self) -> None:
        """Let nothing vouch for a family but its own join, and nothing be stored or released before it.

        Raises:
            RunNotFinishedError: `join` has not come back.
            RunAbandonedError: it came back without the family's word.
        """
        if self._returned is None:
            raise RunNotFinishedError(self._entry.run_id, "its family has not been joined; join it first")
        if not self._returned:
            raise RunAbandonedError(self._entry.run_id)

    @property
    def mints_witness(self) -> bool:
        """True if the registry entry has a family state that can vouch for the family's return."""
        return _mints_witness(self._entry)

    @property
    def ended_at(self) -> int | None:
        """When the outcome was frozen, in UTC microseconds."""
        return None if self._frozen is None else self._frozen.ended_at

    @property
    def family_returned(self) -> bool:
        """True if the family is observably gone, whatever its join says: sealed, no lease, nothing given up."""
        family = self._entry.family
        return self._entry.sealed and (family is None or (family.returned and not family.abandoned))

    @property
    def lease_released(self) -> bool:
        """True once the execution lease is gone."""
        return self._entry.end is not None

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Read a frozen write back. Not cancellable.

        Raises:
            WriteUncertainError: the reading itself failed.
        """
        store = self._entry.room.store
        assert store is not None, "only a store has rows"
        return await store.confirm(mutation)

    async def confirm_outcome(self) -> Confirmation:
        """Read the frozen outcome back, and repair the live Run if it is there.

        Raises:
            RunNotFinishedError: no attempt was made to store it.
            WriteUncertainError: the reading itself failed.
        """
        if self._frozen is None:
            raise RunNotFinishedError(self._entry.run_id)
        confirmation = await self.confirm(self._frozen)
        if confirmation is Confirmation.PRESENT:
            self._entry.status = _verdict(self._entry)
        return confirmation

    async def append_witnesses(self, mutation: AppendWitnesses) -> None:
        """Write witnesses of this Run, in one attempt.

        Durability: on return they are committed.

        Cancellation: none.

        Raises:
            InvalidRecordError: they are another Run's.
            RunNotFinishedError, RunAbandonedError: the family's witness before its join, or without its word.
            FamilyUnsupportedError: the family's witness, which the registry entry can't vouch for.
            WriteRefusedError, WriteUncertainError: as the store says; the same mutation may be sent again.
            RoomOwnershipLostError: a newer owner has the room.
        """
        if mutation.id != self._entry.run_id:
            raise InvalidRecordError("id", f"run {self._entry.run_id} can't witness for another one")
        if mutation.family is not None:
            self._require_joined()
            if self._entry.family_version != FAMILY_VERSION:
                raise FamilyUnsupportedError(self._entry.run_id)
        if self._entry.room.store is not None:
            await self._entry.room.write(mutation)

    async def persist_outcome(
        self, *, family_returned: bool = True, result_state: str | None = None, scorecard: UUID | None = None
    ) -> RunRecord | None:
        """Store the outcome, in one attempt; the execution lease is kept.

        Durability: on return it is committed.

        Cancellation: none.

        Returns:
            The row for the one caller that stored it; None for a later one, and without a store.

        Raises:
            RunNotFinishedError: the family has not been joined; what came back is not known before.
            RunAbandonedError: the join came back without the family's word.
            WriteRefusedError, WriteUncertainError: as the store says; a later call sends the identical write.
            RoomOwnershipLostError: a newer owner has the room.
        """
        store = self._entry.room.store
        stored = await self.store_outcome(
            family_returned=family_returned, result_state=result_state, scorecard=scorecard
        )
        if store is None or not stored:
            return None
        with trio.CancelScope(shield=True):
            return await store.load_run(self._entry.room.name, self._entry.run_id)
        raise AssertionError("nobody cancels a shield")

    async def store_outcome(
        self, *, family_returned: bool = True, result_state: str | None = None, scorecard: UUID | None = None
    ) -> bool:
        """As `persist_outcome`, for whoever has no use for the row: a reading costs as much as the write.

        Returns:
            True for the one caller that stored it.
        """
        entry = self._entry
        self._require_joined()
        if self._persisting or _is_stored(entry):
            return False
        if entry.room.store is None:
            entry.status = _verdict(entry)
            return True
        if self._frozen is None:
            self._frozen = _freeze(entry, family_returned, result_state, scorecard)
        self._persisting = True
        try:
            await entry.room.write(self._frozen)
        finally:
            self._persisting = False
        entry.status = _verdict(entry)
        return True

    def release_lease(self) -> None:
        """Remove the execution lease, wake the waiters, start the publication.

        Raises:
            RunNotFinishedError: the outcome isn't stored.
        """
        if not _is_stored(self._entry):
            raise RunNotFinishedError(self._entry.run_id)
        if self._entry.end is None:
            release(self._entry, "finished")


def release(entry: Entry, end: str) -> None:
    """Remove the execution lease: references, event, waiters; then let the admission lease follow. One turn.

    A finisher keeps the admission lease until it returns: it may be held even then, and must be found and waited for.
    """
    room = entry.room
    entry.live = False
    entry.end = end
    if end == "finished":
        room.events.emit(RunFinished, entry.run_id, entry.status.value, entry.reason)
    elif end == "abandoned":
        entry.owner.abandoned = True
    if entry.done is not None:
        entry.done.set()
    if entry.started is not None:
        entry.started.event.set()
    if entry.family is not None:
        # Whoever keeps an ended child keeps the family that owned it, and so must not keep all that was above.
        entry.family.parent = None
    entry.scope = entry.callbacks = entry.family = entry.work = None
    if entry.finisher is None:
        _leave(entry)


def _leave(entry: Entry) -> None:
    """Publish, and let the admission lease go: the Run's task has nothing more to do."""
    entry.finisher = None
    entry.returned = True
    if entry.publish is not None:
        if entry.end == "finished":
            _publish(entry)
        else:
            entry.publication = Publication.NONE
    entry.release_if_over()


async def _join(entry: Entry) -> bool:
    family = entry.family
    returned = True
    if family is not None:
        # A family that is empty at the seal is returned by it: a leaf pays for no launch.
        if family.leases:
            returned = await _join_family(entry, family)
        returned = returned and not family.abandoned
    if family is not None or entry.host is not None or entry.outside:
        await _all_back(entry)
    else:
        entry.joined = True
    if entry.verdict is None:
        _decide_with_family(entry)
    return returned


async def _join_family(entry: Entry, family: FamilyState) -> bool:
    """Join on the pool. False if an operator gave up the worker: then nobody certifies the return."""
    try:
        await entry.room.pool.join(family)
    except RunAbandonedError:
        return False
    return True


async def _all_back(entry: Entry) -> None:
    """Wait until nothing of a Run is out any more, whatever may be said about it. Not cancellable.

    What an operator gives up is a word, never what is there. An admission whose row is on its way may still become a
    child, so the nurseries close after the last of them; and left open, they would keep those above for ever.
    """
    if entry.family is not None:
        await entry.family.wait_returned()
    if entry.host is not None:
        await entry.host.join()
        entry.host = None
    while entry.outside:
        # Somebody else's task may have launched a thread for this Run; it is the Run's all the same.
        await park(lambda resume: setattr(entry, "inside", resume))
    entry.joined = True


def _decide_with_family(entry: Entry) -> None:
    """Under the policy `cancel`: a child that failed first decides, else the work does."""
    assert entry.work is not None, "the work is over before its family is joined"
    if entry.first_failure:
        group = BaseExceptionGroup("children failed", entry.first_failure)
        set_verdict(entry, Decision(RunStatus.FAILED, "child-failed", group))
    else:
        set_verdict(entry, entry.work)
    entry.first_failure = None


async def _persist(entry: Entry) -> str:
    """Store the outcome, however long it takes. Returns how the Run left: finished, lost or abandoned."""
    room = entry.room
    if room.state is RoomState.LOST:
        return "lost"
    if room.store is not None:
        mutation = _freeze(entry, family_returned=True)
        try:
            await room.store.write_shielded(mutation)
        except Exception as error:  # noqa: BLE001  whatever a store does, the outcome is stored, or held by name
            end = await _persist_again(entry, mutation, error)
            if end != "finished":
                return end
    entry.status = _verdict(entry)
    return "finished"


async def _persist_again(entry: Entry, mutation: FinishRun, error: Exception) -> str:
    """Repeat the identical write: its identity makes it harmless if an earlier one was stored after all."""
    room = entry.room
    assert room.store is not None, "only a store refuses"
    delays = _RETRY.delays()
    logged = float("-inf")
    problem = error
    while True:
        if _is_refusal(problem):
            if isinstance(problem, WriteRefusedError) and problem.code == "not-owner":
                room.lose()
                return "lost"
            action = await _hold_terminal(entry, mutation, problem)
            if room.state is RoomState.LOST:
                return "lost"
            return "abandoned" if action == "abandon" else "finished"
        if trio.current_time() - logged >= _LOG_SECONDS:
            logged = trio.current_time()
            _log.warning(
                "the outcome of run %s is not stored yet, it is written again: %s",
                entry.run_id,
                problem,
                extra={"run_id": str(entry.run_id)},
            )
        await sleep_shielded(next(delays))
        if room.state is RoomState.LOST:
            return "lost"
        try:
            await room.store.write_shielded(mutation)
        except Exception as again:  # noqa: BLE001  as above
            problem = again
        else:
            return "finished"


def _is_refusal(error: Exception) -> bool:
    """Tell whether the same write can't succeed later. An error that no store owes leaves its write uncertain."""
    return isinstance(error, InvalidRecordError) or (isinstance(error, WriteRefusedError) and not error.transient)


async def _hold_terminal(entry: Entry, mutation: FinishRun, error: Exception) -> str:
    """Wait until an operator had the frozen write stored, or gave up. Returns the action."""
    actions: list[str] = []

    async def retry() -> None:
        await entry.room.write(mutation)

    def register(resume: Callable[[], None]) -> None:
        def resolve(action: str) -> None:
            # In this turn: whoever recovered it is told what the lease is now, before the Run's task goes on.
            entry.phase = LeasePhase.ADMITTED
            actions.append(action)
            resume()

        entry.phase = LeasePhase.TERMINAL
        entry.room.holds.add(entry, LeasePhase.TERMINAL.value, error, resolve, retry=retry)

    await park(register)
    return actions[0]


def _publish(entry: Entry) -> None:
    publish, outcome = entry.publish, outcome_of(entry)
    assert publish is not None, "called for an entry with a publication"

    async def call() -> None:
        await publish(outcome)

    def back(launch: Launch) -> None:
        if launch.state is LaunchState.RETURNED:
            resolve("retry")
        elif launch.error is None:
            # The executor never took it, and an operator gave it up: nothing was published.
            resolve("abandon")
        else:
            entry.room.holds.add(
                entry, LeasePhase.PUBLISHING.value, launch.error, resolve, retry=call, acknowledgeable=True
            )

    def resolve(action: str) -> None:
        if action == "abandon":
            entry.owner.abandoned = True
        entry.publication = Publication.NONE if action == "abandon" else Publication.ACKNOWLEDGED
        entry.release_if_over()

    entry.room.pool.start(LaunchKind.PUBLICATION, call, entry, back)


def _freeze(
    entry: Entry, family_returned: bool, result_state: str | None = None, scorecard: UUID | None = None
) -> FinishRun:
    """Freeze the terminal write; every repeat sends this very object."""
    family_returned = family_returned and _mints_witness(entry)
    error = entry.error
    return FinishRun(
        room=entry.room.name,
        epoch=entry.room.epoch,
        id=entry.run_id,
        status=_verdict(entry).value,
        reason=entry.reason,
        error=None if error is None else error_text(error),
        ended_at=entry.room.now_micros(),
        family_returned=family_returned,
        job_result_state=result_state,
        job_scorecard=scorecard,
    )


def _mints_witness(entry: Entry) -> bool:
    if entry.family_version == FAMILY_VERSION:
        return True
    # An owner of an older or unknown family state can't know that everything came back.
    _log.warning("%s", FamilyUnsupportedError(entry.run_id), extra={"run_id": str(entry.run_id)})
    return False


def _verdict(entry: Entry) -> RunStatus:
    assert entry.verdict is not None, "an outcome is decided before it is stored"
    return entry.verdict


def _is_stored(entry: Entry) -> bool:
    return entry.status is not RunStatus.RUNNING
