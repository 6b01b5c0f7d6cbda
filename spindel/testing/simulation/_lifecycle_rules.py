"""Rules about how Runs live and end: leases, callbacks, requests, events, outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from spindel.observe import RoomFenced, RunCancelRequested, RunFinished, RunHeld, RunRecovered, RunStarted
from spindel.store import AdmitRun, FenceAdmission, FinishRun
from spindel.testing.simulation._durable_rules import witnessed
from spindel.testing.simulation._invariants import Invariant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.observe import RoomEvent

__all__ = [
    "CallbacksOnce",
    "EventsAreGapless",
    "EveryAdmissionEnds",
    "GivenUpIsUnknown",
    "NoEndBreaksDown",
    "NothingOutlivesItsLease",
    "OutcomesTellTheWork",
    "RequestsReachAll",
]

_REPEATED: Final = ("task", "native")


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
        elif isinstance(mutation, FinishRun) or "family" in witnessed(mutation):
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


class RequestsReachAll(Invariant):
    """A request reaches every body below in the same turn, and those that begin later as they start."""

    def __init__(self) -> None:
        self._parents: dict[UUID, UUID | None] = {}
        self._rooms: dict[UUID, str] = {}
        self._fenced: set[str] = set()
        self._asked: set[UUID] = set()
        self._inside: set[UUID] = set()
        self._asking = False

    def restarted(self) -> None:
        self._fenced.clear()
        self._inside.clear()
        self._asking = False

    def closed(self, room: str, state: str) -> None:  # noqa: ARG002  not every rule needs all
        self._fenced.discard(room)

    def called(self, run_id: RunId, function: str) -> None:
        self._check_turn()
        if function == "body":
            self._inside.add(run_id)

    def returned(self, run_id: RunId, function: str, error: str | None) -> None:  # noqa: ARG002  not every rule needs all
        self._check_turn()
        if function == "body":
            self._inside.discard(run_id)

    def issued(self, number: int, mutation: Any) -> None:  # noqa: ARG002  not every rule needs all
        self._check_turn()

    def happened(self, room: str, event: RoomEvent) -> None:
        if isinstance(event, RunStarted):
            self._parents[event.run_id] = event.parent_id
            self._rooms[event.run_id] = room
        elif isinstance(event, RunCancelRequested):
            self._asked.add(event.run_id)
        elif isinstance(event, RoomFenced):
            self._fenced.add(room)
        else:
            self._check_turn()
            return
        self._asking = True

    def _check_turn(self) -> None:
        """Look once the turn that asked is over."""
        if not self._asking:
            return
        self._asking = False
        for run_id in self._inside - self._asked:
            if self._rooms.get(run_id) in self._fenced or self._parents.get(run_id) in self._asked:
                self.fail(f"the body of run {run_id} goes on, and nobody asked it to stop")


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
