"""What each stage does, and what an acknowledgement of it needs. `JobOwner` decides when."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import trio

from spindel.errors import AcknowledgeRefusedError, RunNotFinishedError, WriteUncertainError
from spindel.ids import WitnessStage, witness_id
from spindel.jobs._control import call_in
from spindel.jobs._stages import ACKNOWLEDGED_BY, STAGE_NEXT, AcknowledgedBy, Stage
from spindel.runs._frontier import enter_run
from spindel.store import AppendWitnesses, Confirmation, RunStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextvars import Context

    from spindel.jobs._owner import JobOwner
    from spindel.runs import Finishing, Outcome

__all__ = ["STEPS", "Walk"]


class Walk:
    """The stages of one Job over the steps of its Run's end. Frozen writes are made once and sent again as they are."""

    __slots__ = ("_finishing", "_frozen", "_owner")

    def __init__(self, owner: JobOwner, finishing: Finishing) -> None:
        self._owner = owner
        self._finishing = finishing
        self._frozen: dict[Stage, AppendWitnesses] = {}

    async def acknowledge(self, stage: Stage) -> None:
        """Accept an operator's attestation, if the stage allows one.

        Raises:
            AcknowledgeRefusedError: it doesn't, or the evidence isn't there.
        """
        needs = ACKNOWLEDGED_BY[stage]
        if needs is AcknowledgedBy.WORD:
            return
        try:
            accepted = await self.is_stored(stage) if needs is AcknowledgedBy.ROW else self._is_fact(stage)
        except (WriteUncertainError, RunNotFinishedError):
            accepted = False
        if not accepted:
            raise AcknowledgeRefusedError(f"Job {self._owner.job_id}", stage.value)
        if stage is Stage.FAMILY_JOIN:
            # The family is gone, so this waits for nothing; what follows needs the decision and what comes with it.
            await self.join()

    def _is_fact(self, stage: Stage) -> bool:
        return self._finishing.family_returned if stage is Stage.FAMILY_JOIN else self._finishing.lease_released

    async def is_stored(self, stage: Stage) -> bool:
        """Read a stage's frozen write back; False for one that writes nothing.

        Raises:
            WriteUncertainError: the reading itself failed.
            RunNotFinishedError: no attempt was made to store the outcome.
        """
        if stage is Stage.TERMINAL:
            self._owner.ended_at = self._finishing.ended_at
            return await self._finishing.confirm_outcome() is Confirmation.PRESENT
        mutation = self._frozen.get(stage)
        return mutation is not None and await self._finishing.confirm(mutation) is Confirmation.PRESENT

    # -- the stages --------------------------------------------------------------------------------------------------
    # Each gives what is to be awaited, or None if it has passed: most stages of most Jobs wait for nothing, and then
    # nothing is made for a wait.

    async def join(self) -> None:
        """Join the family; then an observed Job's result is decided, too."""
        await self._finishing.join()
        self._observe(self._finishing.outcome)

    def _observe(self, outcome: Outcome[Any]) -> None:
        """Decide an observed Job's result, with its outcome: available with an id, or unavailable."""
        owner = self._owner
        owner.reason, owner.error = outcome.reason, outcome.error
        if owner.observation is None or outcome.status is RunStatus.WAITING:
            return
        if outcome.status is RunStatus.COMPLETED:
            try:
                # Like all that comes after the work, not in what the work ran in.
                scorecard = self._context().run(owner.observation.result_of, outcome)
            except Exception:  # noqa: BLE001  an unreadable result is an unavailable one, whatever made it so
                scorecard = None
            owner.scorecard = scorecard if isinstance(scorecard, UUID) else None
        owner.result_state = "unavailable" if owner.scorecard is None else "available"

    def core(self) -> Awaitable[None] | None:
        """Call `before_finish`."""
        return self._call(self._owner.before_finish)

    def core_ack(self) -> Awaitable[None]:
        """Acknowledge the family's return and the core's cleanup."""
        job_id = self._owner.job_id
        # Without it nothing will ever settle this Job; its cleanup goes on as it would.
        self._owner.family_vouched = vouched = self._finishing.mints_witness
        return self._append(
            Stage.CORE_ACK,
            family=witness_id(WitnessStage.FAMILY_RETURN, job_id) if vouched else None,
            core=witness_id(WitnessStage.CORE_CLEANUP, job_id),
        )

    async def terminal(self) -> None:
        """Store the outcome."""
        owner = self._owner
        await self._finishing.store_outcome(
            family_returned=False, result_state=owner.result_state, scorecard=owner.scorecard
        )
        owner.ended_at = self._finishing.ended_at

    def adapter(self) -> Awaitable[None] | None:
        """Call `on_settled`."""
        return self._call(self._owner.on_settled)

    def adapter_ack(self) -> Awaitable[None] | None:
        """Acknowledge the adapter's cleanup."""
        if self._finishing.outcome.status is RunStatus.WAITING:
            # Waiting closes an incarnation's family and settles nothing, so nothing is written to say so.
            return None
        return self._append(Stage.ADAPTER_ACK, adapter=witness_id(WitnessStage.ADAPTER_CLEANUP, self._owner.job_id))

    def release(self) -> None:
        """Release the lease."""
        self._finishing.release_lease()

    def _append(self, stage: Stage, **witnesses: Any) -> Awaitable[None]:
        """Send the stage's frozen write."""
        mutation = self._frozen.get(stage)
        if mutation is None:
            room = self._owner.room
            mutation = self._frozen[stage] = AppendWitnesses(
                room=room.name, epoch=room.epoch, id=self._owner.job_id, at=room.now_micros(), **witnesses
            )
        return self._finishing.append_witnesses(mutation)

    def _call(self, callback: Callable[[Outcome[Any]], Awaitable[None]] | None) -> Awaitable[None] | None:
        """Call a callback in the control context; an absent one passes."""
        return None if callback is None else self._call_shielded(callback)

    async def _call_shielded(self, callback: Callable[[Outcome[Any]], Awaitable[None]]) -> None:
        # Every wait of ours refuses to be cancelled; an author's does not.
        with trio.CancelScope(shield=True):
            await call_in(self._context(), callback, self._finishing.outcome)

    def _context(self) -> Context:
        """Give a control context, for code of an author's."""
        context = self._owner.room.context.copy()
        context.run(enter_run, self._owner.entry)
        return context


STEPS: Final[tuple[tuple[Stage, Callable[[Walk], Awaitable[None] | None]], ...]] = (
    (Stage.FAMILY_JOIN, Walk.join),
    (Stage.CORE, Walk.core),
    (Stage.CORE_ACK, Walk.core_ack),
    (Stage.TERMINAL, Walk.terminal),
    (Stage.ADAPTER, Walk.adapter),
    (Stage.ADAPTER_ACK, Walk.adapter_ack),
    (Stage.RELEASE, Walk.release),
)
"""What is walked after the work, in this order; each of them can be held."""

# The walk goes from one to the next, so the table is looked at once, here, and not for each Job.
assert all(
    after in STAGE_NEXT[before] for before, after in pairwise((Stage.WORK, *(stage for stage, _ in STEPS), Stage.DONE))
)
