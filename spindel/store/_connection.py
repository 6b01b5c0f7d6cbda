"""Connections to a store's file, and what SQLite's errors mean to somebody who opens it.

Opening must not change a file that isn't ours. So a file is first read and recognised; only then is it opened for
writing. It is never read by other means than SQLite's: closing a file anywhere in a process drops the locks that SQLite
holds on it in that process.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import apsw

from spindel.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = [
    "APPLICATION_ID",
    "BUSY_MILLISECONDS",
    "describe_problem",
    "open_for_reading",
    "open_for_writing",
    "schema_errors",
]

APPLICATION_ID: Final = 0x73706E64
"""Marks a file as ours in its header: `spnd`."""

BUSY_MILLISECONDS: Final = 30_000
"""How long SQLite's lock is waited for when several processes use one file."""

_PROBLEMS: Final[dict[type[apsw.Error], str]] = {
    apsw.NotADBError: "it is not a SQLite database; name another file",
    apsw.CorruptError: "the database is damaged; restore it from a copy (`sqlite3 FILE .recover` may save some of it)",
    apsw.FullError: "the disk is full; free some space and open it again",
    apsw.BusyError: "another process kept it locked for 30 seconds; end that one, or open it again",
    apsw.PermissionsError: "this user may not open it; change its permissions or name another file",
    apsw.IOError: "the disk reported an error",
}


def describe_problem(problem: apsw.Error) -> str:
    """Say in one sentence what an error of SQLite means for whoever opens the file."""
    for kind, text in _PROBLEMS.items():
        if isinstance(problem, kind):
            return text
    return f"SQLite can't use it: {problem}"


@contextmanager
def schema_errors(path: str) -> Generator[None]:
    """Turn errors of SQLite and the system within the block into a `SchemaError` about this file."""
    try:
        yield
    except apsw.InterruptError:  # somebody stopped it on purpose
        raise
    except (apsw.CantOpenError, apsw.ReadOnlyError) as problem:
        raise SchemaError(path, _describe_unopened(path)) from problem
    except apsw.Error as problem:
        raise SchemaError(path, describe_problem(problem)) from problem
    except OSError as problem:
        raise SchemaError(path, f"it can't be opened: {os.strerror(problem.errno or errno.EIO)}") from problem


def _describe_unopened(path: str) -> str:
    """SQLite has one code for most that keeps a file from being opened or written; the system knows more."""
    file = Path(path)
    folder = file.parent
    reasons = (
        (not folder.is_dir(), f"the folder {folder} does not exist; create it first"),
        (file.is_dir(), "it is a folder; name a file"),
        (not file.exists(), f"it can't be created: this user may not write to the folder {folder}"),
        (not os.access(file, os.R_OK), "this user may not read it; change its permissions or name another file"),
        (not os.access(file, os.W_OK), "this user may not write to it; change its permissions or name another file"),
        (
            not os.access(folder, os.W_OK),
            f"this user may not write to the folder {folder}, where the database keeps its journal",
        ),
    )
    return next((text for holds, text in reasons if holds), "the system refused to open it")


def open_for_reading(path: str, vfs: str | None = None) -> apsw.Connection:
    """Open a file that is only read, changing nothing of it whosever it is.

    A connection that may write clears its journal away when it is the last to leave, but would also move a leftover
    journal into the file; one that may not leaves the journal behind. So the journal decides. Where even the journal's
    index can't be made (a read-only folder) and no journal stands there, the file is whole by itself.

    Raises:
        apsw.Error: it can't be opened or is no database.
    """
    journal = Path(path + "-wal").exists()
    flags = apsw.SQLITE_OPEN_READONLY if journal else apsw.SQLITE_OPEN_READWRITE
    try:
        return _read_only(apsw.Connection(path, flags=flags, vfs=vfs))
    except (apsw.CantOpenError, apsw.ReadOnlyError):
        if journal or not Path(path).is_file():
            raise
    uri = f"file:{quote(path)}?immutable=1"
    return _read_only(apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI, vfs=vfs))


def _read_only(connection: apsw.Connection) -> apsw.Connection:
    try:
        connection.set_busy_timeout(BUSY_MILLISECONDS)
        connection.execute("PRAGMA query_only = 1")
        # Reads the header, which opening alone does not.
        connection.execute("PRAGMA schema_version").fetchall()
    except apsw.Error:
        connection.close()
        raise
    return connection


def open_for_writing(path: str, vfs: str | None = None, *, create: bool = False) -> apsw.Connection:
    """Open a file that was recognised, with every setting that our promises need.

    Settings are made one by one: apsw's collection of good habits would also log each refused statement as an error.

    Raises:
        apsw.Error: it can't be opened.
    """
    flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if create else 0)
    connection = apsw.Connection(path, flags=flags, vfs=vfs)
    try:
        if connection.readonly("main"):
            raise apsw.ReadOnlyError("opened read-only")
        connection.set_busy_timeout(BUSY_MILLISECONDS)
        connection.execute("PRAGMA foreign_keys = 1")
        connection.execute("PRAGMA recursive_triggers = 1")
        # An acknowledged write survives power loss; in batches that costs a few percent.
        connection.execute("PRAGMA synchronous = FULL")
    except apsw.Error:
        connection.close()
        raise
    return connection
