"""A PostgreSQL database as a check reads it: one snapshot, by a session of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import psycopg

from spindel.store._check_rules import OWN_COLUMNS, Row
from spindel.store._postgres_connection import describe_problem
from spindel.store._postgres_schema import list_expected, list_objects, recognise_database

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spindel.store._migrations import Migration
    from spindel.store._postgres_connection import Session

__all__ = ["CheckedDatabase"]

_ROWS_AT_ONCE: Final = 2000
_UUIDS: Final = frozenset(
    {
        "id", "incarnation", "parent_id", "trigger_id", "job_offer", "job_experiment", "job_scorecard",
        "family_return_ack", "job_core_cleanup_ack", "job_adapter_cleanup_ack",
    }
)  # fmt: skip

# The server keeps these itself, as long as nobody told it to trust what is loaded.
_LOOSE: Final = b"""\
SELECT 'runs', 'rooms' FROM spindel.runs LEFT JOIN spindel.rooms ON rooms.name = runs.room WHERE rooms.name IS NULL
UNION ALL
SELECT 'run_causes', 'runs' FROM spindel.run_causes
  LEFT JOIN spindel.runs AS consumer ON consumer.id = run_id LEFT JOIN spindel.runs AS cause ON cause.id = cause_id
  WHERE consumer.id IS NULL OR cause.id IS NULL
LIMIT 100
"""
_CAUSES: Final = b"""\
SELECT run_id::text, cause_id::text, consumer.room, cause.room, cause.ended_at,
  (consumer.status = 'failed' AND consumer.reason = 'admission-failed') IS TRUE FROM spindel.run_causes
LEFT JOIN spindel.runs AS consumer ON consumer.id = run_id LEFT JOIN spindel.runs AS cause ON cause.id = cause_id
"""


class CheckedDatabase:
    """See the module.

    Args:
        session: a new one; it is given up by `close`.
        place: what the database is called.
        known: the migrations of all parts that are loaded.

    Raises:
        SchemaError: it isn't ours, or is newer.
        psycopg.Error: it can't be read.
    """

    unreadable: type[Exception] = psycopg.DatabaseError

    def __init__(self, session: Session, place: str, known: Sequence[Migration]) -> None:
        self.session = session
        self.place = place
        try:
            self._applied = recognise_database(session, place, known)
            self._known = [migration for migration in known if (migration.part, migration.number) in self._applied]
            self._expected = self._read_expected()
            # All that follows is true of one moment.
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        except BaseException:
            session.close()
            raise

    def close(self) -> None:
        """Give the session up."""
        self.session.close()

    def describe(self, problem: Exception) -> str:
        """Say what an error of the server means; one that says nothing about the data is raised on."""
        assert isinstance(problem, psycopg.DatabaseError), "nothing else is unreadable"
        if isinstance(problem, psycopg.OperationalError):
            raise problem
        return describe_problem(problem)

    def find_damage(self) -> Iterator[tuple[str, str]]:
        """Give rows that refer to none. Pages are the server's own business, which looks at their checksums."""
        if self._applied:
            for table, target in self.session.execute(_LOOSE):
                yield "reference", f"a row of {table} refers to a row of {target} that is not there"

    def read_objects(self) -> dict[tuple[str, str], str]:
        """Give how each object of our schema is defined."""
        return list_objects(self.session)

    def expected_objects(self) -> dict[tuple[str, str], str] | None:
        """Give how it should be; None where this user or this server may not make a schema beside it."""
        return self._expected

    def foreign_parts(self) -> set[str]:
        """Give the parts whose objects are there and whose layer isn't loaded."""
        return {part for part, _ in self._applied} - {migration.part for migration in self._known}

    def is_empty(self) -> bool:
        """Tell whether no room was ever opened in it."""
        return not self._applied

    def read_rooms(self) -> Iterator[tuple[Any, ...]]:
        """Give all rooms."""
        return iter(
            self.session.execute(
                "SELECT name, incarnation::text, epoch, owner, opened_at, closed_at FROM spindel.rooms"
            )
        )

    def count_runs(self) -> int:
        """Give how many Runs there are."""
        ((count,),) = self.session.execute("SELECT count(*) FROM spindel.runs").fetchall()
        return int(count)

    def read_runs(self) -> Iterator[Row]:
        """Give all Runs, a few thousand at a time."""
        there = {name.removeprefix("runs.") for kind, name in list_objects(self.session) if kind == "column"}
        own = ", ".join(_text_of("runs", name) if name in there else "NULL" for name in OWN_COLUMNS)
        witness = _text_of("parent", "family_return_ack") if "family_return_ack" in there else "NULL"
        text = (
            f"SELECT {own}, rooms.incarnation::text, parent.room, parent.incarnation::text, parent.status, "  # noqa: S608  our own names
            f"parent.reason, parent.ended_at, {witness} FROM spindel.runs "
            "LEFT JOIN spindel.rooms ON rooms.name = runs.room "
            "LEFT JOIN spindel.runs AS parent ON parent.id = runs.parent_id"
        )
        return map(Row._make, self._stream(text.encode()))

    def read_causes(self) -> Iterator[tuple[Any, ...]]:
        """Give all causes."""
        return self._stream(_CAUSES)

    def _stream(self, text: bytes) -> Iterator[tuple[Any, ...]]:
        with self.session.cursor(name="check") as cursor:
            cursor.itersize = _ROWS_AT_ONCE
            yield from cursor.execute(text)

    def _read_expected(self) -> dict[tuple[str, str], str] | None:
        try:
            return list_expected(self.session, self._known)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction):
            return None


def _text_of(table: str, column: str) -> str:
    return f"{table}.{column}::text" if column in _UUIDS else f"{table}.{column}"
