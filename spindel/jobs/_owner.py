"""The owner of a live Job: the process-local record that keeps its callbacks, outcome and waiters until it is done.

It is the Run's finisher: the Run's own task walks the stages through it, shielded and without a deadline. There is no
table of owners; the Run's registry entry refers to its finisher, and that is where an owner is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from uuid import UUID

import attrs
import trio

from spindel.errors import (
    AcknowledgeRefusedError,
    NotHeldError,
    RecoveryInProgressError,
    RoomOwnershipLostError,
    RunAbandonedError,
    StageHeldError,
    StaleRevisionError,
    WriteUncertainError,
)
from spindel.ids import Revision, RunId
from spindel.jobs._stages import Stage
from spindel.jobs._walk import STEPS, Walk
from spindel.runs._parking import park, wait_any
from spindel.runs._states import HoldKind, RoomState
from spindel.store import JobIdentity

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.runs import Finishing, Outcome, Room, Run
    from spindel.runs._entry import Entry
    from spindel.runs._holds import Hold

__all__ = ["HoldLocator", "JobOwner", "Observation", "RecoveryState"]

T = TypeVar("T")
_BLOCKED_MAX: Final = 20
_PLAIN: Final = JobIdentity(None, None, None)
# A lost room is left after its family has come back, and writes and calls nothing; what is stored may be released.
_OF_A_LOST_ROOM: Final = frozenset({Stage.FAMILY_JOIN, Stage.RELEASE})


@attrs.frozen
class Observation(Generic[T]):
    """What asked for a Job, and how its result is referred to.

    Attributes:
        offer: hash of the whole invocation reference.
        experiment: content id of what is being run.
        result_of: a pure function of the outcome: the content id of its certified result, or None if there is none.
    """

    offer: UUID
    experiment: UUID
    result_of: Callable[[Outcome[T]], UUID | None]


@attrs.frozen
class HoldLocator:
    """Exactly one form of one held stage. It coordinates operators and permits nothing."""

    job_id: RunId
    incarnation: UUID
    stage: Stage
    revision: Revision


@attrs.frozen
class RecoveryState:
    """A held stage, for the operator.

    Attributes:
        error: the original error; it is in no view, row, event or log.
        held_since: wall time in UTC microseconds.
    """

    locator: HoldLocator
    error: BaseException
    held_since: int


@attrs.define(eq=False)
class _Attempt:
    """One recovery: of which form of a hold, and what came of it."""

    revision: Revision
    over: trio.Event = attrs.field(factory=trio.Event)
    error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self.over.set()


class JobOwner:
    """See the module. Made by `start_job` only.

    Attributes:
        job: what makes the Run a Job, for its first row.
        stage: where the walk is.
        hold: what holds the stage; in the room's book until the stage has passed, also while somebody recovers it.
        done: set when the owner is dropped, however that came; made by who first waits for it.
        end: None while it lives; then `done`, `lost` or `abandoned`.
        family_vouched: True once the witness of its family's return is stored.
        result_state, scorecard: of an observed Job, once its outcome is decided.
    """

    __slots__ = (
        "_action",
        "_attempt",
        "_changed",
        "_drop_key",
        "_resume",
        "before_finish",
        "done",
        "end",
        "ended_at",
        "error",
        "family_vouched",
        "hold",
        "job",
        "key",
        "observation",
        "on_settled",
        "reason",
        "result_state",
        "room",
        "run",
        "scorecard",
        "stage",
    )

    def __init__(
        self,
        room: Room,
        key: str | None,
        before_finish: Callable[[Outcome[Any]], Awaitable[None]] | None,
        on_settled: Callable[[Outcome[Any]], Awaitable[None]] | None,
        observation: Observation[Any] | None,
    ) -> None:
        offer = None if observation is None else observation.offer
        experiment = None if observation is None else observation.experiment
        self.room = room
        self.key = key
        self.job = _PLAIN if key is None and observation is None else JobIdentity(key, offer, experiment)
        self.before_finish = before_finish
        self.on_settled = on_settled
        self.observation = observation
        self.run: Run[Any] | None = None
        self.stage = Stage.WORK
        self.hold: Hold | None = None
        self.done: trio.Event | None = None
        self.end: str | None = None
        self.family_vouched = False
        self.result_state: str | None = None
        self.scorecard: UUID | None = None
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.ended_at: int | None = None
        self._drop_key: Callable[[], None] | None = None
        self._changed: trio.Event | None = None
        self._attempt: _Attempt | None = None
        self._resume: Callable[[], None] | None = None
        self._action = "retry"

    @property
    def entry(self) -> Entry:
        """The Run's registry entry, for as long as it is in the registry."""
        assert self.run is not None, "an owner has its Run before anybody can reach it"
        return self.run._entry

    @property
    def job_id(self) -> RunId:
        """The Job."""
        assert self.run is not None, "an owner has its Run before anybody can reach it"
        return self.run.id

    def own(self, run: Run[Any], drop_key: Callable[[], None] | None) -> None:
        """Take the admitted Run, in the turn of its admission: its body has not begun."""
        self.run = run
        self._drop_key = drop_key

    # -- the walk ---------------------------------------------------------------------------------------------------

    async def finish(self, finishing: Finishing) -> None:
        """Walk the stages after the work, each until it has passed."""
        walk = Walk(self, finishing)
        end = "lost"
        try:
            for stage, step in STEPS:
                self.stage = stage
                if stage is Stage.FAMILY_JOIN:
                    # What was held below while it worked keeps it from now on.
                    self.tell_change()
                try:
                    self._raise_if_lost(stage)
                    waiting = step(walk)
                    if waiting is not None:
                        await waiting
                except BaseException as error:  # noqa: ASYNC103, BLE001  held with its owner; only the operator gets it
                    await self._hold_until_passed(stage, step, walk, error)  # noqa: ASYNC102  it refuses every abort
                if self._attempt is not None:
                    # A join's hold is its launch's, so its recovery ends here, as that of a held stage does.
                    self._finish_attempt(None)
            self.stage = Stage.DONE
            end = "done"
        except RunAbandonedError:
            end = "abandoned"
            raise
        finally:
            self._drop(end)

    def _drop(self, end: str) -> None:
        """Drop the owner: key, callbacks, waiters. Touches neither room nor store."""
        self.end = end
        drop_key, self._drop_key = self._drop_key, None
        if drop_key is not None:
            drop_key()
        self.before_finish = self.on_settled = self.observation = None
        if self.done is not None:
            self.done.set()
        self.tell_change()

    async def _hold_until_passed(
        self, stage: Stage, step: Callable[[Walk], Awaitable[None] | None], walk: Walk, error: BaseException
    ) -> None:
        """Hold a stage that failed, again and again, until an operator's word or a repetition has passed it."""
        problem: BaseException | None = error
        while problem is not None:
            try:
                if isinstance(problem, WriteUncertainError) and await walk.is_stored(stage):
                    break
            except BaseException as unread:  # noqa: ASYNC103, BLE001  as below
                problem = unread
            if not isinstance(problem, Exception | trio.Cancelled):
                self.room.interrupt(problem)
            self._end_if_over(stage, problem)
            await self._hold_stage(stage, problem)
            problem = None
            try:
                self._raise_if_lost(stage)
                waiting = walk.acknowledge(stage) if self._action == "acknowledge" else step(walk)
                if waiting is not None:
                    await waiting
            except BaseException as again:  # noqa: ASYNC103, BLE001  held with its owner; only the operator gets it
                problem = again
        self._end_hold(self._action)

    def _raise_if_lost(self, stage: Stage) -> None:
        if self.room.state is RoomState.LOST and stage not in _OF_A_LOST_ROOM:
            raise self._lost()

    def _end_if_over(self, stage: Stage, error: BaseException) -> None:
        """End the owner for an error that leaves nothing to hold.

        Raises:
            RoomOwnershipLostError: a newer owner has the room, and no operator can do anything here any more.
            RunAbandonedError: the family's return will never be known.
        """
        end: Exception
        if self.room.state is RoomState.LOST:
            end = self._lost()
        elif isinstance(error, RunAbandonedError) and stage is Stage.FAMILY_JOIN:
            # From the join of what was given up; a callback's would be about another Run.
            end = error
        else:
            return
        self._end_hold("abandon")
        self._finish_attempt(end)
        raise end

    def _lost(self) -> RoomOwnershipLostError:
        return RoomOwnershipLostError(self.room.name, self.room.epoch)

    def _finish_attempt(self, error: BaseException | None) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.finish(error)

    async def _hold_stage(self, stage: Stage, error: BaseException) -> None:
        """Hold this stage until an operator says how to go on.

        Raises:
            RunAbandonedError, RoomOwnershipLostError: the hold was given up, by the operator or with its room.
        """
        refused = self._action == "acknowledge" and isinstance(error, AcknowledgeRefusedError)

        def register(resume: Callable[[], None]) -> None:
            self._resume = resume
            hold = self.hold
            if hold is None:
                self.hold = self.room.holds.add(self.entry, stage.value, error, self._resolve, kind=HoldKind.STAGE)
            else:
                # Nothing has been recovered. A refused acknowledgement leaves the original error with the owner.
                self.room.holds.again(hold, stage.value, hold.error if refused else error)
            self.tell_change()
            self._finish_attempt(error if refused else StageHeldError(self.locator(), stage.value))

        await park(register)
        if self._action == "abandon":
            raise self._lost() if self.room.state is RoomState.LOST else RunAbandonedError(self.job_id)

    def _resolve(self, action: str) -> None:
        """Note that the hold has gone: its stage has passed, or it was given up while the walk waited."""
        self.hold = None
        self._go_on(action)

    def _go_on(self, action: str) -> None:
        """Let the walk go on from a held stage, if it waits there."""
        resume, self._resume = self._resume, None
        if resume is not None:
            self._action = action
            resume()

    def _end_hold(self, action: str) -> None:
        hold = self.hold
        if hold is not None:
            self.room.holds.end(hold, action)
        self._action = "retry"

    # -- waiting and telling ----------------------------------------------------------------------------------------

    def tell_change(self) -> None:
        """Wake who waits for "done or held"."""
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    async def wait_done(self) -> None:
        """Wait until it is dropped. A checkpoint."""
        if self.end is not None:
            await trio.lowlevel.checkpoint()
            return
        if self.done is None:
            self.done = trio.Event()
        await self.done.wait()

    async def wait_done_or_held(self) -> None:
        """Wait until it is done, a stage of it is held, or it waits for something held below it."""
        while self.end is None and self.held_stage() is None and not self.blocked_by():
            # Both are taken now, not when their tasks begin: by then they may have been set, and replaced.
            if self._changed is None:
                self._changed = trio.Event()
            await wait_any(self._changed.wait, self.room.holds.changed_at(self.entry).wait)

    # -- recovery ---------------------------------------------------------------------------------------------------

    def _join_hold(self) -> Hold | None:
        """Give what holds the launch of the family's join, if it is held: then that is what holds the stage."""
        return self.room.holds.of(self.entry, HoldKind.LAUNCH) if self.stage is Stage.FAMILY_JOIN else None

    def held_stage(self) -> Stage | None:
        """Give the stage that is held and in need of an operator, or None."""
        hold = self.present_hold()
        return None if hold is None or hold.claimed else self.stage

    def blocked_by(self) -> tuple[RunId, ...]:
        """Give the held Runs that a Job's join waits for: those to recover instead of it."""
        if self.end is not None or self.stage is not Stage.FAMILY_JOIN:
            # Work goes on, whatever is held below it; later stages come after the family's return.
            return ()
        # A dict, since several things may be held for one Run. What somebody recovers already needs nobody else.
        found: dict[RunId, None] = {}
        for hold in self.room.holds.below(self.entry):
            if not hold.claimed:
                found[hold.entry.run_id] = None
                if len(found) == _BLOCKED_MAX:
                    break
        return tuple(found)

    def present_hold(self) -> Hold | None:
        """Give the hold of the present stage, its own or that of the join; somebody may be recovering it."""
        return self._join_hold() or self.hold

    def locator(self) -> HoldLocator:
        """Give the exact form of the present hold."""
        hold = self.present_hold()
        assert hold is not None, "asked for a held stage only"
        return HoldLocator(self.job_id, self.room.incarnation, self.stage, hold.revision)

    def recovery_state(self) -> RecoveryState:
        """Give the held stage with its private error.

        Raises:
            NotHeldError: nothing of it is held, or not any more, since it is being recovered; it may wait for others.
        """
        hold = self.present_hold()
        if hold is None or hold.claimed:
            raise NotHeldError(f"Job {self.job_id}", self.blocked_by())
        return RecoveryState(self.locator(), hold.error, hold.since)

    async def recover(self, locator: HoldLocator, action: str) -> None:
        """Take the held stage up, in the Run's own task; the caller only waits for it.

        Raises:
            NotHeldError, StaleRevisionError, RecoveryInProgressError: refused before any effect.
            StageHeldError: it failed again. AcknowledgeRefusedError: no attestation can stand in for it.
            RoomOwnershipLostError, RunAbandonedError: the Job ended meanwhile.
        """
        subject = f"Job {self.job_id}"
        hold = self.present_hold()
        if hold is None and self._attempt is None:
            raise NotHeldError(subject, self.blocked_by())
        revision = hold.revision if hold is not None else self._attempt.revision if self._attempt is not None else None
        if (locator.incarnation, locator.stage, locator.revision) != (self.room.incarnation, self.stage, revision):
            raise StaleRevisionError(subject)
        if hold is None or hold.claimed:
            raise RecoveryInProgressError(subject)
        if hold is self._join_hold():
            await self._recover_join(hold, action)
            return
        attempt = self._attempt = _Attempt(hold.revision)
        # Still in the room's book, since nothing has been recovered yet; out of anybody else's reach, as it is claimed.
        hold.claimed = True
        self._go_on(action)
        await attempt.over.wait()
        if attempt.error is not None:
            raise attempt.error

    async def _recover_join(self, hold: Hold, action: str) -> None:
        """Take the held launch of the join up; the Job's own task waits for it all the while."""
        pool = self.room.pool
        launch = next(launch for launch in pool.launches.values() if launch.hold is hold)
        attempt = self._attempt = _Attempt(hold.revision)
        if action == "retry":
            try:
                pool.recover(launch, hold.revision)
            except BaseException:
                self._attempt = None
                raise
        else:
            family = self.entry.family
            if family is None or not pool.acknowledge_join(launch, family):
                self._attempt = None
                self.room.holds.again(hold, hold.phase, hold.error)
                raise AcknowledgeRefusedError(f"Job {self.job_id}", self.stage.value)
        while launch.hold is None and not attempt.over.is_set():
            await wait_any(attempt.over.wait, self.room.holds.changed_at(self.entry).wait)
        if launch.hold is not None:
            raise StageHeldError(self.locator(), self.stage.value)
        if attempt.error is not None:
            raise attempt.error
