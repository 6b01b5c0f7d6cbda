"""Recognising a database, and bringing it forward: numbered scripts, each applied once, in one transaction of its own.

| the database | what happens |
|---|---|
| without a schema `spindel` | all scripts |
| ours, older | the scripts that it lacks |
| ours, with a script that we don't know or know otherwise | `SchemaError`, unchanged |
| its schema `spindel` is another program's | `SchemaError`, unchanged |
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from spindel.errors import SchemaError
from spindel.store._migrations import check_applied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spindel.clock import WallClock
    from spindel.store._migrations import Migration
    from spindel.store._postgres_connection import Session

__all__ = ["bring_forward", "list_expected", "list_objects", "recognise_database"]

_VERSION_MIN: Final = 130_000
_MIGRATION_LOCK: Final = 0x73706E64_6D696772
"""Held while a script is applied, so that two processes don't make the same tables: `spndmigr`."""

# From the catalogue's tables: a look-up by name may still answer from before the lock on migrations was waited for.
_PRESENT: Final = """\
SELECT current_setting('server_encoding'),
  EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = 'spindel'),
  EXISTS (
    SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = 'spindel' AND relname = 'migrations'
  )
"""


def recognise_database(session: Session, place: str, known: Sequence[Migration]) -> dict[tuple[str, int], str]:
    """Read which migrations a database has; a database without our schema has none.

    Raises:
        SchemaError: the schema isn't ours, or it is newer than this version; or the server won't do.
        psycopg.Error: it can't be read.
    """
    if session.info.server_version < _VERSION_MIN:
        raise SchemaError(place, "the server is older than PostgreSQL 13; update it")
    ((encoding, schema, table),) = session.execute(_PRESENT).fetchall()
    if encoding != "UTF8":
        raise SchemaError(place, f"its encoding is {encoding}; create a database with ENCODING 'UTF8'")
    if not schema:
        return {}
    if not table:
        raise SchemaError(place, "its schema spindel is another program's; name another database")
    rows = session.execute("SELECT part, number, checksum FROM spindel.migrations").fetchall()
    return check_applied({(part, number): checksum for part, number, checksum in rows}, place, known)


def bring_forward(session: Session, place: str, known: Sequence[Migration], clock: WallClock) -> None:
    """Apply what a database lacks.

    Another process may do the same at this moment, so each transaction looks again what is there once it has the lock.

    Raises:
        SchemaError: it isn't ours or is newer; it was not changed.
        psycopg.Error: it can't be read or written.
    """
    if session.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
        raise SchemaError(place, "the server is a standby, which can only be read; name its primary")
    if len(recognise_database(session, place, known)) >= len(known):
        return
    for migration in known:
        with session.transaction():
            session.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
            if (migration.part, migration.number) in recognise_database(session, place, known):
                continue
            session.execute(migration.script.encode())
            session.execute(
                "INSERT INTO spindel.migrations (part, number, checksum, at) VALUES (%s, %s, %s, %s)",
                (migration.part, migration.number, migration.checksum, clock.now_micros()),
            )


_OBJECTS: Final = """\
WITH ours AS (SELECT oid, relname, relkind FROM pg_class WHERE relnamespace = to_regnamespace(%(schema)s))
SELECT 'column', relname || '.' || attname,
    format_type(atttypid, atttypmod) || ' ' || attnotnull || ' ' || coalesce(collname, '-')
  FROM pg_attribute JOIN ours ON ours.oid = attrelid LEFT JOIN pg_collation ON pg_collation.oid = attcollation
  WHERE attnum > 0 AND NOT attisdropped AND relkind = 'r'
UNION ALL SELECT 'constraint', relname || '.' || conname, convalidated || ' ' || pg_get_constraintdef(pg_constraint.oid)
  FROM pg_constraint JOIN ours ON ours.oid = conrelid WHERE contype <> 'n'
UNION ALL SELECT 'index', relname, indisvalid || ' ' || pg_get_indexdef(indexrelid)
  FROM pg_index JOIN ours ON ours.oid = indexrelid
UNION ALL SELECT 'trigger', relname || '.' || tgname, tgenabled::text || ' ' || pg_get_triggerdef(pg_trigger.oid)
  FROM pg_trigger JOIN ours ON ours.oid = tgrelid WHERE NOT tgisinternal
UNION ALL SELECT 'function', proname || '(' || pg_get_function_identity_arguments(pg_proc.oid) || ')', prosrc
  FROM pg_proc WHERE pronamespace = to_regnamespace(%(schema)s)
"""
_MODEL: Final = "spindel_model"


def list_objects(session: Session, schema: str = "spindel") -> dict[tuple[str, str], str]:
    """Read every column, constraint, index, trigger and function of a schema: kind and name to how it is defined."""
    rows = session.execute(_OBJECTS.encode(), {"schema": schema}).fetchall()
    return {(kind, name): text.replace(f"{schema}.", "spindel.") for kind, name, text in rows}


def list_expected(session: Session, applied: Sequence[Migration]) -> dict[tuple[str, str], str]:
    """Read what the scripts make, from a schema beside ours that is gone again when this returns.

    Raises:
        psycopg.Error: this user or this server may not make one.
    """
    with session.transaction(force_rollback=True):
        for migration in applied:
            session.execute(re.sub(r"\bspindel(?=[.;])", _MODEL, migration.script).encode())
        return list_objects(session, _MODEL)
