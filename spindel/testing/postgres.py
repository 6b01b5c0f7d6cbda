"""A PostgreSQL server for a test: made in about a second, gone without a trace.

    with PostgresCluster() as cluster:
        dsn = cluster.create_database()

A cluster is a folder of its own with a server of its own, reached by a Unix socket in that folder and by nothing else.
The server is an ordinary user's process, since PostgreSQL refuses to run as root: whoever is root lends it the user
`postgres`, or `nobody`. Everybody who can reach the socket is its superuser; there is no password.

The server can't outlive the test, however that ends. A shell of three lines, the keeper, waits at the other end of a
pipe; once that closes, because the block was left or because the process died, it stops the server and removes the
folder. (A parent-death signal would do half of that, on Linux only, and follows the thread, not the process.)

Nothing is synced to the disk, which a test has no use for: a server that is killed loses nothing that it acknowledged,
only the machine's own power failure would. `settings` changes that.
"""

from __future__ import annotations

import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

__all__ = ["PostgresCluster", "find_server_binaries"]

_DEBIAN: Final = Path("/usr/lib/postgresql")
_SUPERUSER: Final = "postgres"
_START_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.01
_STOP_SECONDS: Final = 30.0
_READY_LINE: Final = 7
"""Where the server's own pid file says what the server is doing."""

_SETTINGS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "autovacuum": "off",
    "listen_addresses": "",
    "log_min_messages": "fatal",
}

_KEEPER: Final = """\
read -r _
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null) && kill -QUIT "$pid" 2>/dev/null
for _ in $(seq 100); do test -e "$1/data/postmaster.pid" || break; sleep 0.05; done
rm -rf "$1"
"""
"""The server removes its pid file when it ends; its pid itself may stay, as nobody's zombie."""


def find_server_binaries() -> Path | None:
    """Give the folder with `initdb` and `postgres`: from the path, else Debian's newest; None if there is none."""
    found = shutil.which("initdb")
    folders = [] if found is None else [Path(found).resolve().parent]
    numbered = [folder for folder in _DEBIAN.glob("*/bin") if re.fullmatch(r"\d+", folder.parent.name)]
    folders += sorted(numbered, key=lambda folder: int(folder.parent.name), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresCluster:
    """A throw-away server, from entering the block until leaving it. Entering waits for the server, in this thread.

    Args:
        settings: of the server, instead of ours or in addition: `{"fsync": "on"}` to measure,
            `{"listen_addresses": "127.0.0.1"}` to be reached over TCP, too.

    Attributes:
        folder: where its socket and its `log` lie.

    Raises:
        FileNotFoundError: this machine has no PostgreSQL server.
    """

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        binaries = find_server_binaries()
        if binaries is None:
            raise FileNotFoundError(
                "this machine has no PostgreSQL server: neither the path nor /usr/lib/postgresql has initdb; "
                "install it (Debian: apt-get install postgresql)"
            )
        self._binaries = binaries
        self._settings = _SETTINGS | dict(settings or {})
        self._user = _find_user()
        self._server: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._numbers = count(1)
        self.folder = Path()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        if self._server is None:
            raise RuntimeError("the cluster has no server now; enter its block, or start it")
        return self._server.pid

    def __enter__(self) -> Self:
        # In the system's own folder of temporary files, since a socket's path has 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="spindel-postgres-", dir="/tmp"))
        try:
            if self._user is not None:
                os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
            self._keeper = subprocess.Popen(  # noqa: S603  our own text and folder
                ["/bin/sh", "-c", _KEEPER, "sh", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
            self._initialise()
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._remove()

    def dsn(self, database: str = "postgres", *, user: str = _SUPERUSER) -> str:
        """Give the address of a database of this server."""
        return f"postgresql:///{database}?host={self.folder}&user={user}"

    def create_database(self, template: str | None = None) -> str:
        """Make a new database and give its address.

        Args:
            template: the address of a database to copy, which nobody may be connected to.
        """
        name = f"spindel_{next(self._numbers)}"
        # Of files that are copied on the spot: two thirds of the time of copying by way of the journal.
        copied = "" if template is None else f' TEMPLATE "{_database_of(template)}" STRATEGY FILE_COPY'
        self.run_sql(f'CREATE DATABASE "{name}"{copied}')
        return self.dsn(name)

    def drop_database(self, dsn: str) -> None:
        """Remove a database that `create_database` made, with whatever is still connected to it."""
        self.run_sql(f'DROP DATABASE "{_database_of(dsn)}" WITH (FORCE)')

    def run_sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement as superuser, outside any transaction, and give its rows."""
        import psycopg  # noqa: PLC0415  of an extra; the other tools for tests don't need it

        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description is not None else []

    def start(self) -> None:
        """Start the server again after `stop` or `kill`, and wait until it takes connections.

        Raises:
            RuntimeError: it didn't; the message has the end of its log.
        """
        options = [text for name, value in self._settings.items() for text in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._server = self._run_as_user("postgres", "-D", self._data, "-k", self.folder, *options, log=log)
        waited = 0.0
        while not self._is_ready():
            try:
                # Both the pause and the news that there is nothing to wait for any more.
                self._server.wait(_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                waited += _LOOK_SECONDS
                if waited < _START_SECONDS:
                    continue
            raise RuntimeError(f"the PostgreSQL server did not start:\n{self._read_log()}")

    def stop(self) -> None:
        """Stop the server in order: what is connected is cut off, what was committed is written."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kill the server and each of its processes, as a crash does: they end without a word, and are gone then.

        Where the system has no `pidfd_open` (it is Linux's), the processes end by themselves once their server is gone.
        """
        with ExitStack() as stack:
            # Handles, since a pid may be somebody else's by the time it is signalled. What the server starts after this
            # look ends by itself.
            children = [stack.enter_context(handle) for handle in _open_children(self.pid)]
            self._end(signal.SIGKILL)
            for child in children:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child.fileno(), signal.SIGKILL)
            for child in children:
                # Readable when it has ended. Before, the next server would find the memory of this one in use.
                select.select([child], [], [], _STOP_SECONDS)

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _initialise(self) -> None:
        with (self.folder / "log").open("ab") as log:
            made = self._run_as_user(
                "initdb", "-D", self._data, "-U", _SUPERUSER, "-E", "UTF8", "--locale=C", "--auth=trust",
                "--no-sync", "--no-instructions", log=log,
            )  # fmt: skip
            code = made.wait()
        if code:
            raise RuntimeError(f"initdb failed ({code}):\n{self._read_log()}")

    def _run_as_user(self, program: str, *arguments: str | Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        user = self._user
        return subprocess.Popen(  # noqa: S603  programs that were found here
            [self._binaries / program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
            # Ctrl-C in a terminal is for the tests, which then end the server in order.
            start_new_session=True,
            cwd="/",
            env={"PATH": os.defpath, "LC_ALL": "C"},
        )

    def _is_ready(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        # After a kill the file of the server before is still there.
        mine = bool(lines) and lines[0] == str(self.pid)
        return mine and len(lines) > _READY_LINE and lines[_READY_LINE].strip() == "ready"

    def _read_log(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-20:])

    def _end(self, number: int) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(number)
            server.wait(_STOP_SECONDS)

    def _remove(self) -> None:
        self._end(signal.SIGQUIT)
        # A killed one's file would have the keeper signal whoever has the pid by now.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait(_STOP_SECONDS)


def _database_of(dsn: str) -> str:
    return dsn.partition("?")[0].rpartition("/")[2]


def _open_children(pid: int) -> Iterator[IO[bytes]]:
    """Give a handle of each process that this one has started and that still runs."""
    if not hasattr(os, "pidfd_open"):
        return
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                yield os.fdopen(os.pidfd_open(int(stat.parent.name)), "rb", buffering=0)


def _find_user() -> pwd.struct_passwd | None:
    """Give the user that the server runs as, None for this one."""
    if os.geteuid():
        return None
    for name in (_SUPERUSER, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody")
