"""What each stage does, and what an acknowledgement of it needs. `JobOwner` decides when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from spindel.errors import AcknowledgeRefusedError, RunNotFinishedError, WriteUncertainError
from spindel.ids import WitnessStage, witness_id
from spindel.jobs._control import call_in
from spindel.jobs._stages import ACKNOWLEDGED_BY, AcknowledgedBy, Stage
from spindel.runs._frontier import enter_run
from spindel.store import AppendWitnesses, Confirmation, RunStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.jobs._owner import JobOwner
    from spindel.runs import Finishing, Outcome

__all__ = ["Walk"]


class Walk:
    """The stages of one Job over the steps of its Run's end. Frozen writes are made once and sent again as they are."""

    __slots__ = ("_finishing", "_frozen", "_owner", "_steps")

    def __init__(self, owner: JobOwner, finishing: Finishing) -> None:
        self._owner = owner
        self._finishing = finishing
        self._frozen: dict[Stage, AppendWitnesses] = {}
        self._steps: dict[Stage, Callable[[], Awaitable[None]]] = {
            Stage.FAMILY_JOIN: self._join,
            Stage.CORE: self._core,
            Stage.CORE_ACK: self._core_ack,
            Stage.TERMINAL: self._terminal,
            Stage.ADAPTER: self._adapter,
            Stage.ADAPTER_ACK: self._adapter_ack,
            Stage.RELEASE: self._release,
        }

    async def step(self, stage: Stage) -> None:
        """Do what a stage does, once."""
        await self._steps[stage]()

    async def acknowledge(self, stage: Stage) -> None:
        """Accept an operator's attestation, if the stage allows one.

        Raises:
            AcknowledgeRefusedError: it doesn't, or the evidence isn't there.
        """
        needs = ACKNOWLEDGED_BY[stage]
        if needs is AcknowledgedBy.WORD:
            return
        try:
            accepted = await self._is_there(stage) if needs is AcknowledgedBy.ROW else self._is_fact(stage)
        except (WriteUncertainError, RunNotFinishedError):
            accepted = False
        if not accepted:
            raise AcknowledgeRefusedError(f"Job {self._owner.job_id}", stage.value)
        if stage is Stage.FAMILY_JOIN:
            # The family is gone, so this waits for nothing; what follows needs the decision and what comes with it.
            await self._join()

    def _is_fact(self, stage: Stage) -> bool:
        return self._finishing.family_returned if stage is Stage.FAMILY_JOIN else self._finishing.lease_released

    async def _is_there(self, stage: Stage) -> bool:
        if stage is Stage.TERMINAL:
            self._owner.ended_at = self._finishing.ended_at
            return await self._finishing.confirm_outcome() is Confirmation.PRESENT
        mutation = self._frozen.get(stage)
        return mutation is not None and await self._finishing.confirm(mutation) is Confirmation.PRESENT

    async def _join(self) -> None:
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
                scorecard = owner.observation.result_of(outcome)
            except Exception:  # noqa: BLE001  an unreadable result is an unavailable one, whatever made it so
                scorecard = None
            owner.scorecard = scorecard if isinstance(scorecard, UUID) else None
        owner.result_state = "unavailable" if owner.scorecard is None else "available"

    async def _core(self) -> None:
        await self._call(self._owner.before_finish)

    async def _core_ack(self) -> None:
        job_id = self._owner.job_id
        # Without it nothing will ever settle this Job; its cleanup goes on as it would.
        self._owner.family_vouched = vouched = self._finishing.mints_witness
        await self._append(
            Stage.CORE_ACK,
            family=witness_id(WitnessStage.FAMILY_RETURN, job_id) if vouched else None,
            core=witness_id(WitnessStage.CORE_CLEANUP, job_id),
        )

    async def _terminal(self) -> None:
        owner = self._owner
        try:
            await self._finishing.store_outcome(
                family_returned=False, result_state=owner.result_state, scorecard=owner.scorecard
            )
        except WriteUncertainError:
            if await self._finishing.confirm_outcome() is not Confirmation.PRESENT:  # noqa: ASYNC120  not cancellable
                raise
        owner.ended_at = self._finishing.ended_at

    async def _adapter(self) -> None:
        await self._call(self._owner.on_settled)

    async def _adapter_ack(self) -> None:
        if self._finishing.outcome.status is RunStatus.WAITING:
            # Waiting closes an incarnation's family and settles nothing, so nothing is written to say so.
            return
        await self._append(Stage.ADAPTER_ACK, adapter=witness_id(WitnessStage.ADAPTER_CLEANUP, self._owner.job_id))

    async def _release(self) -> None:
        self._finishing.release_lease()

    async def _append(self, stage: Stage, **witnesses: Any) -> None:
        """Send the stage's frozen write; an uncertain one gets a single reading."""
        mutation = self._frozen.get(stage)
        if mutation is None:
            room = self._owner.room
            mutation = self._frozen[stage] = AppendWitnesses(
                room=room.name, epoch=room.epoch, id=self._owner.job_id, at=room.now_micros(), **witnesses
            )
        try:
            await self._finishing.append_witnesses(mutation)
        except WriteUncertainError:
            if await self._finishing.confirm(mutation) is not Confirmation.PRESENT:  # noqa: ASYNC120  not cancellable
                raise

    async def _call(self, callback: Callable[[Outcome[Any]], Awaitable[None]] | None) -> None:
        """Call a callback in the control context; an absent one passes."""
        if callback is None:
            return
        context = self._owner.room.context.copy()
        context.run(enter_run, self._owner.entry)
        await call_in(context, callback, self._finishing.outcome)
