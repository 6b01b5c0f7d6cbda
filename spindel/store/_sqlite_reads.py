"""Reading Runs and rooms from a SQLite file: constant texts, and rows made into records.

A file may be older than this version and yet only be read, so columns that it doesn't have are read as NULL.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import apsw

from spindel.codec import decode_json
from spindel.ids import RunId
from spindel.store._records import RoomRecord, RunCursor, RunPage, RunQuery, RunRecord, RunStatus, check_limit

__all__ = ["RunReader"]

_COLUMNS: Final = (
    "id",
    "room",
    "incarnation",
    "kind",
    "actor",
    "parent_id",
    "trigger_id",
    "provenance",
    "family_version",
    "job_version",
    "job_key",
    "job_offer",
    "job_experiment",
    "created_at",
    "started_at",
    "status",
    "reason",
    "error",
    "ended_at",
    "job_result_state",
    "job_scorecard",
    "family_return_ack",
    "job_core_cleanup_ack",
    "job_adapter_cleanup_ack",
    "admission_disposal",
    "updated_at",
)

_CAUSES: Final = "SELECT cause_id FROM run_causes WHERE run_id = ?1 ORDER BY cause_id"

_ROOMS: Final = "SELECT name, incarnation, epoch, owner, opened_at, closed_at FROM rooms ORDER BY name"

_UNDER: Final = """\
WITH RECURSIVE subtree (id) AS (
  SELECT id FROM runs WHERE id = :under AND room = :room
  UNION
  SELECT child.id FROM runs AS child JOIN subtree ON child.parent_id = subtree.id
)
"""


class RunReader:
    """The statements that fit one file. Used by one thread at a time."""

    __slots__ = ("_columns", "_connection", "_pages", "_there")

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._there = there = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('runs')")}
        self._columns = ", ".join(f"runs.{name}" if name in there else f"NULL AS {name}" for name in _COLUMNS)
        self._pages: dict[tuple[bool, ...], str] = {}

    def close(self) -> None:
        """Give up the connection. A reader has nothing to lose, so a disk that fails meanwhile is no error of it."""
        with suppress(apsw.Error):
            self._connection.close(True)

    def read_version(self) -> int:
        """Give a number that is another one whenever another connection has committed."""
        version: int = self._connection.execute("PRAGMA data_version").get
        return version

    def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run with its causes."""
        row = self._connection.execute(
            f"SELECT {self._columns} FROM runs WHERE id = ?1 AND room = ?2",  # noqa: S608  our own column names
            (str(run_id), room),
        ).fetchone()
        if row is None:
            return None
        causes = self._connection.execute(_CAUSES, (str(run_id),))
        return _run_of(row, tuple(RunId(UUID(cause)) for (cause,) in causes))

    def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page; filtered before the limit, which one more row than asked tells apart from the end."""
        limit = check_limit(query.limit)
        values: dict[str, Any] = {"room": query.room, "limit": limit + 1}
        if query.status is not None:
            values["status"] = query.status.value
        if query.parent is not None:
            values["parent"] = str(query.parent)
        if query.under is not None:
            values["under"] = str(query.under)
        if query.before is not None:
            values["before_start"] = query.before.started_at
            values["before_id"] = str(query.before.id)
        rows = self._connection.execute(self._page_text(query), values).fetchall()
        runs = tuple(_run_of(row, ()) for row in rows[:limit])
        more = len(rows) > limit
        return RunPage(runs, RunCursor(runs[-1].started_at, runs[-1].id) if more else None)

    def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read all rooms, by name."""
        return tuple(
            RoomRecord(
                name=name,
                incarnation=UUID(incarnation),
                epoch=epoch,
                owner=None if owner is None else decode_json(owner),
                opened_at=opened_at,
                closed_at=closed_at,
            )
            for name, incarnation, epoch, owner, opened_at, closed_at in self._connection.execute(_ROOMS)
        )

    def _page_text(self, query: RunQuery) -> str:
        # One constant text for each kind of question: the statement cache finds it again.
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
            text = self._pages[filters] = self._build_page(*filters)
        return text

    def _build_page(self, running: bool, status: bool, parent: bool, under: bool, before: bool, jobs: bool) -> str:
        source = "runs"
        wanted = ["runs.room = :room"]
        if jobs:
            # A file from before Jobs has none.
            wanted.append("runs.job_version IS NOT NULL" if "job_version" in self._there else "0")
        if running:
            # Running rows are few and have an index of their own; a long history before them is never read.
            wanted.append("runs.status = 'running'")
            if not (parent or under):
                source = "runs INDEXED BY runs_running"
        elif status:
            wanted.append("runs.status = :status")
        if parent:
            wanted.append("runs.parent_id = :parent")
        if under:
            # From the subtree to its rows, not through the whole room.
            source = "subtree CROSS JOIN runs ON runs.id = subtree.id"
        if before:
            wanted.append("(runs.started_at, runs.id) < (:before_start, :before_id)")
        return (
            f"{_UNDER if under else ''}SELECT {self._columns} FROM {source} WHERE {' AND '.join(wanted)} "  # noqa: S608  our own texts
            "ORDER BY runs.started_at DESC, runs.id DESC LIMIT :limit"
        )


def _run_id(text: str | None) -> RunId | None:
    return None if text is None else RunId(UUID(text))


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


def _run_of(row: tuple[Any, ...], causes: tuple[RunId, ...]) -> RunRecord:
    (
        run_id,
        room,
        incarnation,
        kind,
        actor,
        parent_id,
        trigger_id,
        provenance,
        family_version,
        job_version,
        job_key,
        job_offer,
        job_experiment,
        created_at,
        started_at,
        status,
        reason,
        error,
        ended_at,
        job_result_state,
        job_scorecard,
        family_return_ack,
        job_core_cleanup_ack,
        job_adapter_cleanup_ack,
        admission_disposal,
        updated_at,
    ) = row
    return RunRecord(
        id=RunId(UUID(run_id)),
        room=room,
        incarnation=UUID(incarnation),
        kind=kind,
        actor=actor,
        parent_id=_run_id(parent_id),
        trigger_id=_uuid(trigger_id),
        provenance=decode_json(provenance),
        family_version=family_version,
        job_version=job_version,
        job_key=job_key,
        job_offer=_uuid(job_offer),
        job_experiment=_uuid(job_experiment),
        created_at=created_at,
        started_at=started_at,
        status=RunStatus(status),
        reason=reason,
        error=error,
        ended_at=ended_at,
        job_result_state=job_result_state,
        job_scorecard=_uuid(job_scorecard),
        family_return_ack=_uuid(family_return_ack),
        job_core_cleanup_ack=_uuid(job_core_cleanup_ack),
        job_adapter_cleanup_ack=_uuid(job_adapter_cleanup_ack),
        admission_disposal=admission_disposal,
        updated_at=updated_at,
        caused_by=causes,
    )
