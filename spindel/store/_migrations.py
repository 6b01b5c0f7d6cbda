"""Recognising a file, and bringing it forward: numbered scripts, each applied once, in one transaction of its own.

| the file | what happens |
|---|---|
| new, or an empty database | all scripts |
| ours, older | the scripts that it lacks |
| ours, with a script that we don't know or know otherwise | `SchemaError`, unchanged |
| not ours, no database, damaged | `SchemaError`, unchanged |

Scripts of a part that isn't loaded are not looked at: a layer above owns its tables, and reading Runs needs none of it.
"""

from __future__ import annotations

import hashlib
import threading
from importlib import resources
from typing import TYPE_CHECKING, Final, Literal

import apsw
import attrs

from spindel.errors import SchemaError
from spindel.store._connection import (
    APPLICATION_ID,
    JOURNAL_BYTES,
    check_writable,
    find_file,
    open_for_reading,
    open_for_writing,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spindel.clock import WallClock
    from spindel.store._contract import StorePart

__all__ = [
    "Migration",
    "build_schema",
    "check_applied",
    "collect_migrations",
    "load_scripts",
    "migrate",
    "open_store_file",
    "read_applied",
    "recognise",
]

_NEW_FILE_BYTES: Final = 256 * 1024
"""Room for the tables, the journal that makes them, and the journal's index."""

_JOURNAL_ATTEMPTS: Final = 600
_JOURNAL_PAUSE_SECONDS: Final = 0.05


@attrs.frozen
class Migration:
    """One script of one part.

    Attributes:
        number: counts from 1 within the part.
    """

    part: str
    number: int
    script: str

    @property
    def checksum(self) -> str:
        """The hash of the text, so that a file can tell whether its script is the one we know."""
        return hashlib.sha256(self.script.encode()).hexdigest()


def load_scripts(part: str, dialect: Literal["sqlite", "postgres"]) -> tuple[str, ...]:
    """Read the scripts of a part of this package, in order: `PART.DIALECT.NNN_WHAT.sql`."""
    folder = resources.files("spindel.store").joinpath("_schema")
    prefix = f"{part}.{dialect}."
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(prefix))
    return tuple(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def collect_migrations(parts: Iterable[StorePart], dialect: Literal["sqlite", "postgres"]) -> tuple[Migration, ...]:
    """Give the scripts of all parts, in the order in which they are applied."""
    return tuple(
        Migration(part.name, number, script)
        for part in parts
        for number, script in enumerate(part.migrations.get(dialect, ()), start=1)
    )


def recognise(connection: apsw.Connection, path: str, known: Sequence[Migration]) -> dict[tuple[str, int], str]:
    """Read which migrations a file has; an empty database has none.

    Raises:
        SchemaError: it isn't ours, or it is newer than this version.
    """
    application = connection.execute("PRAGMA application_id").get
    filled = connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_master)").get
    if application != APPLICATION_ID and (filled or application):
        raise SchemaError(path, "it is a database of another program; name another file")
    if not filled:
        return {}
    return check_applied(read_applied(connection), path, known)


def check_applied(
    applied: dict[tuple[str, int], str], place: str, known: Sequence[Migration]
) -> dict[tuple[str, int], str]:
    """Check that a database has no migration that this version doesn't know, and give back what it has.

    Raises:
        SchemaError: it is newer than this version, or otherwise.
    """
    checksums = {(migration.part, migration.number): migration.checksum for migration in known}
    parts = {migration.part for migration in known}
    for (part, number), checksum in applied.items():
        if part in parts and (part, number) not in checksums:
            raise SchemaError(place, f"it was written by a newer version (migration {part} {number}); update spindel")
        if checksums.get((part, number), checksum) != checksum:
            raise SchemaError(
                place,
                f"its migration {part} {number} is not the one of this version; open it with the version it is from",
            )
    return applied


def read_applied(connection: apsw.Connection) -> dict[tuple[str, int], str]:
    """Read the record of migrations: part and number to checksum."""
    return {
        (part, number): checksum
        for part, number, checksum in connection.execute("SELECT part, number, checksum FROM migrations")
    }


def open_store_file(path: str, vfs: str | None, known: Sequence[Migration], clock: WallClock) -> apsw.Connection:
    """Open a store's file for writing: recognised before anything may change it, made ours, brought forward.

    Raises:
        SchemaError: it isn't ours or is newer; it was not changed.
        apsw.Error: it can't be opened, read or written.
    """
    applied: dict[tuple[str, int], str] = {}
    found = find_file(path)
    # All that keeps the file from being written is looked for first, since nothing may be taken back after: another
    # process may have opened the empty file by then, and would write into one that has no name any more.
    check_writable(path, _NEW_FILE_BYTES if found is None else JOURNAL_BYTES)
    if found is not None and found.st_size:
        probe = open_for_reading(path, vfs)
        try:
            applied = recognise(probe, path, known)
        finally:
            probe.close(True)
    connection = open_for_writing(path, vfs, create=True)
    try:
        _use_journal(connection, path)
        if len(applied) < len(known):
            migrate(connection, path, known, clock)
    except BaseException:
        connection.close(True)
        raise
    return connection


def _use_journal(connection: apsw.Connection, path: str) -> None:
    """Switch to the write-ahead journal, once in the life of a file.

    Two processes that make a file at the same moment may both try; SQLite refuses one of them at once instead of
    letting it wait, since both might wait for each other.
    """
    pause = threading.Event()
    for _ in range(_JOURNAL_ATTEMPTS):
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").get
        except apsw.BusyError:
            pause.wait(_JOURNAL_PAUSE_SECONDS)
        else:
            break
    else:
        raise apsw.BusyError("the journal mode could not be set")
    if mode != "wal":
        raise SchemaError(path, "its file system can't keep a journal that processes share; put it on a local disk")


def migrate(connection: apsw.Connection, path: str, known: Sequence[Migration], clock: WallClock) -> None:
    """Apply what a recognised file lacks.

    Another process may do the same at this moment, so each transaction looks again what is there once it has the lock.

    Raises:
        SchemaError: it became newer meanwhile.
        apsw.Error: the file can't be written.
    """
    for migration in known:
        with _immediate(connection):
            if (migration.part, migration.number) in recognise(connection, path, known):
                continue
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(migration.script).fetchall()
            connection.execute(
                "INSERT INTO migrations (part, number, checksum, at) VALUES (?, ?, ?, ?)",
                (migration.part, migration.number, migration.checksum, clock.now_micros()),
            )


def build_schema(migrations: Iterable[Migration]) -> apsw.Connection:
    """Build the tables in memory, to compare a file with what it should be."""
    connection = apsw.Connection(":memory:")
    for migration in migrations:
        connection.execute(migration.script).fetchall()
    return connection


class _immediate:  # noqa: N801  read as a statement: with _immediate(connection)
    """One transaction that has the writer's lock from its first statement."""

    __slots__ = ("_connection",)

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, exc_type: object, exc: object, tb: object) -> None:
        if exc_type is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
