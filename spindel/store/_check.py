"""Checking a file cold: every invariant that can be read from it, without claiming or changing anything.

The triggers refuse what breaks a rule; this looks for what broke one all the same: another program with the triggers
dropped, a damaged disk, a bug. It reads one snapshot, so it may run while another process uses the file. What is
unusual and yet in order, such as the running row of a process that was killed, is told as information.

Rules about one row stand in a table of small functions, each of which gives the sentence that describes its breach.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

import apsw
import attrs

from spindel.codec import decode_json
from spindel.errors import InvalidRecordError
from spindel.ids import RunId, WitnessStage, witness_text
from spindel.store._connection import describe_problem, open_for_reading
from spindel.store._migrations import build_schema, read_applied, recognise
from spindel.store._ownership import owner_known_dead
from spindel.store._records import ENDED, ERROR_CHARACTERS_MAX, RunStatus, check_reason, check_room_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spindel.store._migrations import Migration

__all__ = ["CheckReport", "Finding", "check_file"]

FINDINGS_MAX: Final = 1000
_PROGRESS_ROWS: Final = 10_000
_STOP_STEPS: Final = 100_000
"""After so many steps of SQLite's machine it is asked whether to go on: a few milliseconds."""

_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


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


class _Row(NamedTuple):
    id: str
    room: str
    incarnation: str
    parent_id: str | None
    trigger_id: str | None
    provenance: str
    family_version: int | None
    job_version: int | None
    job_offer: str | None
    job_experiment: str | None
    created_at: int
    started_at: int
    status: str
    reason: str | None
    error: str | None
    ended_at: int | None
    job_result_state: str | None
    job_scorecard: str | None
    family_return_ack: str | None
    job_core_cleanup_ack: str | None
    job_adapter_cleanup_ack: str | None
    admission_disposal: str | None
    updated_at: int
    # Of the room and of the parent, as far as there are any.
    room_incarnation: str | None
    parent_room: str | None
    parent_incarnation: str | None
    parent_status: str | None
    parent_reason: str | None
    parent_ended_at: int | None
    parent_witness: str | None

    @property
    def fence(self) -> bool:
        return self.status == RunStatus.FAILED and self.reason == "admission-failed"


_REASONS_OF_FAILED: Final = frozenset({"admission-failed", "orphaned", "child-failed", "interrupted"})
_OWN_COLUMNS: Final = _Row._fields[: _Row._fields.index("room_incarnation")]


# -- rules of one row: each gives what is wrong, or None ---------------------------------------------------------------


def _ids(row: _Row) -> str | None:
    values = (
        row.id,
        row.incarnation,
        row.parent_id,
        row.trigger_id,
        row.job_offer,
        row.job_experiment,
        row.job_scorecard,
    )
    wrong = next((value for value in values if value is not None and not _UUID.fullmatch(value)), None)
    return None if wrong is None else f"{wrong!r} is no UUID in canonical form"


def _end_time(row: _Row) -> str | None:
    if row.status not in ENDED and row.status not in {RunStatus.RUNNING, RunStatus.WAITING}:
        return f"{row.status!r} is no status that is ever stored"
    if (row.ended_at is not None) != (row.status in ENDED):
        return f"it is {row.status} and its end time is {row.ended_at}"
    return None


def _times(row: _Row) -> str | None:
    if not row.created_at <= row.started_at <= row.updated_at:
        return f"created {row.created_at}, started {row.started_at}, updated {row.updated_at}: time went backwards"
    if row.ended_at is not None and not row.started_at <= row.ended_at <= row.updated_at:
        return f"started {row.started_at}, ended {row.ended_at}, updated {row.updated_at}: time went backwards"
    return None


def _outcome(row: _Row) -> str | None:
    if row.status == RunStatus.RUNNING and (row.reason is not None or row.error is not None):
        return "it is running and has a reason or an error"
    if row.reason in _REASONS_OF_FAILED and row.status not in {RunStatus.FAILED, RunStatus.RUNNING}:
        return f"it is {row.status} with the reason {row.reason}, which only a failed Run has"
    if row.ended_at is None and (row.job_result_state is not None or row.job_scorecard is not None):
        return "it has not ended and has a Job's result"
    if row.reason == "orphaned" and row.job_offer is not None and row.job_result_state != "unavailable":
        return "it was orphaned with an offer, so its result should be unavailable"
    return None


def _texts(row: _Row) -> str | None:
    try:
        if row.reason is not None:
            check_reason(row.reason)
    except InvalidRecordError as problem:
        return str(problem)
    if row.error is not None and len(row.error) > ERROR_CHARACTERS_MAX:
        return f"its error has {len(row.error)} characters, more than {ERROR_CHARACTERS_MAX}"
    return None


def _provenance(row: _Row) -> str | None:
    try:
        value = decode_json(row.provenance)
    except ValueError:
        return "its provenance is no JSON"
    return None if isinstance(value, dict) else "its provenance is no JSON object"


def _witness_values(row: _Row) -> str | None:
    for stage, value in (
        (WitnessStage.FAMILY_RETURN, row.family_return_ack),
        (WitnessStage.CORE_CLEANUP, row.job_core_cleanup_ack),
        (WitnessStage.ADAPTER_CLEANUP, row.job_adapter_cleanup_ack),
    ):
        if value is not None and value != witness_text(stage, row.id):
            return f"its {stage} witness is {value}, which is not the witness of that stage and Run"
    return None


def _witness_order(row: _Row) -> str | None:
    if row.family_return_ack is not None and row.family_version is None:
        return "it has a family witness and no family version"
    if row.family_return_ack is not None and row.job_version is None and not _returned(row):
        return "it has a family witness although it never stored an end of its own"
    if row.job_adapter_cleanup_ack is not None and (row.job_core_cleanup_ack is None or row.ended_at is None):
        return "it has the adapter's witness without the core's, or before its end"
    return None


def _returned(row: _Row) -> bool:
    """True if the Run itself stored how it ended, as a plain one does in the write that brings the witness."""
    return row.status != RunStatus.RUNNING and row.reason != "orphaned"


def _fence(row: _Row) -> str | None:
    marks = (
        row.family_return_ack,
        row.job_core_cleanup_ack,
        row.job_adapter_cleanup_ack,
        row.job_result_state,
        row.job_scorecard,
    )
    if row.fence and any(mark is not None for mark in marks):
        return "its admission was fenced, so it never ran, and yet it has a witness or a result"
    return None


def _disposal(row: _Row) -> str | None:
    if row.admission_disposal is None or (row.fence and row.admission_disposal == "discarded"):
        return None
    return f"it has the disposal {row.admission_disposal!r}, which only a fenced admission has, as 'discarded'"


def _parent(row: _Row) -> str | None:
    if row.parent_id is None:
        return None
    if row.parent_status is None:
        return f"its parent {row.parent_id} is not in the file"
    if (row.parent_room, row.parent_incarnation) != (row.room, row.incarnation):
        return f"its parent {row.parent_id} is of another room or opening"
    if row.parent_status == RunStatus.FAILED and row.parent_reason == "admission-failed":
        return f"its parent {row.parent_id} was fenced and never ran"
    return None


def _outlived_parent(row: _Row) -> str | None:
    # Of one opening: orphans of an earlier one are adopted in any order.
    if row.status == RunStatus.RUNNING and row.parent_status not in {None, RunStatus.RUNNING}:
        return f"it is running although its parent {row.parent_id} is {row.parent_status}"
    return None


def _after_parent(row: _Row) -> str | None:
    # A parent's end is dated after its family was joined, and a room's times never go backwards.
    if row.parent_witness is None or row.parent_ended_at is None:
        return None
    if max(row.started_at, row.ended_at or 0) > row.parent_ended_at:
        return f"it started or ended after its parent {row.parent_id}, whose witness says that its family had returned"
    return None


_RULES: Final[tuple[tuple[str, Callable[[_Row], str | None]], ...]] = (
    ("id-form", _ids),
    ("end-time", _end_time),
    ("times", _times),
    ("outcome", _outcome),
    ("text-form", _texts),
    ("provenance", _provenance),
    ("witness-value", _witness_values),
    ("witness-order", _witness_order),
    ("fence-executed", _fence),
    ("disposal", _disposal),
    ("parent", _parent),
    ("outlived-parent", _outlived_parent),
    ("after-parent", _after_parent),
)


# -- the check ---------------------------------------------------------------------------------------------------------


def check_file(
    path: str,
    vfs: str | None,
    known: Sequence[Migration],
    *,
    stopped: Callable[[], bool],
    progress: Callable[[int, int], object],
) -> CheckReport:
    """Check a file that is or isn't in use.

    Args:
        path: the file.
        vfs: the VFS to read it by.
        known: the migrations of all parts that are loaded.
        stopped: asked now and then; True ends the check with an `apsw.InterruptError`.
        progress: called with how many Runs were read, of how many.

    Raises:
        SchemaError: it isn't ours, or is newer.
        apsw.Error: it can't be opened.
    """
    connection = open_for_reading(path, vfs)
    try:
        applied = recognise(connection, path, known)
        connection.set_progress_handler(stopped, _STOP_STEPS)
        return _Check(connection, path, progress).run(applied, known)
    finally:
        connection.close(True)


class _Check:
    """One check: counts and findings while it goes on."""

    def __init__(self, connection: apsw.Connection, path: str, progress: Callable[[int, int], object]) -> None:
        self._connection = connection
        self._path = path
        self._progress = progress
        self._violations: list[Finding] = []
        self._information: list[Finding] = []
        self._found = 0
        self._told = 0
        self._rooms = self._runs = self._running = self._orphans = self._causes = 0
        self._unowned: set[str] = set()

    def run(self, applied: dict[tuple[str, int], str], known: Sequence[Migration]) -> CheckReport:
        # One read transaction: all of it is true of one moment.
        self._connection.execute("BEGIN")
        try:
            self._check_pages()
            self._check_schema([migration for migration in known if (migration.part, migration.number) in applied])
            if applied:
                self._check_rooms()
                self._check_runs()
                self._check_causes()
        except apsw.InterruptError:
            raise
        except apsw.Error as problem:
            self._violation("damaged", f"{describe_problem(problem)}; the check could not go on")
        kept = (*self._violations, *self._information)
        return CheckReport(
            path=self._path,
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

    def _check_pages(self) -> None:
        for (text,) in self._connection.execute("PRAGMA integrity_check(100)"):
            if text != "ok":
                self._violation("damaged", f"the database is damaged: {text}")
        for table, _, target, _ in self._connection.execute("PRAGMA foreign_key_check"):
            self._violation("reference", f"a row of {table} refers to a row of {target} that is not there")

    def _check_schema(self, applied: Sequence[Migration]) -> None:
        """Compare every table, index and trigger with what the scripts make of an empty file."""
        model = build_schema(applied)
        try:
            wanted = dict(_objects(model))
        finally:
            model.close()
        found = dict(_objects(self._connection))
        foreign_parts = {part for part, _ in read_applied(self._connection)} - {migration.part for migration in applied}
        for name, text in wanted.items():
            if name not in found:
                self._violation("schema", f"the {name[0]} {name[1]} is missing; what it guards is unguarded")
            elif found[name] != text:
                self._violation("schema", f"the {name[0]} {name[1]} is not as this version made it")
        for kind, extra in found.keys() - wanted.keys():
            if not any(extra.startswith(f"{part}_") for part in foreign_parts):
                self._violation("schema", f"the {kind} {extra} is none of ours")

    def _check_rooms(self) -> None:
        rows = self._connection.execute("SELECT name, incarnation, epoch, owner, opened_at, closed_at FROM rooms")
        for name, incarnation, epoch, owner, opened_at, closed_at in rows:
            self._rooms += 1
            try:
                check_room_name(name)
            except InvalidRecordError as problem:
                self._violation("room", str(problem))
            if not _UUID.fullmatch(incarnation) or epoch < 1:
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
        total = self._connection.execute("SELECT count(*) FROM runs").get
        for row in self._rows():
            self._runs += 1
            for code, rule in _RULES:
                if (sentence := rule(row)) is not None:
                    self._violation(code, f"run {row.id}: {sentence}", row.id)
            if row.status == RunStatus.RUNNING:
                self._check_running(row)
            if self._runs % _PROGRESS_ROWS == 0:
                self._progress(self._runs, total)
        self._progress(self._runs, total)

    def _check_running(self, row: _Row) -> None:
        self._running += 1
        if row.room in self._unowned or row.incarnation != row.room_incarnation:
            self._orphans += 1
            self._tell(
                "orphan",
                f"run {row.id} is stored as running and has no living owner; opening {row.room!r} adopts it",
                row.id,
            )

    def _rows(self) -> Iterator[_Row]:
        there = {name for (name,) in self._connection.execute("SELECT name FROM pragma_table_info('runs')")}
        own = ", ".join(f"runs.{name}" if name in there else "NULL" for name in _OWN_COLUMNS)
        witness = "parent.family_return_ack" if "family_return_ack" in there else "NULL"
        of_parent = f"parent.room, parent.incarnation, parent.status, parent.reason, parent.ended_at, {witness}"
        rows = self._connection.execute(
            f"SELECT {own}, rooms.incarnation, {of_parent} "  # noqa: S608  our own names
            "FROM runs LEFT JOIN rooms ON rooms.name = runs.room LEFT JOIN runs AS parent ON parent.id = runs.parent_id"
        )
        return map(_Row._make, rows)

    def _check_causes(self) -> None:
        rows = self._connection.execute(
            "SELECT run_causes.run_id, run_causes.cause_id, consumer.room, cause.room, cause.ended_at, "
            "consumer.status = 'failed' AND consumer.reason IS 'admission-failed' FROM run_causes "
            "LEFT JOIN runs AS consumer ON consumer.id = run_causes.run_id "
            "LEFT JOIN runs AS cause ON cause.id = run_causes.cause_id"
        )
        for run_id, cause_id, room, cause_room, cause_ended_at, fenced in rows:
            self._causes += 1
            if run_id == cause_id or room != cause_room or cause_ended_at is None:
                self._violation(
                    "cause", f"run {run_id}: its cause {cause_id} is itself, elsewhere or not ended", run_id
                )
            if fenced:
                self._violation("fence-executed", f"run {run_id}: it was fenced, so it never consumed anything", run_id)


def _objects(connection: apsw.Connection) -> Iterator[tuple[tuple[str, str], str]]:
    rows: Any = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    for kind, name, text in rows:
        if not name.startswith("sqlite_"):  # such as the statistics of ANALYZE
            yield (kind, name), text


def _run_id(text: str | None) -> RunId | None:
    if text is None or not _UUID.fullmatch(text):
        return None
    return RunId(UUID(text))
