"""Rules that no schedule may break, as functions over a `History`: use them for your own rooms, and add your own.

| rule | what no history shows |
|---|---|
| `one_outcome` | two outcomes of a Run, one that was rewritten, one that nobody stored |
| `witnesses_in_order` | a witness before what it vouches for, out of order, changed or without a writer |
| `nothing_outlives_its_lease` | a child, a callback or an acknowledgement after its Run or its parent has ended |
| `callbacks_once` | a function entered again after it returned, or after it raised without an operator's `retry` |
| `settled_with_evidence` | a Run called settled without every piece of evidence, or not for ever |
| `every_admission_ends` | an admitted Run without an end, unless it was given up by name |
| `acknowledged_is_kept` | an acknowledged write that isn't in the rows, or a refused one that is |
| `events_are_gapless` | an event missing, or told of a Run that hasn't started or has finished |
| `outcomes_tell_the_work` | an outcome that says something else than what body and plain tasks came to |

A rule is a function of the history that raises `InvariantError`. Names of functions that a program records for its
Runs mean: `construct`, `body`, `task`, `native` and `core` belong before the outcome, `adapter` before the lease goes,
`publish` after it and before the parent's outcome; any other name is only counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from spindel.ids import WitnessStage, witness_id
from spindel.observe import RunCancelRequested, RunFinished, RunRecovered, RunStarted
from spindel.runs import Presence
from spindel.runs._states import LeasePhase
from spindel.store import (
    AdmitRun,
    AppendWitnesses,
    Confirmation,
    FenceAdmission,
    FinishRun,
    RecordDisposal,
    RunStatus,
    Together,
)
from spindel.testing.simulation._history import (
    Answered,
    Called,
    Closed,
    Confirmed,
    Happened,
    Issued,
    Observed,
    Operated,
    Restarted,
    Returned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from uuid import UUID

    from spindel.runs import Room
    from spindel.store import RunRecord
    from spindel.testing.simulation._history import History, Recorded

__all__ = [
    "INVARIANTS",
    "InvariantError",
    "acknowledged_is_kept",
    "callbacks_once",
    "check_invariants",
    "check_left",
    "check_live",
    "events_are_gapless",
    "every_admission_ends",
    "nothing_outlives_its_lease",
    "one_outcome",
    "outcomes_tell_the_work",
    "settled_with_evidence",
    "witnesses_in_order",
]

_BEFORE_OUTCOME: Final = frozenset({"construct", "body", "task", "native", "core"})
_STAGES: Final = {
    "family": WitnessStage.FAMILY_RETURN,
    "core": WitnessStage.CORE_CLEANUP,
    "adapter": WitnessStage.ADAPTER_CLEANUP,
}


class InvariantError(AssertionError):
    """A rule was broken.

    Attributes:
        rule: its name.
    """

    def __init__(self, rule: str, what: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {what}")


def check_invariants(history: History, rules: Iterable[Callable[[History], None]] | None = None) -> None:
    """Check rules over a history, all of this module by default.

    Raises:
        InvariantError: the first one that is broken.
    """
    for rule in INVARIANTS if rules is None else rules:
        rule(history)


# -- over a history --------------------------------------------------------------------------------------------------


def one_outcome(history: History) -> None:
    """A Run has one outcome: frozen when it is first written, stored before it is told, never rewritten."""
    rule = "one_outcome"
    frozen: dict[UUID, FinishRun] = {}
    ends: dict[UUID, FinishRun | FenceAdmission] = {}
    admitted: set[UUID] = set()
    told: set[UUID] = set()
    for record in history.records:
        for mutation in _issued(record):
            if isinstance(mutation, AdmitRun):
                admitted.add(mutation.id)
            elif isinstance(mutation, FinishRun) and frozen.setdefault(mutation.id, mutation) != mutation:
                raise InvariantError(rule, f"run {mutation.id} was to end as {frozen[mutation.id]}, then as {mutation}")
        for mutation in _acknowledged(record):
            if isinstance(mutation, FinishRun | FenceAdmission):
                run_id = _ended(mutation)
                if ends.setdefault(run_id, mutation) != mutation:
                    raise InvariantError(rule, f"run {run_id} ended as {ends[run_id]}, then as {mutation}")
        if isinstance(record, Happened) and isinstance(record.event, RunFinished):
            event = record.event
            if event.run_id in told:
                raise InvariantError(rule, f"run {event.run_id} was told to have finished twice")
            told.add(event.run_id)
            end = ends.get(event.run_id)
            if event.run_id in admitted and (not isinstance(end, FinishRun) or end.status != event.status):
                raise InvariantError(rule, f"run {event.run_id} was told {event.status}, but stored was {end}")
    for run_id, row in (history.rows or {}).items():
        end = ends.get(run_id)
        if end is not None and not _is_end(row, end):
            raise InvariantError(rule, f"run {run_id} was stored as {end}, and its row says {row.status} {row.reason}")


def witnesses_in_order(history: History) -> None:
    """A witness is written after what it vouches for, in the order of the stages, and stays as it is."""
    rule = "witnesses_in_order"
    jobs: set[UUID] = set()
    written: dict[UUID, set[str]] = defaultdict(set)
    stored: dict[UUID, set[str]] = defaultdict(set)
    passed: set[tuple[UUID, str]] = set()
    called: set[tuple[UUID, str]] = set()
    for record in history.records:
        if isinstance(record, Called):
            called.add((record.run_id, record.function))
        elif (isinstance(record, Returned) and record.error is None) or (
            isinstance(record, Operated) and record.action == "acknowledge"
        ):
            passed.add((record.run_id, record.function if isinstance(record, Returned) else record.phase))
        for mutation in _issued(record):
            if isinstance(mutation, AdmitRun) and mutation.job_version is not None:
                jobs.add(mutation.id)
            for stage in _witnessed(mutation):
                run_id = mutation.id
                written[run_id].add(stage)
                if stage in ("core", "adapter") and (run_id, stage) in called and (run_id, stage) not in passed:
                    raise InvariantError(rule, f"run {run_id}: {stage} was vouched for before its callback passed")
                if stage == "adapter" and "ended" not in stored[run_id]:
                    raise InvariantError(rule, f"run {run_id}: adapter was vouched for before its outcome was stored")
            if isinstance(mutation, FinishRun) and mutation.id in jobs and "core" not in stored[mutation.id]:
                raise InvariantError(rule, f"job {mutation.id} was to end before its core witness was stored")
        for mutation in _acknowledged(record):
            if isinstance(mutation, FinishRun):
                stored[mutation.id].add("ended")
            for stage in _witnessed(mutation):
                stored[mutation.id].add(stage)
    for run_id, row in (history.rows or {}).items():
        _check_witnesses(rule, row, written[run_id], stored[run_id])


def _check_witnesses(rule: str, row: RunRecord, written: set[str], stored: set[str]) -> None:
    columns = {"family": row.family_return_ack, "core": row.job_core_cleanup_ack, "adapter": row.job_adapter_cleanup_ack}
    for stage, value in columns.items():
        if value is None:
            if stage in stored:
                raise InvariantError(rule, f"run {row.id}: the stored {stage} witness is gone")
        elif value != witness_id(_STAGES[stage], row.id):
            raise InvariantError(rule, f"run {row.id}: the {stage} witness is {value}")
        elif stage not in written:
            raise InvariantError(rule, f"run {row.id} has a {stage} witness that nobody wrote")


def nothing_outlives_its_lease(history: History) -> None:
    """Before a Run's outcome is written, everything of its own and of its children has come back."""
    rule = "nothing_outlives_its_lease"
    parents: dict[UUID, UUID | None] = {}
    ending: set[UUID] = set()
    finished: set[UUID] = set()
    open_calls: Counter[tuple[UUID, str]] = Counter()
    live_children: Counter[UUID] = Counter()

    def check_parent(run_id: UUID, what: str) -> None:
        parent = parents.get(run_id)
        if parent in ending:
            raise InvariantError(rule, f"{what} of run {run_id} came after the end of its parent {parent} was written")

    for record in history.records:
        if isinstance(record, Restarted):
            open_calls.clear()
            live_children.clear()
        elif isinstance(record, Called | Returned):
            run_id, function = record.run_id, record.function
            if isinstance(record, Called):
                check_parent(run_id, function)
            open_calls[run_id, function] += 1 if isinstance(record, Called) else -1
            if function in _BEFORE_OUTCOME and run_id in ending:
                raise InvariantError(rule, f"{function} of run {run_id} goes on after its end was written")
            if function == "adapter" and run_id in finished:
                raise InvariantError(rule, f"{function} of run {run_id} goes on after its lease was released")
            if function == "publish" and isinstance(record, Called) and run_id not in finished:
                raise InvariantError(rule, f"run {run_id} is published before it has finished")
        elif isinstance(record, Happened):
            event = record.event
            if isinstance(event, RunStarted):
                parents[event.run_id] = event.parent_id
                check_parent(event.run_id, "the start")
                if event.parent_id is not None:
                    live_children[event.parent_id] += 1
            elif isinstance(event, RunFinished):
                finished.add(event.run_id)
                check_parent(event.run_id, "the finish")
                parent = parents.get(event.run_id)
                if parent is not None:
                    live_children[parent] -= 1
        for mutation in _issued(record):
            if isinstance(mutation, FinishRun) and mutation.id not in ending:
                ending.add(mutation.id)
                still = [function for (run_id, function), count in open_calls.items() if run_id == mutation.id and count]
                if still or live_children[mutation.id]:
                    raise InvariantError(
                        rule,
                        f"the end of run {mutation.id} was written with {live_children[mutation.id]} live children"
                        f" and inside {still}",
                    )


def callbacks_once(history: History) -> None:
    """A function that returned is never entered again; one that raised, only after an operator's `retry`."""
    rule = "callbacks_once"
    retries: Counter[UUID] = Counter()
    used: dict[tuple[UUID, str], int] = {}
    returned: set[tuple[UUID, str]] = set()
    admitted: set[UUID] = set()
    has_store: set[UUID] = set()
    for record in history.records:
        for mutation in _issued(record):
            if isinstance(mutation, AdmitRun):
                has_store.add(mutation.id)
        for mutation in _acknowledged(record):
            if isinstance(mutation, AdmitRun):
                admitted.add(mutation.id)
        match record:
            case Operated(run_id, _, "retry"):
                retries[run_id] += 1
            case Returned(run_id, function, None):
                returned.add((run_id, function))
            case Called(run_id, function):
                key = (run_id, function)
                if function in ("task", "native", "step"):
                    continue
                if key in returned:
                    raise InvariantError(rule, f"{function} of run {run_id} was entered again after it had returned")
                if key in used and (function in ("body", "construct") or used[key] == retries[run_id]):
                    raise InvariantError(rule, f"{function} of run {run_id} was entered again, and nobody asked for it")
                used[key] = retries[run_id]
                if function == "body" and run_id in has_store and run_id not in admitted:
                    raise InvariantError(rule, f"the body of run {run_id} began before its row was stored")
            case _:
                pass


def settled_with_evidence(history: History) -> None:
    """A Run is called settled only with every piece of evidence, and once it is, for ever."""
    rule = "settled_with_evidence"
    evidence: dict[UUID, set[str]] = defaultdict(set)
    unknown: dict[int, Issued] = {}
    jobs: set[UUID] = set()
    settled: set[UUID] = set()
    for record in history.records:
        for mutation in _acknowledged(record):
            evidence[_subject(mutation)].update(_evidence(mutation))
        match record:
            case Issued(number, mutation):
                unknown[number] = record
                jobs.update(inner.id for inner in _flat(mutation) if isinstance(inner, AdmitRun) and inner.job_version)
            case Answered(number, _, "stored" | "refused"):
                unknown.pop(number, None)
            case Restarted():
                # Nobody was told of these, and the rows may have them all the same.
                for issued in unknown.values():
                    for mutation in _flat(issued.mutation):
                        evidence[_subject(mutation)].update(_evidence(mutation))
                unknown.clear()
            case Observed(report) if report.settled:
                run_id = report.run_id
                settled.add(run_id)
                needed = {"ended", "family"} | ({"core", "adapter"} if run_id in jobs else set())
                if not needed <= evidence[run_id]:
                    missing = ", ".join(sorted(needed - evidence[run_id]))
                    raise InvariantError(rule, f"run {run_id} is called settled without {missing}")
            case Observed(report) if report.run_id in settled and Presence.UNKNOWN not in (report.lease, report.owner):
                raise InvariantError(rule, f"run {report.run_id} was settled before, and isn't any more")
            case _:
                pass


def _evidence(mutation: Any) -> Iterator[str]:
    if isinstance(mutation, FinishRun) and mutation.status != RunStatus.WAITING:
        yield "ended"
    yield from _witnessed(mutation)


def _subject(mutation: Any) -> Any:
    return _ended(mutation) if isinstance(mutation, FenceAdmission) else getattr(mutation, "id", None)


def every_admission_ends(history: History) -> None:
    """Every Run that started has finished when its room is closed, unless it was given up by name, or one below it."""
    rule = "every_admission_ends"
    parents: dict[UUID, UUID | None] = {}
    running: dict[UUID, str] = {}
    given_up: set[UUID] = set()
    for record in history.records:
        match record:
            case Happened(room, RunStarted(run_id=run_id, parent_id=parent_id)):
                parents[run_id] = parent_id
                running[run_id] = room
            case Happened(_, RunFinished(run_id=run_id)):
                running.pop(run_id, None)
            case Happened(_, RunRecovered(run_id=run_id, action="abandon")):
                given_up.add(run_id)
            case Issued(_, AdmitRun() | FenceAdmission() as mutation):
                admission = mutation.admission if isinstance(mutation, FenceAdmission) else mutation
                parents.setdefault(admission.id, admission.parent_id)
            case Restarted():
                running.clear()
            case Closed(room, "closed") if given_up <= parents.keys():
                # Of an admission that was never written nobody recorded whose child it would have been.
                above = {ancestor for run_id in given_up for ancestor in _ancestors(run_id, parents)}
                left = [run_id for run_id, where in running.items() if where == room and run_id not in above]
                if left:
                    raise InvariantError(rule, f"room {room} is closed, and run {left[0]} started and did not finish")
            case _:
                pass


def _ancestors(run_id: UUID, parents: dict[UUID, UUID | None]) -> Iterator[UUID]:
    above: UUID | None = run_id
    while above is not None:
        yield above
        above = parents.get(above)


def acknowledged_is_kept(history: History) -> None:
    """What was acknowledged is in the rows; what was refused for good, and nothing else wrote, isn't."""
    rule = "acknowledged_is_kept"
    if history.rows is None:
        return
    possible: set[UUID] = set()
    unanswered: dict[int, Issued] = {}
    for record in history.records:
        if isinstance(record, Issued):
            unanswered[record.number] = record
        elif isinstance(record, Answered):
            unanswered.pop(record.number, None)
            if record.answer != "refused":
                possible.update(_first_writes(record))
        for mutation in _acknowledged(record):
            if isinstance(mutation, AdmitRun):
                row = history.rows.get(mutation.id)
                if row is None or not _is_admission(row, mutation):
                    raise InvariantError(rule, f"the stored row of run {mutation.id} is {row}")
            elif isinstance(mutation, FinishRun | FenceAdmission) and _ended(mutation) not in history.rows:
                raise InvariantError(rule, f"the stored end of run {_ended(mutation)} has no row")
            elif isinstance(mutation, RecordDisposal):
                row = history.rows.get(mutation.id)
                if row is None or row.admission_disposal != mutation.disposal:
                    raise InvariantError(rule, f"the stored disposal of run {mutation.id} is gone")
    possible.update(run_id for issued in unanswered.values() for run_id in _first_writes(issued))
    invented = history.rows.keys() - possible
    if invented:
        raise InvariantError(rule, f"run {min(invented)} has a row, and nobody was told so or left to wonder")


def _first_writes(record: Issued | Answered | Confirmed) -> Iterator[UUID]:
    for mutation in _flat(record.mutation):
        if isinstance(mutation, AdmitRun):
            yield mutation.id
        elif isinstance(mutation, FenceAdmission):
            yield mutation.admission.id


def events_are_gapless(history: History) -> None:
    """A room numbers its events without a gap, and tells of a Run from its start to its finish only."""
    rule = "events_are_gapless"
    numbers: dict[str, int] = {}
    started: set[UUID] = set()
    finished: set[UUID] = set()
    asked: set[UUID] = set()
    for record in history.records:
        if isinstance(record, Restarted | Closed):
            numbers.clear()
        if not isinstance(record, Happened):
            continue
        event = record.event
        expected = numbers.get(record.room, 0) + 1
        if event.sequence != expected:
            raise InvariantError(rule, f"room {record.room} told event {event.sequence} where {expected} was due")
        numbers[record.room] = expected
        if isinstance(event, RunStarted):
            if event.run_id in started:
                raise InvariantError(rule, f"run {event.run_id} started twice")
            started.add(event.run_id)
        elif isinstance(event, RunFinished):
            if event.run_id not in started or event.run_id in finished:
                raise InvariantError(rule, f"run {event.run_id} finished without having started, or twice")
            finished.add(event.run_id)
        elif isinstance(event, RunCancelRequested):
            if event.run_id not in started or event.run_id in finished or event.run_id in asked:
                raise InvariantError(rule, f"run {event.run_id} was asked to stop too early, too late or twice")
            asked.add(event.run_id)


def outcomes_tell_the_work(history: History) -> None:
    """A Run whose work returned is completed; one whose work failed says so; only a request or `Cancelled` cancels."""
    rule = "outcomes_tell_the_work"
    bodies: dict[UUID, str | None] = {}
    tasks: dict[UUID, list[str | None]] = defaultdict(list)
    asked: set[UUID] = set()
    for record in history.records:
        match record:
            case Returned(run_id, "body", error):
                bodies[run_id] = error
            case Returned(run_id, function, error) if function.startswith("task"):
                tasks[run_id].append(error)
            case Happened(_, RunCancelRequested(run_id=run_id)):
                asked.add(run_id)
            case Happened(_, RunFinished(run_id=run_id, status=status, reason=reason)) if run_id in bodies:
                possible = _told_by(bodies[run_id], tasks[run_id], run_id in asked)
                if reason != "child-failed" and status not in possible:
                    raise InvariantError(
                        rule, f"run {run_id} is {status}; its body came to {bodies[run_id]}, its tasks to {tasks[run_id]}"
                    )
            case _:
                pass


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


INVARIANTS: Final = (
    one_outcome,
    witnesses_in_order,
    nothing_outlives_its_lease,
    callbacks_once,
    settled_with_evidence,
    every_admission_ends,
    acknowledged_is_kept,
    events_are_gapless,
    outcomes_tell_the_work,
)
"""All rules over a history."""


# -- over a live room ------------------------------------------------------------------------------------------------


def check_live(room: Room) -> None:
    """Check, between two turns, that no lease of a room was released with anything of it open.

    Raises:
        InvariantError: a lease isn't in the family that owns it, or outlives its parent's.
    """
    rule = "no_lease_is_early"
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
        raise InvariantError("nothing_is_left", f"room {room.name} is {room.state.value}, and {len(left)} things are left")


# -- reading records -------------------------------------------------------------------------------------------------


def _flat(mutation: Any) -> Iterator[Any]:
    if isinstance(mutation, Together):
        for inner in mutation.mutations:
            yield from _flat(inner)
    else:
        yield mutation


def _issued(record: Recorded) -> Iterable[Any]:
    return _flat(record.mutation) if isinstance(record, Issued) else ()


def _acknowledged(record: Recorded) -> Iterable[Any]:
    if isinstance(record, Answered):
        return _flat(record.mutation) if record.answer == "stored" else ()
    if isinstance(record, Confirmed):
        return _flat(record.mutation) if record.confirmation is Confirmation.PRESENT else ()
    return ()


def _ended(mutation: FinishRun | FenceAdmission) -> UUID:
    return mutation.id if isinstance(mutation, FinishRun) else mutation.admission.id


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
    return (row.room, row.kind, row.actor, row.parent_id, row.incarnation, row.started_at, row.job_version) == (
        admission.room,
        admission.kind,
        admission.actor,
        admission.parent_id,
        admission.incarnation,
        admission.started_at,
        admission.job_version,
    )
