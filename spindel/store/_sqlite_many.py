"""Many mutations of one type as few statements: what a batch mostly consists of when many Runs go on in step.

A statement of many rows costs two thirds of as many statements of one, and its rows are bound at once, so the writer's
thread asks for the interpreter far less often. It can't say which of its rows is refused or a repeat, so it is for the
plain case only; see `StorePart.sqlite_many`.

The texts are the statements of `_sqlite_runs`, told for a table of values instead of one row. They come in a few sizes,
since a text that SQLite has not prepared before costs more than all of this saves; what is left over goes one by one.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Final

import msgspec

from spindel.ids import WitnessStage, witness_text
from spindel.store._mutations import AdmitRun, AppendWitnesses, FinishRun
from spindel.store._sqlite_runs import ADMIT, FINISH, FINISH_RETURNED, WITNESS, refuse_witnesses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import apsw

__all__ = ["SQLITE_APPLY_MANY"]

# More than the largest gains nothing, and apsw forgets a text of more than 16 KB.
_SIZES: Final = (64, 16)

# The signs before two of the columns keep SQLite from starting with the index of running rows, which may be very many,
# instead of looking each row up by its id.
_ADMIT_MANY: Final = """\
INSERT INTO runs (
  room, incarnation, id, kind, actor, parent_id, trigger_id, provenance, family_version, created_at, started_at,
  job_version, job_key, job_offer, job_experiment, status, updated_at
) SELECT room, incarnation, id, kind, actor, parent_id, trigger_id, provenance, family_version, created_at, started_at,
  job_version, job_key, job_offer, job_experiment, 'running', started_at FROM given"""

_FINISH_MANY: Final = """\
UPDATE runs SET status = given.status, reason = given.reason, error = given.error,
  ended_at = CASE WHEN given.status <> 'waiting' THEN given.ended_at END, job_result_state = given.job_result_state,
  job_scorecard = given.job_scorecard, updated_at = given.ended_at
FROM given WHERE runs.id = given.id AND +runs.room = given.room AND +runs.status = 'running'"""

_FINISH_RETURNED_MANY: Final = """\
UPDATE runs SET status = given.status, reason = given.reason, error = given.error,
  ended_at = CASE WHEN given.status <> 'waiting' THEN given.ended_at END, job_result_state = given.job_result_state,
  job_scorecard = given.job_scorecard, updated_at = given.ended_at, family_return_ack = given.witness
FROM given WHERE runs.id = given.id AND +runs.room = given.room AND +runs.status = 'running'
  AND family_version IS NOT NULL"""

_WITNESS_MANY: Final = """\
UPDATE runs SET
  family_return_ack = ifnull(family_return_ack, given.family),
  job_core_cleanup_ack = ifnull(job_core_cleanup_ack, given.core),
  job_adapter_cleanup_ack = ifnull(job_adapter_cleanup_ack, given.adapter),
  updated_at = max(updated_at, given.at)
FROM given WHERE runs.id = given.id AND +runs.room = given.room AND (
  (given.family IS NOT NULL AND family_return_ack IS NULL)
  OR (given.core IS NOT NULL AND job_core_cleanup_ack IS NULL)
  OR (given.adapter IS NOT NULL AND job_adapter_cleanup_ack IS NULL)
) AND (given.family IS NULL OR family_version IS NOT NULL)"""


@cache
def _text_of(statement: str, columns: tuple[str, ...], rows: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return f"WITH given ({', '.join(columns)}) AS MATERIALIZED (VALUES {', '.join([row] * rows)})\n{statement}"


def _execute_rows(
    connection: apsw.Connection, many: str, single: str, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> None:
    """Execute a statement for rows of values: by many as long as there are, then by its form for one."""
    first = 0
    for size in _SIZES:
        while len(rows) - first >= size:
            values = tuple(chain.from_iterable(rows[first : first + size]))
            connection.execute(_text_of(many, columns, size), values)
            first += size
    for row in rows[first:]:
        connection.execute(single, row)


def _rows_of(mutations: Sequence[msgspec.Struct]) -> list[tuple[Any, ...]]:
    return [tuple(fields.values()) for fields in msgspec.to_builtins(mutations)]


def _admit_many(connection: apsw.Connection, mutations: Sequence[AdmitRun]) -> None:
    _execute_rows(connection, _ADMIT_MANY, ADMIT, AdmitRun.__struct_fields__, _rows_of(mutations))


def _finish_many(connection: apsw.Connection, mutations: Sequence[FinishRun]) -> None:
    columns = FinishRun.__struct_fields__
    for returned, alike in groupby(mutations, lambda one: one.family_returned):
        rows = _rows_of(list(alike))
        if returned:
            rows = [(*row, witness_text(WitnessStage.FAMILY_RETURN, row[2])) for row in rows]
            _execute_rows(connection, _FINISH_RETURNED_MANY, FINISH_RETURNED, (*columns, "witness"), rows)
        else:
            _execute_rows(connection, _FINISH_MANY, FINISH, columns, rows)


def _append_witnesses_many(connection: apsw.Connection, mutations: Sequence[AppendWitnesses]) -> None:
    rows = _rows_of(mutations)
    for row in rows:
        refuse_witnesses(row)
    _execute_rows(connection, _WITNESS_MANY, WITNESS, AppendWitnesses.__struct_fields__, rows)


SQLITE_APPLY_MANY: Final[dict[type, Callable[[apsw.Connection, Any], None]]] = {
    AdmitRun: _admit_many,
    FinishRun: _finish_many,
    AppendWitnesses: _append_witnesses_many,
}
