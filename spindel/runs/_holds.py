"""What waits for an operator: named exactly, told at once and while it lasts, ended by nobody else.

A hold keeps the registry entry that owes something. It has a phase, a code and a revision; the original error is for
the operator only. A recovery claims it, then ends it or gives it back in a new form under a new revision.
"""

from __future__ import annotations

import logging
import re
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import attrs
import trio

from spindel.errors import ConstructionOwnerUnavailableError, SpindelError
from spindel.ids import Revision
from spindel.observe import RoomHeld, RunHeld, RunRecovered
from spindel.runs._states import HoldKind, RoomState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from spindel.ids import LaunchId, LeaseId, RunId
    from spindel.runs._entry import Entry
    from spindel.runs._room import Room

__all__ = ["HeldObligation", "Hold", "Holds", "code_of"]

_log: Final = logging.getLogger("spindel.runs")
_CODE: Final = re.compile(r"[a-z0-9-]{1,64}")
_CHARACTERS_MAX: Final = 120


@attrs.frozen
class HeldObligation:
    """Something that waits for an operator, as facts.

    Attributes:
        run_id: the Run that owes it.
        lease_id: its admission lease, if the lease is held.
        launch_id: the launch, if a launch is held.
        phase: the lease phase, launch kind or stage.
        code: what went wrong: a code or a class name, never a message.
        since: wall time in UTC microseconds.
    """

    run_id: RunId
    lease_id: LeaseId | None
    launch_id: LaunchId | None
    phase: str
    code: str
    since: int


@attrs.define(eq=False)
class Hold:
    """What keeps something until an operator acts.

    Attributes:
        entry: the Run that owes it.
        kind: whether a lease, a launch or a stage of a finisher is held.
        held_at: the lease phase, launch kind or stage in which it was last told to be held.
        code: what went wrong, a code or a class name; never a message.
        since: wall time in UTC microseconds.
        error: the original error, for the operator only.
        resolve: ends the hold, in the turn in which it is called: after a successful `retry`, an attested
            `acknowledge`, or to `abandon` it.
        revision: a fresh id for each form that the hold takes; it coordinates operators and permits nothing.
        launch_id: the launch, if it is one.
        retry: repeats the step, without ending the hold; None if it can't be repeated so.
        acknowledgeable: True if an operator may attest the step instead.
        claimed: True while somebody recovers it.
        number: counts the holds of a room.
    """

    entry: Entry
    kind: HoldKind
    held_at: str
    code: str
    since: int
    error: BaseException
    resolve: Callable[[str], None]
    revision: Revision
    launch_id: LaunchId | None = None
    retry: Callable[[], Awaitable[None]] | None = None
    acknowledgeable: bool = False
    claimed: bool = False
    number: int = 0

    @property
    def phase(self) -> str:
        """Where it stands: a lease's own phase, which walks on while it is recovered; else what is held."""
        return self.entry.phase.value if self.kind is HoldKind.LEASE else self.held_at

    def facts(self) -> HeldObligation:
        """Tell it as facts."""
        lease_id = self.entry.lease_id if self.kind is HoldKind.LEASE else None
        return HeldObligation(self.entry.run_id, lease_id, self.launch_id, self.phase, self.code, self.since)


class Holds:
    """The holds of one room.

    There may be very many, and whoever asks about one Run asks often: what is held of it, what is held below it, and
    when that changes are looked up, never searched for, and a change wakes only those whom it concerns.
    """

    __slots__ = ("_below", "_changed", "_changed_at", "_count", "_holds", "_of", "_room")

    def __init__(self, room: Room) -> None:
        self._room = room
        self._changed = trio.Event()
        self._count = 0
        # In the order in which they came; a dict, since any of very many may end first.
        self._holds: dict[int, Hold] = {}
        self._of: dict[int, dict[int, Hold]] = {}
        self._below: dict[int, dict[int, Hold]] = {}
        # Kept by those who wait for them.
        self._changed_at: WeakValueDictionary[int, trio.Event] = WeakValueDictionary()

    def add(
        self,
        entry: Entry,
        phase: str,
        error: BaseException,
        resolve: Callable[[str], None],
        *,
        kind: HoldKind = HoldKind.LEASE,
        **options: Any,
    ) -> Hold:
        """Name something as held until an operator resolves it; the options are those of `Hold`."""
        self._count += 1
        revision, since = Revision(self._room.next_uuid()), self._room.now_micros()
        hold = Hold(entry, kind, phase, code_of(error), since, error, resolve, revision, number=self._count, **options)
        self._holds[id(hold)] = hold
        self._of.setdefault(entry.key, {})[id(hold)] = hold
        for key in _keys_above(entry):
            self._below.setdefault(key, {})[id(hold)] = hold
        self._tell(hold)
        if self._room.state is RoomState.LOST:
            # Nothing can be stored for it any more; given up as soon as whoever holds it has parked.
            self._room.call_in_loop(self.end, hold, "abandon")
        return hold

    def again(self, hold: Hold, phase: str, error: BaseException) -> None:
        """Take back a claimed hold whose recovery failed, in its new form and under a new revision."""
        hold.held_at = phase
        hold.code = code_of(error)
        hold.error = error
        hold.revision = Revision(self._room.next_uuid())
        hold.claimed = False
        if isinstance(error, ConstructionOwnerUnavailableError):
            hold.retry = None
        if id(hold) in self._holds:
            self._tell(hold, again=True)

    @trio.lowlevel.enable_ki_protection
    def end(self, hold: Hold, action: str) -> None:
        """End a hold: after a successful `retry`, an attested `acknowledge`, or to `abandon` it."""
        if self._holds.pop(id(hold), None) is None:
            # Abandoned while its recovery ran; that one came too late to matter.
            return
        _forget(self._of, hold.entry.key, hold)
        # The same as when it came: nobody above leaves before what is held below has ended.
        for key in _keys_above(hold.entry):
            _forget(self._below, key, hold)
        self._room.events.emit(RunRecovered, hold.entry.run_id, hold.held_at, action)
        hold.resolve(action)

    @trio.lowlevel.enable_ki_protection
    def abandon(self) -> tuple[HeldObligation, ...]:
        """Give up the holds of this turn, and name them; one whose recovery is under way is left to that."""
        given_up = tuple(hold for hold in self._holds.values() if not hold.claimed)
        facts = tuple(hold.facts() for hold in given_up)
        for hold in given_up:
            self.end(hold, "abandon")
        return facts

    def of(self, entry: Entry, kind: HoldKind) -> Hold | None:
        """Give what of that kind is held for a Run."""
        for hold in self._of.get(entry.key, {}).values():
            if hold.entry is entry and hold.kind is kind:
                return hold
        return None

    def of_run(self, run_id: RunId) -> Iterable[Hold]:
        """Give all that is held for a Run, in the order in which it came."""
        return tuple(self._of.get(run_id.int, {}).values())

    def below(self, entry: Entry) -> Iterable[Hold]:
        """Give what is held for the descendants of a Run, in the order in which it came. Not to be kept."""
        return self._below.get(entry.key, {}).values()

    def present(self) -> tuple[Hold, ...]:
        """Give all of them, for the operators' door."""
        return tuple(self._holds.values())

    def after(self, number: int) -> tuple[Hold, ...]:
        """Give those that came after the one of that number, without a look at the others."""
        return tuple(takewhile(lambda hold: hold.number > number, reversed(self._holds.values())))[::-1]

    def facts(self) -> tuple[HeldObligation, ...]:
        """Tell all of them as facts."""
        return tuple(hold.facts() for hold in self._holds.values())

    @property
    def changed(self) -> trio.Event:
        """Set when something more is held, or held in another form. Take it in the turn in which you looked."""
        return self._changed

    def changed_at(self, entry: Entry) -> trio.Event:
        """As `changed`, for what is held for that Run or its descendants."""
        event = self._changed_at.get(entry.key)
        if event is None:
            event = self._changed_at[entry.key] = trio.Event()
        return event

    def report(self) -> None:
        """Name each again: they keep the room's block from ending."""
        for facts in self.facts():
            self._room.events.emit(RoomHeld, facts.run_id, facts.lease_id, facts.launch_id, facts.phase, facts.code)
            _log.error(
                "room %r can't end: run %s is held at %s (%s)",
                self._room.name,
                facts.run_id,
                facts.phase,
                facts.code,
                extra={"room": self._room.name, "lease_id": str(facts.lease_id), "launch_id": str(facts.launch_id)}
                | _fields(facts.run_id, facts.phase, facts.code),
            )

    def _tell(self, hold: Hold, *, again: bool = False) -> None:
        run_id = hold.entry.run_id
        self._changed.set()
        self._changed = trio.Event()
        for key in chain((hold.entry.key,), _keys_above(hold.entry)):
            event = self._changed_at.pop(key, None)
            if event is not None:
                event.set()
        self._room.events.emit(RunHeld, run_id, hold.phase, hold.code, again)
        _log.error(
            "run %s is held at %s (%s) until an operator acts",
            run_id,
            hold.phase,
            hold.code,
            extra=_fields(run_id, hold.phase, hold.code),
        )


def _keys_above(entry: Entry) -> Iterator[int]:
    above = entry.parent
    while above is not None:
        yield above.key
        above = above.parent


def _forget(book: dict[int, dict[int, Hold]], key: int, hold: Hold) -> None:
    page = book[key]
    del page[id(hold)]
    if not page:
        del book[key]


def _fields(run_id: RunId, phase: str, code: str) -> dict[str, str]:
    return {"run_id": str(run_id), "phase": phase, "code": code}


def code_of(error: BaseException) -> str:
    """Name an error by its code or its class, never by its message, which may hold anything. At most 120 characters.

    A code is one only in its proper form: our errors can be made with any text by whoever raises them.
    """
    code = getattr(error, "code", None) if isinstance(error, SpindelError) else None
    if isinstance(code, str) and _CODE.fullmatch(code):
        return str.__str__(code)
    return type(error).__qualname__[:_CHARACTERS_MAX]
