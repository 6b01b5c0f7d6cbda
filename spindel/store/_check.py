"""Checking a database cold: every invariant that can be read from it, without claiming or changing anything.

The triggers refuse what breaks a rule; this looks for what broke one all the same: another program with the triggers
dropped, a damaged disk, a bug. It reads one snapshot, so it may run while other processes use the database. What is
unusual and yet in order, such as the running row of a process that was killed, is told as information.

How a kind of database is read a source knows; what must hold stands here and in `_check_rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

import attrs

from spindel.errors import InvalidRecordError
from spindel.ids import RunId
from spindel.store._check_rules import RULES, UUID_FORM
from spindel.store._ownership import owner_known_dead
from spindel.store._records import RunStatus, check_room_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spindel.store._check_rules import Row

__all__ = ["CheckReport", "CheckSource", "Finding", "check_source"]

FINDINGS_MAX: Final = 1000
_PROGRESS_ROWS: Final = 10_000


@attrs.frozen
class Finding:
    """One thing that was found.

    Attributes:
        code: which rule, `[a-z-]+`.
        run_id: the Run that it is about, or None.
        sentence: what is the matter, for a human; it quotes no error texts and no provenance.
        violation: False for information: unusual, and yet in order.
    """

    code: str
    run_id: RunId | None
    sentence: str
    violation: bool = True


@attrs.frozen(kw_only=True)
class CheckReport:
    """What a check of a file found.

    Attributes:
        rooms, runs, causes: how many rows were read.
        running: how many of the Runs are stored as running.
        orphans: how many of those have no living owner; the next opening of their room adopts them.
        violations: how many breaches there are.
        findings: the first 1,000 violations, then the first 1,000 pieces of information.
        omitted: how many more of both there are.
    """

    path: str
    rooms: int
    runs: int
    running: int
    orphans: int
    causes: int
    violations: int
    findings: tuple[Finding, ...]
    omitted: int

    @property
    def ok(self) -> bool:
        """True if every invariant holds."""
        return self.violations == 0


class CheckSource(Protocol):
    """One snapshot of a database, read for a check."""

    place: str
    """What it is called."""

    unreadable: type[Exception]
    """What its methods raise where it is damaged; anything else ends the check."""

    def describe(self, problem: Exception) -> str:
        """Say in one sentence what such an error means."""
        ...

    def find_damage(self) -> Iterable[tuple[str, str]]:
        """Give what the database itself finds wrong: code and sentence."""
        ...

    def read_objects(self) -> Mapping[tuple[str, str], str]:
        """Give how each object of ours is defined, by kind and name."""
        ...

    def expected_objects(self) -> Mapping[tuple[str, str], str] | None:
        """Give how it should be; None if that can't be told here."""
        ...

    def foreign_parts(self) -> set[str]:
        """Give the parts whose objects are there and whose layer isn't loaded."""
        ...

    def is_empty(self) -> bool:
        """Tell whether no room was ever opened in it."""
        ...

    def read_rooms(self) -> Iterable[tuple[Any, ...]]:
        """Give name, incarnation, epoch, owner, opening and closing of each room, ids as texts."""
        ...

    def count_runs(self) -> int:
        """Give how many Runs there are to read."""
        ...

    def read_runs(self) -> Iterable[Row]:
        """Give all Runs."""
        ...

    def read_causes(self) -> Iterable[tuple[Any, ...]]:
        """Give consumer, cause, the room of each, the end of the cause, and whether the consumer was fenced."""
        ...


def check_source(source: CheckSource, progress: Callable[[int, int], object]) -> CheckReport:
    """Check a database that is or isn't in use.

    Args:
        source: how it is read.
        progress: called with how many Runs were read, of how many.
    """
    return _Check(source, progress).run()


class _Check:
    """One check: counts and findings while it goes on."""

    def __init__(self, source: CheckSource, progress: Callable[[int, int], object]) -> None:
        self._source = source
        self._progress = progress
        self._violations: list[Finding] = []
        self._information: list[Finding] = []
        self._found = 0
        self._told = 0
        self._rooms = self._runs = self._running = self._orphans = self._causes = 0
        self._unowned: set[str] = set()

    def run(self) -> CheckReport:
        source = self._source
        try:
            for code, sentence in source.find_damage():
                self._violation(code, sentence)
            self._check_schema()
            if not source.is_empty():
                self._check_rooms()
                self._check_runs()
                self._check_causes()
        except source.unreadable as problem:
            self._violation("damaged", f"{source.describe(problem)}; the check could not go on")
        kept = (*self._violations, *self._information)
        return CheckReport(
            path=source.place,
            rooms=self._rooms,
            runs=self._runs,
            running=self._running,
            orphans=self._orphans,
            causes=self._causes,
            violations=self._found,
            findings=kept,
            omitted=self._found + self._told - len(kept),
        )

    def _violation(self, code: str, sentence: str, run_id: str | None = None) -> None:
        self._found += 1
        if len(self._violations) < FINDINGS_MAX:
            self._violations.append(Finding(code, _run_id(run_id), sentence))

    def _tell(self, code: str, sentence: str, run_id: str | None = None) -> None:
        self._told += 1
        if len(self._information) < FINDINGS_MAX:
            self._information.append(Finding(code, _run_id(run_id), sentence, violation=False))

    def _check_schema(self) -> None:
        """Compare every object with what the scripts make of an empty database."""
        wanted, found = self._source.expected_objects(), self._source.read_objects()
        if wanted is None:
            self._tell(
                "schema-unchecked", "the tables and triggers couldn't be compared: that needs a user who may create"
            )
            return
        for name, text in wanted.items():
            if name not in found:
                self._violation("schema", f"the {name[0]} {name[1]} is missing; what it guards is unguarded")
            elif found[name] != text:
                self._violation("schema", f"the {name[0]} {name[1]} is not as this version made it")
        foreign_parts = self._source.foreign_parts()
        for kind, extra in found.keys() - wanted.keys():
            if not any(extra.startswith(f"{part}_") for part in foreign_parts):
                self._violation("schema", f"the {kind} {extra} is none of ours")

    def _check_rooms(self) -> None:
        for name, incarnation, epoch, owner, opened_at, closed_at in self._source.read_rooms():
            self._rooms += 1
            try:
                check_room_name(name)
            except InvalidRecordError as problem:
                self._violation("room", str(problem))
            if not UUID_FORM.fullmatch(incarnation) or epoch < 1:
                self._violation("room", f"room {name!r} has the incarnation {incarnation!r} and the epoch {epoch}")
            if (owner is None) != (closed_at is not None):
                self._violation("room", f"room {name!r} must be either closed or owned")
            if closed_at is not None and closed_at < opened_at:
                self._violation("room", f"room {name!r} was closed at {closed_at}, before it was opened at {opened_at}")
            if owner is None:
                self._unowned.add(name)
            elif owner_known_dead(owner):
                self._unowned.add(name)
                self._tell(
                    "room-unclosed", f"room {name!r} was not closed: its owner is gone; the next opening takes over"
                )

    def _check_runs(self) -> None:
        total = self._source.count_runs()
        for row in self._source.read_runs():
            self._runs += 1
            for code, rule in RULES:
                if (sentence := rule(row)) is not None:
                    self._violation(code, f"run {row.id}: {sentence}", row.id)
            if row.status == RunStatus.RUNNING:
                self._check_running(row)
            if self._runs % _PROGRESS_ROWS == 0:
                self._progress(self._runs, total)
        self._progress(self._runs, total)

    def _check_running(self, row: Row) -> None:
        self._running += 1
        if row.room in self._unowned or row.incarnation != row.room_incarnation:
            self._orphans += 1
            self._tell(
                "orphan",
                f"run {row.id} is stored as running and has no living owner; opening {row.room!r} adopts it",
                row.id,
            )

    def _check_causes(self) -> None:
        for run_id, cause_id, room, cause_room, cause_ended_at, fenced in self._source.read_causes():
            self._causes += 1
            if run_id == cause_id or room != cause_room or cause_ended_at is None:
                self._violation(
                    "cause", f"run {run_id}: its cause {cause_id} is itself, elsewhere or not ended", run_id
                )
            if fenced:
                self._violation("fence-executed", f"run {run_id}: it was fenced, so it never consumed anything", run_id)


def _run_id(text: str | None) -> RunId | None:
    if text is None or not UUID_FORM.fullmatch(text):
        return None
    return RunId(UUID(text))
