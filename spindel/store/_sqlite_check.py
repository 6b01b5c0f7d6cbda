"""A SQLite file as a check reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import apsw

from spindel.store._check import check_source
from spindel.store._check_rules import OWN_COLUMNS, Row
from spindel.store._connection import describe_problem, open_for_reading
from spindel.store._migrations import build_schema, read_applied, recognise
from spindel.store._served import ReadStoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spindel.store._check import CheckReport
    from spindel.store._migrations import Migration

__all__ = ["check_file"]

_STOP_STEPS: Final = 100_000
"""After so many steps of SQLite's machine it is asked whether to go on: a few milliseconds."""


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
        stopped: asked now and then; True ends the check.
        progress: called with how many Runs were read, of how many.

    Raises:
        SchemaError: it isn't ours, or is newer.
        ReadStoppedError: it was stopped.
        apsw.Error: it can't be opened.
    """
    connection = open_for_reading(path, vfs)
    try:
        applied = recognise(connection, path, known)
        connection.set_progress_handler(stopped, _STOP_STEPS)
        # One read transaction: all of it is true of one moment.
        connection.execute("BEGIN")
        return check_source(_File(connection, path, applied, known), progress)
    except apsw.InterruptError as problem:
        raise ReadStoppedError from problem
    finally:
        connection.close(True)


class _File:
    unreadable: type[Exception] = apsw.Error

    def __init__(
        self,
        connection: apsw.Connection,
        path: str,
        applied: dict[tuple[str, int], str],
        known: Sequence[Migration],
    ) -> None:
        self.place = path
        self._connection = connection
        self._applied = applied
        self._known = [migration for migration in known if (migration.part, migration.number) in applied]

    def describe(self, problem: Exception) -> str:
        assert isinstance(problem, apsw.Error), "nothing else is unreadable"
        if isinstance(problem, apsw.InterruptError):
            raise problem
        return describe_problem(problem)

    def find_damage(self) -> Iterator[tuple[str, str]]:
        for (text,) in self._connection.execute("PRAGMA integrity_check(100)"):
            if text != "ok":
                yield "damaged", f"the database is damaged: {text}"
        for table, _, target, _ in self._connection.execute("PRAGMA foreign_key_check"):
            yield "reference", f"a row of {table} refers to a row of {target} that is not there"

    def read_objects(self) -> dict[tuple[str, str], str]:
        return _objects(self._connection)

    def expected_objects(self) -> dict[tuple[str, str], str]:
        model = build_schema(self._known)
        try:
            return _objects(model)
        finally:
            model.close()

    def foreign_parts(self) -> set[str]:
        return {part for part, _ in read_applied(self._connection)} - {migration.part for migration in self._known}

    def is_empty(self) -> bool:
        return not self._applied

    def read_rooms(self) -> Iterator[tuple[Any, ...]]:
        return self._connection.execute("SELECT name, incarnation, epoch, owner, opened_at, closed_at FROM rooms")

    def count_runs(self) -> int:
        count: int = self._connection.execute("SELECT count(*) FROM runs").get
        return count

    def read_runs(self) -> Iterator[Row]:
        there = {name for (name,) in self._connection.execute("SELECT name FROM pragma_table_info('runs')")}
        own = ", ".join(f"runs.{name}" if name in there else "NULL" for name in OWN_COLUMNS)
        witness = "parent.family_return_ack" if "family_return_ack" in there else "NULL"
        of_parent = f"parent.room, parent.incarnation, parent.status, parent.reason, parent.ended_at, {witness}"
        rows = self._connection.execute(
            f"SELECT {own}, rooms.incarnation, {of_parent} "  # noqa: S608  our own names
            "FROM runs LEFT JOIN rooms ON rooms.name = runs.room LEFT JOIN runs AS parent ON parent.id = runs.parent_id"
        )
        return map(Row._make, rows)

    def read_causes(self) -> Iterator[tuple[Any, ...]]:
        return self._connection.execute(
            "SELECT run_causes.run_id, run_causes.cause_id, consumer.room, cause.room, cause.ended_at, "
            "consumer.status = 'failed' AND consumer.reason IS 'admission-failed' FROM run_causes "
            "LEFT JOIN runs AS consumer ON consumer.id = run_causes.run_id "
            "LEFT JOIN runs AS cause ON cause.id = run_causes.cause_id"
        )


def _objects(connection: apsw.Connection) -> dict[tuple[str, str], str]:
    rows: Any = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    # Without such as the statistics of ANALYZE.
    return {(kind, name): text for kind, name, text in rows if not name.startswith("sqlite_")}
