"""Databases for one test after another: emptied instead of made anew, which takes a third of the time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from spindel.clock import SystemClock
from spindel.store._postgres_connection import open_session, read_address
from spindel.store._postgres_database import Database
from spindel.store._postgres_schema import list_objects
from spindel.store._runs_part import RUNS_PART

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from spindel.store._postgres_connection import Session
    from spindel.testing.postgres import PostgresCluster

__all__ = ["DatabasePool"]

_BYTES_MAX: Final = 1 << 20

# The triggers that keep rows don't fire for a replica, which only a superuser can pretend to be.
_EMPTY: Final = """\
SET session_replication_role = replica;
DELETE FROM spindel.run_causes; DELETE FROM spindel.runs; DELETE FROM spindel.rooms;
RESET session_replication_role;
"""


class DatabasePool:
    """Lends databases of a cluster. One that comes back is used again if a test changed nothing but rows in it."""

    def __init__(self, cluster: PostgresCluster) -> None:
        self._cluster = cluster
        self._template = cluster.create_database()
        database = Database(self._template, (RUNS_PART,), SystemClock())
        database.open_writer()
        database.backend.close()
        with open_session(read_address(self._template)) as session:
            self._expected = list_objects(session)
        self._free: list[str] = []

    def take(self) -> str:
        """Give the address of an empty database with the tables of this version."""
        return self._free.pop() if self._free else self._cluster.create_database(self._template)

    @contextmanager
    def lend(self) -> Generator[Callable[[], str]]:
        """Give what takes one database after another, each of them until the next one is taken."""
        lent: list[str] = []

        def another() -> str:
            while lent:
                self.give_back(lent.pop())
            lent.append(self.take())
            return lent[0]

        try:
            yield another
        finally:
            while lent:
                self.give_back(lent.pop())

    def give_back(self, dsn: str) -> None:
        """Take it back, with whatever is still connected to it cut off."""
        with open_session(read_address(dsn)) as session:
            session.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            reusable = list_objects(session) == self._expected and _is_small(session)
            if reusable:
                session.execute(_EMPTY.encode())
        if reusable:
            self._free.append(dsn)
        else:
            self._cluster.drop_database(dsn)


def _is_small(session: Session) -> bool:
    # Deleted rows stay in the file; where there were many, a new database is quicker than cleaning up.
    row = session.execute("SELECT pg_total_relation_size('spindel.runs')").fetchone()
    return row is not None and row[0] <= _BYTES_MAX
