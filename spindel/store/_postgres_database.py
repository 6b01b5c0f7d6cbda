"""A PostgreSQL database as a store's lanes use it: its sessions, opened again when they were lost, and its questions.

Everything here blocks; each object is used in one lane. Only a read can be stopped, from the loop: by libpq's cancel,
which is a connection of its own, in a thread of its own. Such a cancel may arrive when its question is answered
already and the next one is asked. So a session that a cancel was sent to isn't used again.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import psycopg

from spindel.errors import SchemaError
from spindel.store._backend import UnavailableError
from spindel.store._check import CheckReport, check_source
from spindel.store._migrations import collect_migrations
from spindel.store._postgres_backend import PostgresBackend
from spindel.store._postgres_check import CheckedDatabase
from spindel.store._postgres_connection import open_session, postgres_errors, read_address
from spindel.store._postgres_hints import RoomHints
from spindel.store._postgres_ownership import RoomLocks
from spindel.store._postgres_reads import PostgresReader
from spindel.store._postgres_schema import bring_forward, recognise_database
from spindel.store._served import ReadStoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spindel.clock import WallClock
    from spindel.store._contract import StorePart
    from spindel.store._postgres_connection import Session
    from spindel.store._served import Reader

__all__ = ["Database"]

R = TypeVar("R", bound="_Asked")
T = TypeVar("T")


class _Asked(Protocol):
    """Something that is asked by way of a session of its own."""

    @property
    def session(self) -> Session:
        """By which it reads."""
        ...

    def close(self) -> None:
        """Give the session up."""
        ...


class _Question(Generic[R, T]):
    """One read, which can be stopped from the loop while it is asked in a lane.

    Args:
        ask: what is asked.
    """

    __slots__ = ("_ask", "_canceller", "_lock", "_session", "_stopped")

    def __init__(self, ask: Callable[[R], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._stopped = False
        self._canceller: threading.Thread | None = None

    def stop(self) -> None:
        """End it soon. Never waits."""
        with self._lock:
            self._stopped = True
            if self._session is not None:
                self._canceller = threading.Thread(target=_cancel, args=(self._session,), daemon=True)
                self._canceller.start()

    def go_on(self) -> None:
        """Let it end between two of its statements, too.

        Raises:
            ReadStoppedError: it was stopped.
        """
        if self._stopped:
            raise ReadStoppedError

    def put(self, asked: R) -> T:
        """Ask it.

        Raises:
            ReadStoppedError: it was stopped.
            psycopg.Error: the server can't answer.
        """
        with self._lock:
            self.go_on()
            self._session = asked.session
        try:
            return self._ask(asked)
        except psycopg.errors.QueryCanceled as problem:
            if self._stopped:
                raise ReadStoppedError from problem
            raise
        finally:
            with self._lock:
                self._session = None
            if self._canceller is not None:
                self._canceller.join()
                asked.close()


def _cancel(session: Session) -> None:
    # If the server can't be reached, the read ends by that, too.
    with suppress(psycopg.Error):
        session.cancel_safe()


class Database:
    """See the module.

    Args:
        dsn: its address, which may hold a password.
        parts: what layers keep there.
        wall_clock: dates migrations.

    Raises:
        SchemaError: the address is none.
        InvalidRecordError: a part has nothing for PostgreSQL.
    """

    __slots__ = ("_address", "_migrations", "_parts", "_reader", "_wall_clock", "backend", "locks")

    def __init__(self, dsn: str, parts: Sequence[StorePart], wall_clock: WallClock) -> None:
        self._address = read_address(dsn)
        self._migrations = collect_migrations(parts, "postgres")
        self._wall_clock = wall_clock
        self._reader: PostgresReader | None = None
        self.backend = PostgresBackend(parts, self._connect_writer)
        self.locks = RoomLocks(lambda: open_session(self._address))

    @property
    def place(self) -> str:
        """Its name in messages."""
        return self._address.place

    def open_writer(self) -> None:
        """Bring it forward and open the writer's session.

        Raises:
            SchemaError: it can't be reached, isn't ours, or is newer.
        """
        try:
            self.backend.connect()
        except UnavailableError as problem:
            if isinstance(problem.__cause__, SchemaError):
                raise problem.__cause__ from problem
            raise SchemaError(self.place, str(problem)) from problem

    def open_locks(self) -> None:
        """Open the session of the locks.

        Raises:
            SchemaError: the server can't be reached any more.
        """
        try:
            self.locks.renew({})
        except UnavailableError as problem:
            raise SchemaError(self.place, str(problem)) from problem

    def open_reader(self) -> None:
        """Open the reader's session.

        Raises:
            SchemaError: as above, or no room was ever opened in it.
        """
        with postgres_errors(self.place):
            self._reader = self._connect_reader()

    def prepare_question(self, question: Callable[[Reader], T]) -> tuple[Callable[[], T], Callable[[], None]]:
        """Give what asks the reader, in its lane, and what stops that, from the loop.

        It is asked once more, on another session, if the one there was is gone.
        """
        asked = _Question[PostgresReader, T](question)

        def ask() -> T:
            with postgres_errors(self.place):
                reader = self._reader
                if reader is not None and not reader.session.closed:
                    try:
                        return asked.put(reader)
                    except psycopg.OperationalError:
                        if not reader.session.closed:
                            raise
                self._reader = self._connect_reader()
                return asked.put(self._reader)

        return ask, asked.stop

    def prepare_check(
        self, progress: Callable[[int, int], object]
    ) -> tuple[Callable[[], CheckReport], Callable[[], None]]:
        """Give what checks the database, on a session of its own, and what stops that, from the loop."""

        def report(done: int, total: int) -> None:
            asked.go_on()
            progress(done, total)

        asked = _Question[CheckedDatabase, CheckReport](lambda checked: check_source(checked, report))

        def check() -> CheckReport:
            with postgres_errors(self.place):
                checked = CheckedDatabase(open_session(self._address), self.place, self._migrations)
                try:
                    return asked.put(checked)
                finally:
                    checked.close()

        return check, asked.stop

    def make_hints(self) -> RoomHints:
        """Give what listens for hints, on a session of its own, which isn't open yet."""
        return RoomHints(lambda: open_session(self._address))

    def close_reader(self) -> None:
        """Give up the reader's session."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _connect_writer(self) -> Session:
        session = open_session(self._address)
        try:
            # Each time: after a fail-over or a restore it may be another database.
            bring_forward(session, self.place, self._migrations, self._wall_clock)
        except BaseException:
            session.close()
            raise
        return session

    def _connect_reader(self) -> PostgresReader:
        session = open_session(self._address)
        try:
            session.execute("SET default_transaction_read_only = on")
            empty = not recognise_database(session, self.place, self._migrations)
            if not empty:
                return PostgresReader(session)
        except BaseException:
            session.close()
            raise
        session.close()
        raise SchemaError(self.place, "it is empty: no room was ever opened in it")
