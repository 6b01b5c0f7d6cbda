"""Connections to a store's file, and what SQLite's errors mean to somebody who opens it.

Opening must not change a file that isn't ours. So a file is first read and recognised; only then is it opened for
writing. It is never read by other means than SQLite's: closing a file anywhere in a process drops the locks that SQLite
holds on it in that process.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
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
    "JOURNAL_BYTES",
    "check_writable",
    "describe_problem",
    "find_file",
    "open_for_reading",
    "open_for_writing",
    "schema_errors",
]

APPLICATION_ID: Final = 0x73706E64
"""Marks a file as ours in its header: `spnd`."""

BUSY_MILLISECONDS: Final = 30_000
"""How long SQLite's lock is waited for when several processes use one file."""

JOURNAL_BYTES: Final = 64 * 1024
"""Room for the journal's index, and for a first transaction in the journal."""

_PERMISSIONS: Final = "change its permissions or name another file"
_PROBLEMS: Final[dict[type[apsw.Error], str]] = {
    apsw.NotADBError: "it is not a SQLite database; name another file",
    apsw.CorruptError: "the database is damaged; restore it from a copy (`sqlite3 FILE .recover` may save some of it)",
    apsw.FullError: "the disk is full; free some space and open it again",
    apsw.BusyError: "another process kept it locked for 30 seconds; end that one, or open it again",
    apsw.PermissionsError: f"this user may not open it; {_PERMISSIONS}",
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
    return _find_obstacle(path) or "the system refused to open it"


def _find_obstacle(path: str) -> str | None:
    """Say what keeps this user from reading and writing a file, or from making it; None if nothing is known to."""
    file = Path(os.path.realpath(path))
    folder = file.parent
    reasons = (
        (not folder.is_dir(), f"the folder {folder} does not exist; create it first"),
        (not file.exists() and not _may(folder, os.W_OK | os.X_OK), f"it can't be created: {_unwritable(folder)}"),
        (file.exists() and not _may(file, os.R_OK), f"this user may not read it; {_PERMISSIONS}"),
        (file.exists() and not _may(file, os.W_OK), f"this user may not write to it; {_PERMISSIONS}"),
        (not _may(folder, os.W_OK | os.X_OK), f"{_unwritable(folder)}, where the database keeps its journal"),
        *(
            (
                beside.exists() and not _may(beside, os.W_OK),
                f"this user may not write to its journal {beside}; remove it if nobody uses it, or own it",
            )
            for beside in (Path(f"{file}-wal"), Path(f"{file}-shm"))
        ),
    )
    return next((text for holds, text in reasons if holds), None)


def _unwritable(folder: Path) -> str:
    return f"this user may not write to the folder {folder}"


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def find_file(path: str) -> os.stat_result | None:
    """Look what stands at a path, links followed; None if nothing does.

    To be called before SQLite sees the path: it waits for the other end of a pipe, and makes a journal beside a device.

    Raises:
        SchemaError: something stands there that can't be a database.
        OSError: it can't be looked at, as where links lead in a circle.
    """
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise SchemaError(path, "it is a folder; name a file")
    if not stat.S_ISREG(found.st_mode):
        raise SchemaError(path, "it is a device, a pipe or a socket; name a file")
    return found


def check_writable(path: str, bytes_needed: int) -> None:
    """Check that a file and what SQLite keeps beside it can be written, before anything is made there.

    SQLite itself opens a file that it may not write read-only without a word, and makes its journal all the same.
    Nothing can clear that away again but a connection that may write, and the file's owner can't write to it.

    Raises:
        SchemaError: this user may not.
        apsw.FullError: there are not so many bytes left.
    """
    obstacle = _find_obstacle(path)
    if obstacle is not None:
        raise SchemaError(path, obstacle)
    if not _has_room(path, bytes_needed):
        raise apsw.FullError("there is no room for the file and its journal")


def _has_room(path: str, bytes_needed: int) -> bool:
    return shutil.disk_usage(Path(os.path.realpath(path)).parent).free >= bytes_needed


def open_for_reading(path: str, vfs: str | None = None) -> apsw.Connection:
    """Open a file that is only read, changing nothing of it whosever it is.

    | the file | how it is opened |
    |---|---|
    | may be written, no journal stands there | for writing: the last to leave clears its journal away |
    | may be written, a journal stands there | read-only: else a leftover would be moved into the file |
    | may not be written, a journal with content | read-only, by the journal and the index that are there |
    | may not be written, no such journal | as one that nobody changes: it is whole by itself |

    Where a user may not write (or the disk is full) nothing must be made beside the file: nobody could clear it away,
    and it would shut the file's owner out.

    Raises:
        SchemaError: it is no file.
        OSError: it can't be looked at.
        apsw.Error: it can't be opened or is no database.
    """
    find_file(path)
    journal = Path(os.path.realpath(path) + "-wal")
    if _find_obstacle(path) is None and _has_room(path, JOURNAL_BYTES):
        flags = apsw.SQLITE_OPEN_READONLY if journal.exists() else apsw.SQLITE_OPEN_READWRITE
        return _read_only(apsw.Connection(path, flags=flags, vfs=vfs))
    # Looked at once: an owner that starts after this is not seen, and once it moves its journal into the file, this
    # connection may read pages of two moments and report damage that isn't there. The only other way to read such a
    # file is to make files beside it. Reading again helps.
    option = "readonly_shm" if journal.exists() and journal.stat().st_size else "immutable"
    uri = f"file:{quote(os.fsencode(path))}?{option}=1"
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
