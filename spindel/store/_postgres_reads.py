"""Reading Runs and rooms from a PostgreSQL database: constant texts, and rows made into records.

A database may be older than this version and yet only be read, so columns that it doesn't have are read as NULL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
from psycopg.rows import dict_row

from spindel.codec import decode_json
from spindel.store._records import RoomRecord, RunCursor, RunPage, RunQuery, RunRecord, RunStatus, check_limit

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.store._postgres_connection import Session

__all__ = ["PostgresReader"]

# A record's fields are named as the columns; its causes stand elsewhere.
_COLUMNS: Final = tuple(field.name for field in attrs.fields(RunRecord) if field.name != "caused_by")

_THERE: Final = b"SELECT attname FROM pg_attribute WHERE attrelid = 'spindel.runs'::regclass AND attnum > 0"

_CAUSES: Final = b"SELECT cause_id FROM spindel.run_causes WHERE run_id = %s ORDER BY cause_id"

_ROOMS: Final = b"SELECT name, incarnation, epoch, owner, opened_at, closed_at FROM spindel.rooms ORDER BY name"

_UNDER: Final = """\
WITH RECURSIVE subtree (id) AS (
  SELECT id FROM spindel.runs WHERE id = %(under)s AND room = %(room)s
  UNION
  SELECT child.id FROM spindel.runs AS child JOIN subtree ON child.parent_id = subtree.id
)
"""

# Few, with an index of their own; asked for beside an order and a limit, the planner might read a long history instead.
_RUNNING: Final = """\
WITH running AS MATERIALIZED (SELECT * FROM spindel.runs WHERE room = %(room)s AND status = 'running')
"""


class PostgresReader:
    """The statements that fit one database. Used by one thread at a time."""

    __slots__ = ("_columns", "_pages", "_session", "_there")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._there = there = {name for (name,) in session.execute(_THERE)}
        self._columns = ", ".join(f"runs.{name}" if name in there else f"NULL AS {name}" for name in _COLUMNS)
        self._pages: dict[tuple[bool, ...], bytes] = {}

    @property
    def session(self) -> Session:
        """By which it reads."""
        return self._session

    def close(self) -> None:
        """Give the session up."""
        self._session.close()

    def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run with its causes."""
        text = f"SELECT {self._columns} FROM spindel.runs WHERE id = %s AND room = %s"  # noqa: S608  our own column names
        rows = self._select(text.encode(), (run_id, room))
        if not rows:
            return None
        causes = self._session.execute(_CAUSES, (run_id,)).fetchall()
        return _run_of(rows[0], tuple(cause for (cause,) in causes))

    def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page; filtered before the limit, which one more row than asked tells apart from the end."""
        limit = check_limit(query.limit)
        values = {
            "room": query.room,
            "status": None if query.status is None else query.status.value,
            "parent": query.parent,
            "under": query.under,
            "before_start": None if query.before is None else query.before.started_at,
            "before_id": None if query.before is None else query.before.id,
            "limit": limit + 1,
        }
        rows = self._select(self._page_text(query), values)
        runs = tuple(_run_of(row, ()) for row in rows[:limit])
        more = len(rows) > limit
        return RunPage(runs, RunCursor(runs[-1].started_at, runs[-1].id) if more else None)

    def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read all rooms, by name."""
        return tuple(
            RoomRecord(
                name=name,
                incarnation=incarnation,
                epoch=epoch,
                owner=None if owner is None else decode_json(owner),
                opened_at=opened_at,
                closed_at=closed_at,
            )
            for name, incarnation, epoch, owner, opened_at, closed_at in self._session.execute(_ROOMS)
        )

    def _select(self, text: bytes, values: Any) -> list[dict[str, Any]]:
        return self._session.cursor(row_factory=dict_row).execute(text, values).fetchall()

    def _page_text(self, query: RunQuery) -> bytes:
        # One constant text for each kind of question: the server's prepared statement is found again.
        running = query.status is RunStatus.RUNNING
        filters = (
            running,
            query.status is not None,
            query.parent is not None,
            query.under is not None,
            query.before is not None,
            query.jobs,
        )
        text = self._pages.get(filters)
        if text is None:
            text = self._pages[filters] = self._build_page(*filters).encode()
        return text

    def _build_page(self, running: bool, status: bool, parent: bool, under: bool, before: bool, jobs: bool) -> str:
        source, before_it = "spindel.runs AS runs", ""
        wanted = ["runs.room = %(room)s"]
        if jobs:
            wanted.append("runs.job_version IS NOT NULL")
        if status:
            wanted.append("runs.status = %(status)s")
        if running and not (parent or under):
            source, before_it = "running AS runs", _RUNNING
        if parent:
            wanted.append("runs.parent_id = %(parent)s")
        if under:
            source, before_it = "subtree JOIN spindel.runs AS runs ON runs.id = subtree.id", _UNDER
        if before:
            wanted.append("(runs.started_at, runs.id) < (%(before_start)s, %(before_id)s)")
        return (
            f"{before_it}SELECT {self._columns} FROM {source} WHERE {' AND '.join(wanted)} "  # noqa: S608  our own texts
            "ORDER BY runs.started_at DESC, runs.id DESC LIMIT %(limit)s"
        )


def _run_of(row: dict[str, Any], causes: tuple[RunId, ...]) -> RunRecord:
    row["provenance"] = decode_json(row["provenance"])
    row["status"] = RunStatus(row["status"])
    return RunRecord(**row, caused_by=causes)
