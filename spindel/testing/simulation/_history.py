"""What happened, in order, as data: the log that invariants read and that a trace shows.

A history hears from three sides: `RecordingStore` tells each write and its answer, `History.follow` tells a room's
events, and the program itself tells when it enters and leaves its own functions, which nobody else can see.

    history = History()
    async with open_room(RecordingStore(store, history), name="orders") as room:
        history.follow(room)
        ...
    await history.read_rows(store)
    check_invariants(history, INVARIANTS)
"""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import trio

from spindel.errors import WriteRefusedError, WriteUncertainError
from spindel.observe import Subscription
from spindel.runs._frontier import current_entry
from spindel.store import Confirmation, RunQuery
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.observe import RoomEvent
    from spindel.runs import Room, SettlementReport
    from spindel.runs._entry import Entry
    from spindel.store import Mutation, RunRecord, Store

__all__ = [
    "Answered",
    "Called",
    "Closed",
    "Confirmed",
    "Happened",
    "History",
    "Issued",
    "Noted",
    "Observed",
    "Operated",
    "Recorded",
    "RecordingStore",
    "Restarted",
    "Returned",
]

Answer = Literal["stored", "refused", "uncertain"]
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@attrs.frozen
class Recorded:
    """The base of all records."""


@attrs.frozen
class Issued(Recorded):
    """A mutation went to the store. `number` counts them, repeats included."""

    number: int
    mutation: Mutation[Any]


@attrs.frozen
class Answered(Recorded):
    """What the store said to it; `code` of a refusal. Without this record nobody was told."""

    number: int
    mutation: Mutation[Any]
    answer: Answer
    code: str | None = None


@attrs.frozen
class Confirmed(Recorded):
    """What reading a mutation's identity back said."""

    mutation: Mutation[Any]
    confirmation: Confirmation


@attrs.frozen
class Happened(Recorded):
    """A room told an event."""

    room: str
    event: RoomEvent


@attrs.frozen
class Called(Recorded):
    """A function of the program was entered for a Run: a body, a callback, a construction, a disposal."""

    run_id: RunId
    function: str


@attrs.frozen
class Returned(Recorded):
    """It was left. `error` names the class of what it raised, or None."""

    run_id: RunId
    function: str
    error: str | None


@attrs.frozen
class Operated(Recorded):
    """An operator acted on a hold of a Run: `retry`, `acknowledge` or `abandon`. Told before it takes effect."""

    run_id: RunId
    phase: str
    action: str


@attrs.frozen
class Observed(Recorded):
    """Somebody looked at what settles a Run."""

    report: SettlementReport


@attrs.frozen
class Closed(Recorded):
    """A room's block was left: `closed` or `lost`."""

    room: str
    state: str


@attrs.frozen
class Restarted(Recorded):
    """The program was started again: after a crash, a lost room, or a cancelled end."""

    incarnation: int
    why: str


@attrs.frozen
class Noted(Recorded):
    """A note for whoever reads the trace, such as a fault that was met."""

    text: str


class History:
    """Everything that was recorded, in order.

    Args:
        trace: keep for each record when and in which task it was made, and every step of every task: `lines` shows it.

    Attributes:
        records: what happened.
        rows: the rows of the rooms at the end, once they were read.
        incarnation: how often the program was started again.
    """

    def __init__(self, *, trace: bool = False) -> None:
        self.records: list[Recorded] = []
        self.rows: dict[UUID, RunRecord] | None = None
        self.incarnation = 0
        self.writes = 0
        self._traced: list[tuple[float, int, str, Recorded | None]] | None = [] if trace else None
        self._aliases: dict[str, str] = {}
        self._task_numbers: dict[trio.lowlevel.Task, int] = {}

    def add(self, record: Recorded) -> None:
        """Add a record."""
        self.records.append(record)
        if self._traced is not None:
            self._traced.append((*self._moment(), record))

    def note(self, text: str) -> None:
        """Add a note."""
        self.add(Noted(text))

    def of(self, *kinds: type[Recorded]) -> Iterator[Any]:
        """Give the records of these kinds, in order."""
        return (record for record in self.records if isinstance(record, kinds))

    def follow(self, room: Room) -> None:
        """Record the room's events from now on."""
        room.events._subscriptions.append(_Follower(self, room))

    @contextmanager
    def calling(self, run_id: RunId, function: str) -> Generator[None]:
        """Record that a function of the program is entered for a Run, and left."""
        self.add(Called(run_id, function))
        try:
            yield
        except BaseException as error:
            self.add(Returned(run_id, function, type(error).__name__))
            raise
        self.add(Returned(run_id, function, None))

    def restart(self, why: str) -> None:
        """Record that the program is started again."""
        self.incarnation += 1
        self.add(Restarted(self.incarnation, why))

    async def read_rows(self, store: Store, rooms: Sequence[str] | None = None) -> None:
        """Read all rows of these rooms, or of all."""
        rows: dict[UUID, RunRecord] = {}
        names = [record.name for record in await store.list_rooms()] if rooms is None else rooms
        for name in names:
            before = None
            while True:
                page = await store.list_runs(RunQuery(room=name, before=before, limit=100))
                rows.update((row.id, row) for row in page.runs)
                before = page.next
                if before is None:
                    break
        self.rows = rows

    # -- the trace ---------------------------------------------------------------------------------------------------

    def stepped(self, task: trio.lowlevel.Task) -> None:
        """Note for the trace that a task goes on; called before its step."""
        assert self._traced is not None, "only a trace shows steps"
        entry = task.context.run(current_entry.get)
        self._traced.append((trio.current_time(), self.incarnation, self._task_label(task, entry), None))

    def lines(self, *, every_step: bool = False) -> Iterator[str]:
        """Give the trace: life, virtual time, task, what happened. Ids are shortened in the order of their appearance.

        Args:
            every_step: also tell when a task goes on and nothing is recorded.
        """
        assert self._traced is not None, "a history without trace has no lines"
        for at, incarnation, task, record in self._traced:
            if record is not None or every_step:
                what = "·" if record is None else self._shorten(_tell(record))
                yield f"{incarnation} {at:11.6f}  {task:28}  {what}"

    @property
    def digest(self) -> str:
        """A hash of everything recorded: equal for the same schedule, in any process."""
        told = "\n".join(_tell(record) for record in self.records)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def _moment(self) -> tuple[float, int, str]:
        try:
            now = trio.current_time()
        except RuntimeError:
            return 0.0, self.incarnation, "-"
        try:
            task = trio.lowlevel.current_task()
        except RuntimeError:
            return now, self.incarnation, "-"
        return now, self.incarnation, self._task_label(task, current_entry.get())

    def _task_label(self, task: trio.lowlevel.Task, entry: Entry | None) -> str:
        number = self._task_numbers.setdefault(task, len(self._task_numbers) + 1)
        run = "" if entry is None else f" {self._shorten(str(entry.run_id))}"
        name = self._shorten(str(task.name).rpartition(".")[2])
        return f"#{number}{run} {name}"

    def _shorten(self, text: str) -> str:
        return _UUID.sub(lambda found: self._aliases.setdefault(found[0], f"r{len(self._aliases) + 1}"), text)


class _Follower(Subscription):
    """Records each event in the turn in which it is published."""

    __slots__ = ("_history", "_room")

    def __init__(self, history: History, room: Room) -> None:
        super().__init__(room.events, 1)
        self._history = history
        self._room = room.name

    def push(self, event: RoomEvent) -> None:
        self._history.add(Happened(self._room, event))


class RecordingStore(FaultyStore):
    """A `FaultyStore` that records each write with its answer.

    Args:
        store: what really keeps the facts.
        history: where it is recorded.
    """

    def __init__(self, store: Store, history: History) -> None:
        super().__init__(store)
        self.history = history

    async def write_each(
        self, mutations: Sequence[Mutation[Any]]
    ) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Apply several independent mutations, as the plans say, and record what comes of them."""
        history = self.history
        first = history.writes + 1
        history.writes += len(mutations)
        for number, mutation in enumerate(mutations, first):
            history.add(Issued(number, mutation))
        results = await super().write_each(mutations)
        await self.reply()
        for number, (mutation, result) in enumerate(zip(mutations, results, strict=True), first):
            history.add(_answer(number, mutation, result))
        return results

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Read a mutation's identity back, and record what it says."""
        confirmation = await super().confirm(mutation)
        self.history.add(Confirmed(mutation, confirmation))
        return confirmation

    async def arrive(self) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Let the late writes arrive now, and record it."""
        late = list(self._late)
        results = await super().arrive()
        for mutation, result in zip(late, results, strict=True):
            self.history.note("a late write arrives")
            self.history.add(_answer(0, mutation, result))
        return results

    async def reply(self) -> None:
        """Wait for the answer; a simulation's store takes its time here."""


def _answer(number: int, mutation: Mutation[Any], result: object) -> Answered:
    if isinstance(result, WriteRefusedError):
        return Answered(number, mutation, "refused", result.code)
    return Answered(number, mutation, "uncertain" if isinstance(result, WriteUncertainError) else "stored")


def _tell(record: Recorded) -> str:  # noqa: C901, PLR0911  one sentence for each kind
    """Tell a record in words."""
    match record:
        case Issued(number, mutation):
            return f"write {number} {_tell_mutation(mutation)}"
        case Answered(number, mutation, answer, code):
            return f"write {number or 'late'} {type(mutation).__name__}: {answer}{f' ({code})' if code else ''}"
        case Confirmed(mutation, confirmation):
            return f"read back {_tell_mutation(mutation)}: {confirmation.value}"
        case Happened(room, event):
            return f"{event.name} {_tell_facts(event, ('sequence', 'at'))}[{room} {event.sequence}]"
        case Called(run_id, function):
            return f"enters {function} of {run_id}"
        case Returned(run_id, function, error):
            return f"leaves {function} of {run_id}{f' with {error}' if error else ''}"
        case Operated(run_id, phase, action):
            return f"operator: {action} {run_id} at {phase}"
        case Observed(report):
            return f"observed {report.run_id}: {'settled' if report.settled else 'not settled'}"
        case Closed(room, state):
            return f"room {room} is {state}"
        case Restarted(incarnation, why):
            return f"--- started again, {incarnation}: {why}"
        case Noted(text):
            return text
        case _:
            return repr(record)


def _tell_mutation(mutation: Any) -> str:
    parts = [type(mutation).__name__, *map(_tell_mutation, getattr(mutation, "mutations", ()))]
    for name in ("id", "parent_id", "status", "reason", "kind"):
        value = getattr(mutation, name, None)
        if value is not None:
            parts.append(str(value))
    admission = getattr(mutation, "admission", None)
    if admission is not None:
        parts.append(str(admission.id))
    return " ".join(parts)


def _tell_facts(event: RoomEvent, without: tuple[str, ...]) -> str:
    facts = [str(value) for name, value in attrs.asdict(event, recurse=False).items() if name not in without]
    return "".join(f"{fact} " for fact in facts if fact not in ("None", "False"))
