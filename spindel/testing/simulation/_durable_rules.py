"""Rules about what is stored: outcomes, witnesses, evidence, and that acknowledged writes are kept."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from spindel.ids import WitnessStage, witness_id
from spindel.observe import RunFinished
from spindel.runs import Presence
from spindel.store import AdmitRun, AppendWitnesses, FenceAdmission, FinishRun, RecordDisposal, RunStatus
from spindel.testing.simulation._invariants import Invariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.observe import RoomEvent
    from spindel.runs import SettlementReport
    from spindel.store import RunRecord

__all__ = [
    "AcknowledgedIsKept",
    "OneOutcome",
    "SettledWithEvidence",
    "WitnessesInOrder",
    "witnessed",
]

_STAGES: Final = {
    "family": WitnessStage.FAMILY_RETURN,
    "core": WitnessStage.CORE_CLEANUP,
    "adapter": WitnessStage.ADAPTER_CLEANUP,
}


class OneOutcome(Invariant):
    """A Run has one outcome: frozen when it is first written, stored before it is told, never rewritten."""

    def __init__(self) -> None:
        self._frozen: dict[UUID, FinishRun] = {}
        self._ends: dict[UUID, FinishRun | FenceAdmission] = {}
        self._written: set[UUID] = set()
        self._told: set[UUID] = set()

    def issued(self, number: int, mutation: Any) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(mutation, AdmitRun):
            self._written.add(mutation.id)
        elif isinstance(mutation, FinishRun) and self._frozen.setdefault(mutation.id, mutation) != mutation:
            self.fail(f"run {mutation.id} was to end as {self._frozen[mutation.id]}, then as {mutation}")

    def stored(self, mutation: Any) -> None:
        if isinstance(mutation, FinishRun | FenceAdmission):
            run_id = _ended(mutation)
            if self._ends.setdefault(run_id, mutation) != mutation:
                self.fail(f"run {run_id} ended as {self._ends[run_id]}, then as {mutation}")

    def happened(self, room: str, event: RoomEvent) -> None:  # noqa: ARG002  not every rule needs all
        if not isinstance(event, RunFinished):
            return
        if event.run_id in self._told:
            self.fail(f"run {event.run_id} was told to have finished twice")
        self._told.add(event.run_id)
        end = self._ends.get(event.run_id)
        if event.run_id in self._written and (not isinstance(end, FinishRun) or end.status != event.status):
            self.fail(f"run {event.run_id} was told {event.status}, but stored was {end}")

    def ended(self, rows: Mapping[UUID, RunRecord]) -> None:
        for run_id, end in self._ends.items():
            row = rows.get(run_id)
            if row is not None and not _is_end(row, end):
                self.fail(f"run {run_id} was stored as {end}, and its row says {row.status} {row.reason}")


class WitnessesInOrder(Invariant):
    """A witness is written after what it vouches for, in the order of the stages, and stays as it is."""

    def __init__(self) -> None:
        self._jobs: set[UUID] = set()
        self._called: set[tuple[UUID, str]] = set()
        self._passed: set[tuple[UUID, str]] = set()
        self._written: defaultdict[UUID, set[str]] = defaultdict(set)
        self._stored: defaultdict[UUID, set[str]] = defaultdict(set)

    def called(self, run_id: RunId, function: str) -> None:
        self._called.add((run_id, function))

    def returned(self, run_id: RunId, function: str, error: str | None) -> None:
        if error is None:
            self._passed.add((run_id, function))

    def operated(self, run_id: RunId, phase: str, action: str) -> None:
        if action == "acknowledge":
            self._passed.add((run_id, phase))

    def issued(self, number: int, mutation: Any) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(mutation, AdmitRun) and mutation.job_version is not None:
            self._jobs.add(mutation.id)
        for stage in witnessed(mutation):
            self._check_written(mutation.id, stage)
        if isinstance(mutation, FinishRun) and mutation.id in self._jobs and "core" not in self._stored[mutation.id]:
            self.fail(f"job {mutation.id} was to end before its core witness was stored")

    def _check_written(self, run_id: UUID, stage: str) -> None:
        self._written[run_id].add(stage)
        key = (run_id, stage)
        if stage != "family" and key in self._called and key not in self._passed:
            self.fail(f"run {run_id}: {stage} was vouched for before its callback passed")
        if stage == "adapter" and "ended" not in self._stored[run_id]:
            self.fail(f"run {run_id}: adapter was vouched for before its outcome was stored")

    def stored(self, mutation: Any) -> None:
        if isinstance(mutation, FinishRun):
            self._stored[mutation.id].add("ended")
        for stage in witnessed(mutation):
            self._stored[mutation.id].add(stage)

    def ended(self, rows: Mapping[UUID, RunRecord]) -> None:
        for row in rows.values():
            values = (row.family_return_ack, row.job_core_cleanup_ack, row.job_adapter_cleanup_ack)
            for stage, value in zip(_STAGES, values, strict=True):
                self._check_value(row.id, stage, value)

    def _check_value(self, run_id: UUID, stage: str, value: UUID | None) -> None:
        if value is None:
            if stage in self._stored[run_id]:
                self.fail(f"run {run_id}: the stored {stage} witness is gone")
        elif value != witness_id(_STAGES[stage], run_id):
            self.fail(f"run {run_id}: the {stage} witness is {value}")
        elif stage not in self._written[run_id]:
            self.fail(f"run {run_id} has a {stage} witness that nobody wrote")


class SettledWithEvidence(Invariant):
    """A Run is called settled only with every piece of evidence, and once it is, for ever."""

    def __init__(self) -> None:
        self._evidence: defaultdict[UUID, set[str]] = defaultdict(set)
        self._unknown: defaultdict[int, list[Any]] = defaultdict(list)
        self._jobs: set[UUID] = set()
        self._settled: set[UUID] = set()

    def issued(self, number: int, mutation: Any) -> None:
        self._unknown[number].append(mutation)
        if isinstance(mutation, AdmitRun) and mutation.job_version is not None:
            self._jobs.add(mutation.id)

    def answered(self, number: int, answer: str) -> None:
        if answer != "uncertain":
            self._unknown.pop(number, None)

    def stored(self, mutation: Any) -> None:
        if isinstance(mutation, FinishRun) and mutation.status != RunStatus.WAITING:
            self._evidence[mutation.id].add("ended")
        for stage in witnessed(mutation):
            self._evidence[mutation.id].add(stage)

    def restarted(self) -> None:
        # Nobody was told of these, and the rows may have them all the same.
        for mutations in self._unknown.values():
            for mutation in mutations:
                self.stored(mutation)
        self._unknown.clear()

    def observed(self, report: SettlementReport) -> None:
        run_id = report.run_id
        if report.settled:
            self._settled.add(run_id)
            needed = {"ended", "family", "core", "adapter"} if run_id in self._jobs else {"ended", "family"}
            missing = sorted(needed - self._evidence[run_id])
            if missing:
                self.fail(f"run {run_id} is called settled without {', '.join(missing)}")
        elif run_id in self._settled and Presence.UNKNOWN not in (report.lease, report.owner):
            self.fail(f"run {run_id} was settled before, and isn't any more")


class AcknowledgedIsKept(Invariant):
    """What was acknowledged is in the rows, and there is no row that nobody wrote or was left to wonder about."""

    def __init__(self) -> None:
        self._stored: list[Any] = []
        self._unknown: defaultdict[int, list[UUID]] = defaultdict(list)
        self._possible: set[UUID] = set()

    def issued(self, number: int, mutation: Any) -> None:
        if isinstance(mutation, AdmitRun | FenceAdmission):
            self._unknown[number].append(_first_written(mutation))

    def answered(self, number: int, answer: str) -> None:
        run_ids = self._unknown.pop(number, [])
        if answer != "refused":
            self._possible.update(run_ids)

    def stored(self, mutation: Any) -> None:
        self._stored.append(mutation)
        if isinstance(mutation, AdmitRun | FenceAdmission):
            self._possible.add(_first_written(mutation))

    def ended(self, rows: Mapping[UUID, RunRecord]) -> None:
        for mutation in self._stored:
            self._check_kept(rows, mutation)
        self._possible.update(run_id for run_ids in self._unknown.values() for run_id in run_ids)
        invented = rows.keys() - self._possible
        if invented:
            self.fail(f"run {min(invented)} has a row, and nobody wrote it")

    def _check_kept(self, rows: Mapping[UUID, RunRecord], mutation: Any) -> None:
        if isinstance(mutation, AdmitRun):
            row = rows.get(mutation.id)
            if row is None or not _is_admission(row, mutation):
                self.fail(f"run {mutation.id} was stored as {mutation}, and its row is {row}")
        elif isinstance(mutation, FinishRun | FenceAdmission):
            if _ended(mutation) not in rows:
                self.fail(f"the stored end of run {_ended(mutation)} has no row")
        elif isinstance(mutation, RecordDisposal):
            row = rows.get(mutation.id)
            if row is None or row.admission_disposal != mutation.disposal:
                self.fail(f"the stored disposal of run {mutation.id} is gone")


def _ended(mutation: FinishRun | FenceAdmission) -> UUID:
    return mutation.id if isinstance(mutation, FinishRun) else mutation.admission.id


def _first_written(mutation: AdmitRun | FenceAdmission) -> UUID:
    return mutation.id if isinstance(mutation, AdmitRun) else mutation.admission.id


def witnessed(mutation: Any) -> Iterator[str]:
    """Give the stages that a mutation writes witnesses of."""
    if isinstance(mutation, FinishRun):
        if mutation.family_returned:
            yield "family"
    elif isinstance(mutation, AppendWitnesses):
        for stage in _STAGES:
            if getattr(mutation, stage) is not None:
                yield stage


def _is_end(row: RunRecord, end: FinishRun | FenceAdmission) -> bool:
    if isinstance(end, FenceAdmission):
        return (row.status, row.reason) == (RunStatus.FAILED, "admission-failed")
    ended_at = None if end.status == RunStatus.WAITING else end.ended_at
    return (row.status, row.reason, row.error, row.ended_at) == (end.status, end.reason, end.error, ended_at)


def _is_admission(row: RunRecord, admission: AdmitRun) -> bool:
    names = ("room", "kind", "actor", "parent_id", "incarnation", "started_at", "job_version")
    return all(getattr(row, name) == getattr(admission, name) for name in names)
