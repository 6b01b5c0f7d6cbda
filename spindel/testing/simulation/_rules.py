"""The rules of Runs, families and Jobs, over a history, and two that look at a live room.

| rule | what no history shows |
|---|---|
| `OneOutcome` | two outcomes of a Run, one that was rewritten, one that nobody stored |
| `WitnessesInOrder` | a witness before what it vouches for, out of order, changed or without a writer |
| `NothingOutlivesItsLease` | a child, a callback or an acknowledgement after its Run or its parent has ended |
| `CallbacksOnce` | a function entered again after it returned, or after it raised without an operator's `retry` |
| `SettledWithEvidence` | a Run called settled without every piece of evidence, or not for ever |
| `EveryAdmissionEnds` | an admitted Run without an end, unless it was given up by name |
| `GivenUpIsUnknown` | an end, or a witness of a return, above what was given up |
| `NoEndBreaksDown` | an end held at `finisher`: whoever walked it broke its promise not to raise |
| `AcknowledgedIsKept` | an acknowledged write that isn't in the rows, or a row that nobody wrote |
| `EventsAreGapless` | an event missing, or told of a Run that hasn't started or has finished |
| `OutcomesTellTheWork` | an outcome that says something else than what body and plain tasks came to |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from spindel.ids import WitnessStage, witness_id
from spindel.observe import RunCancelRequested, RunFinished, RunHeld, RunRecovered, RunStarted
from spindel.runs import Presence
from spindel.runs._states import LeasePhase
from spindel.store import AdmitRun, AppendWitnesses, FenceAdmission, FinishRun, RecordDisposal, RunStatus
from spindel.testing.simulation._invariants import Invariant, InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.observe import RoomEvent
    from spindel.runs import Room, SettlementReport
    from spindel.store import RunRecord

__all__ = [
    "INVARIANTS",
    "AcknowledgedIsKept",
    "CallbacksOnce",
    "EventsAreGapless",
    "EveryAdmissionEnds",
    "GivenUpIsUnknown",
    "NoEndBreaksDown",
    "NothingOutlivesItsLease",
    "OneOutcome",
    "OutcomesTellTheWork",
    "SettledWithEvidence",
    "WitnessesInOrder",
    "check_left",
    "check_live",
]

_STAGES: Final = {
    "family": WitnessStage.FAMILY_RETURN,
    "core": WitnessStage.CORE_CLEANUP,
    "adapter": WitnessStage.ADAPTER_CLEANUP,
}
_REPEATED: Final = ("task", "native")


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
        for stage in _witnessed(mutation):
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
        for stage in _witnessed(mutation):
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


class NothingOutlivesItsLease(Invariant):
    """Before a Run's outcome is written, everything of its own and of its children has come back."""

    def __init__(self) -> None:
        self._parents: dict[UUID, UUID | None] = {}
        self._ending: set[UUID] = set()
        self._finished: set[UUID] = set()
        self._inside: Counter[tuple[UUID, str]] = Counter()
        self._children: Counter[UUID] = Counter()

    def restarted(self) -> None:
        self._inside.clear()
        self._children.clear()

    def called(self, run_id: RunId, function: str) -> None:
        self._check_parent(run_id, function)
        self._check_own(run_id, function)
        if function == "publish" and run_id not in self._finished:
            self.fail(f"run {run_id} is published before it has finished")
        self._inside[run_id, function] += 1

    def returned(self, run_id: RunId, function: str, error: str | None) -> None:  # noqa: ARG002  not every rule needs all
        self._check_own(run_id, function)
        self._inside[run_id, function] -= 1

    def _check_own(self, run_id: UUID, function: str) -> None:
        if run_id in self._ending and function.startswith(("construct", "body", "task", "native", "core")):
            self.fail(f"{function} of run {run_id} goes on after its end was written")
        if run_id in self._finished and function == "adapter":
            self.fail(f"{function} of run {run_id} goes on after its lease was released")

    def _check_parent(self, run_id: UUID, what: str) -> None:
        parent = self._parents.get(run_id)
        if parent in self._ending:
            self.fail(f"{what} of run {run_id} came after the end of its parent {parent} was written")

    def happened(self, room: str, event: RoomEvent) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(event, RunStarted):
            self._parents[event.run_id] = event.parent_id
            self._check_parent(event.run_id, "the start")
            if event.parent_id is not None:
                self._children[event.parent_id] += 1
        elif isinstance(event, RunFinished):
            self._finished.add(event.run_id)
            self._check_parent(event.run_id, "the finish")
            parent = self._parents.get(event.run_id)
            if parent is not None:
                self._children[parent] -= 1

    def issued(self, number: int, mutation: Any) -> None:  # noqa: ARG002  not every rule needs all
        if not isinstance(mutation, FinishRun) or mutation.id in self._ending:
            return
        self._ending.add(mutation.id)
        inside = [function for (run_id, function), count in self._inside.items() if run_id == mutation.id and count]
        children = self._children[mutation.id]
        if inside or children:
            self.fail(f"the end of run {mutation.id} was written with {children} live children and inside {inside}")


class CallbacksOnce(Invariant):
    """A function that returned is never entered again; one that raised, only after an operator's `retry`."""

    def __init__(self) -> None:
        self._retries: Counter[UUID] = Counter()
        self._used: dict[tuple[UUID, str], int] = {}
        self._returned: set[tuple[UUID, str]] = set()
        self._written: set[UUID] = set()
        self._stored: set[UUID] = set()

    def issued(self, number: int, mutation: Any) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(mutation, AdmitRun):
            self._written.add(mutation.id)

    def stored(self, mutation: Any) -> None:
        if isinstance(mutation, AdmitRun):
            self._stored.add(mutation.id)

    def operated(self, run_id: RunId, phase: str, action: str) -> None:  # noqa: ARG002  not every rule needs all
        if action == "retry":
            self._retries[run_id] += 1

    def returned(self, run_id: RunId, function: str, error: str | None) -> None:
        if error is None:
            self._returned.add((run_id, function))

    def called(self, run_id: RunId, function: str) -> None:
        if function.startswith(_REPEATED):
            return
        key = (run_id, function)
        if key in self._returned:
            self.fail(f"{function} of run {run_id} was entered again after it had returned")
        if key in self._used and (function in ("body", "construct") or self._used[key] == self._retries[run_id]):
            self.fail(f"{function} of run {run_id} was entered again, and nobody asked for it")
        self._used[key] = self._retries[run_id]
        if function == "body" and run_id in self._written and run_id not in self._stored:
            self.fail(f"the body of run {run_id} began before its row was stored")


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
        for stage in _witnessed(mutation):
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


class EveryAdmissionEnds(Invariant):
    """Every Run that started has finished when its room is closed, unless it, or one below it, was given up by name."""

    def __init__(self) -> None:
        self._parents: dict[UUID, UUID | None] = {}
        self._running: dict[UUID, str] = {}
        self._given_up: set[UUID] = set()

    def issued(self, number: int, mutation: Any) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(mutation, AdmitRun | FenceAdmission):
            admission = mutation.admission if isinstance(mutation, FenceAdmission) else mutation
            self._parents[admission.id] = admission.parent_id

    def happened(self, room: str, event: RoomEvent) -> None:
        if isinstance(event, RunStarted):
            self._parents[event.run_id] = event.parent_id
            self._running[event.run_id] = room
        elif isinstance(event, RunFinished):
            self._running.pop(event.run_id, None)
        elif isinstance(event, RunRecovered) and event.action == "abandon":
            self._given_up.add(event.run_id)

    def restarted(self) -> None:
        self._running.clear()

    def closed(self, room: str, state: str) -> None:
        if state != "closed" or not self._given_up <= self._parents.keys():
            # Of an admission that was never written nobody recorded whose child it would have been.
            return
        excused = {above for run_id in self._given_up for above in self._ancestors(run_id)}
        left = [run_id for run_id, where in self._running.items() if where == room and run_id not in excused]
        if left:
            self.fail(f"room {room} is closed, and run {left[0]} started and did not finish")

    def _ancestors(self, run_id: UUID) -> Iterator[UUID]:
        above: UUID | None = run_id
        while above is not None:
            yield above
            above = self._parents.get(above)


class GivenUpIsUnknown(Invariant):
    """Above what an operator gave up nobody says that everything came back: no end is written, no witness."""

    def __init__(self) -> None:
        self._parents: dict[UUID, UUID | None] = {}
        self._unknown: set[UUID] = set()

    def issued(self, number: int, mutation: Any) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(mutation, AdmitRun | FenceAdmission):
            admission = mutation.admission if isinstance(mutation, FenceAdmission) else mutation
            self._parents[admission.id] = admission.parent_id
        elif isinstance(mutation, FinishRun) or "family" in _witnessed(mutation):
            self._check(mutation.id)

    def happened(self, room: str, event: RoomEvent) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(event, RunStarted):
            self._parents[event.run_id] = event.parent_id
        elif isinstance(event, RunFinished):
            self._check(event.run_id)
        # A thread that never began is given up to the body that waits for it, and that goes on.
        elif isinstance(event, RunRecovered) and event.action == "abandon" and event.phase != "native":
            above = self._parents.get(event.run_id)
            while above is not None:
                self._unknown.add(above)
                above = self._parents.get(above)

    def _check(self, run_id: UUID) -> None:
        if run_id in self._unknown:
            self.fail(f"run {run_id} ends, and what was given up below it never came back")


class NoEndBreaksDown(Invariant):
    """What ends a Run doesn't raise: it repeats, or is held where it stands."""

    def happened(self, room: str, event: RoomEvent) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(event, RunHeld) and event.phase == "finisher":
            self.fail(f"the end of run {event.run_id} broke down with {event.code}")


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


class EventsAreGapless(Invariant):
    """A room numbers its events without a gap, and tells of a Run from its start to its finish only."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._started: set[UUID] = set()
        self._finished: set[UUID] = set()
        self._asked: set[UUID] = set()

    def restarted(self) -> None:
        self._numbers.clear()

    def closed(self, room: str, state: str) -> None:  # noqa: ARG002  not every rule needs all
        self._numbers.pop(room, None)

    def happened(self, room: str, event: RoomEvent) -> None:
        expected = self._numbers[room] = self._numbers.get(room, 0) + 1
        if event.sequence != expected:
            self.fail(f"room {room} told event {event.sequence} where {expected} was due")
        if isinstance(event, RunStarted):
            if event.run_id in self._started:
                self.fail(f"run {event.run_id} started twice")
            self._started.add(event.run_id)
        elif isinstance(event, RunFinished):
            if event.run_id not in self._started or event.run_id in self._finished:
                self.fail(f"run {event.run_id} finished without having started, or twice")
            self._finished.add(event.run_id)
        elif isinstance(event, RunCancelRequested):
            if event.run_id not in self._started - self._finished - self._asked:
                self.fail(f"run {event.run_id} was asked to stop too early, too late or twice")
            self._asked.add(event.run_id)


class OutcomesTellTheWork(Invariant):
    """A Run whose work returned is completed; one whose work failed says so; only a request or `Cancelled` cancels."""

    def __init__(self) -> None:
        self._bodies: dict[UUID, str | None] = {}
        self._tasks: defaultdict[UUID, list[str | None]] = defaultdict(list)
        self._asked: set[UUID] = set()
        self._asked_inside: set[UUID] = set()

    def returned(self, run_id: RunId, function: str, error: str | None) -> None:
        if function == "body":
            self._bodies[run_id] = error
            if run_id in self._asked:
                self._asked_inside.add(run_id)
        elif function.startswith("task"):
            self._tasks[run_id].append(error)

    def happened(self, room: str, event: RoomEvent) -> None:  # noqa: ARG002  not every rule needs all
        if isinstance(event, RunCancelRequested):
            self._asked.add(event.run_id)
        elif isinstance(event, RunFinished) and event.run_id in self._bodies and event.reason != "child-failed":
            run_id = event.run_id
            body, tasks = self._bodies[run_id], self._tasks[run_id]
            possible = _told_by(body, tasks, run_id in self._asked)
            if run_id in self._asked_inside and body is not None:
                # It was asked before its body failed, so whatever that raised, it stopped because it was asked.
                possible -= {"failed"}
            if event.status not in possible:
                self.fail(f"run {run_id} is {event.status}; its body came to {body}, its tasks to {tasks}")


def _told_by(body: str | None, tasks: list[str | None], asked: bool) -> set[str]:
    """Give the outcomes that work may have whose body and plain tasks came to these errors."""
    # A task that was cancelled because of another, or of a request, has nothing to say beside it.
    raised = {error for error in (body, *tasks) if error not in (None, "Cancelled")}
    if raised - {"RunWaiting"}:
        return {"failed", "cancelled"} if asked else {"failed"}
    if raised:
        # A signal beside cancelled tasks may come as a group.
        return {"waiting", "failed", "cancelled"} if tasks else {"waiting"}
    return {"completed"} if body is None else {"cancelled"}


INVARIANTS: Final[tuple[type[Invariant], ...]] = (
    OneOutcome,
    WitnessesInOrder,
    NothingOutlivesItsLease,
    CallbacksOnce,
    SettledWithEvidence,
    EveryAdmissionEnds,
    GivenUpIsUnknown,
    NoEndBreaksDown,
    AcknowledgedIsKept,
    EventsAreGapless,
    OutcomesTellTheWork,
)
"""All rules over a history."""


# -- over a live room ------------------------------------------------------------------------------------------------


def check_live(room: Room) -> None:
    """Check, between two turns, that no lease of a room was released with anything of it open.

    Raises:
        InvariantError: a lease isn't in the family that owns it, or outlives its parent's.
    """
    rule = "NoLeaseIsEarly"
    for key, entry in room.entries.items():
        if entry.owner.leases.get(key) is not entry or entry.phase is LeasePhase.RELEASED:
            raise InvariantError(rule, f"run {entry.run_id} is in the registry at {entry.phase}, but in no family")
        parent = entry.parent
        if parent is None or parent.end == "abandoned":
            continue
        if room.entries.get(parent.key) is not parent or not parent.live:
            raise InvariantError(rule, f"run {entry.run_id} is at {entry.phase}, but its parent's lease is gone")
        if parent.status is not RunStatus.RUNNING:
            raise InvariantError(rule, f"run {entry.run_id} is at {entry.phase}, but its parent is {parent.status}")


def check_left(room: Room) -> None:
    """Check that nothing of a room is left after its block.

    Raises:
        InvariantError: a Run, a lease, a launch or a hold is.
    """
    left = [*room.entries.values(), *room.pool.launches.values(), *room.holds.present()]
    if left:
        raise InvariantError(
            "NothingIsLeft", f"room {room.name} is {room.state.value}, and {len(left)} things are left"
        )


# -- reading mutations -----------------------------------------------------------------------------------------------


def _ended(mutation: FinishRun | FenceAdmission) -> UUID:
    return mutation.id if isinstance(mutation, FinishRun) else mutation.admission.id


def _first_written(mutation: AdmitRun | FenceAdmission) -> UUID:
    return mutation.id if isinstance(mutation, AdmitRun) else mutation.admission.id


def _witnessed(mutation: Any) -> Iterator[str]:
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
