"""Where durable samples store: in files of SQLite, or in a PostgreSQL server that is there for the benchmark only.

Each sample begins with a copy of one prepared database and is told nothing else, so both sides of a comparison, and
both stores, find the same.
"""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from benchmarks._bare_writer import FileSink
from benchmarks._harness import ROOM, count_stored, new_file
from spindel.clock import SystemClock
from spindel.store import PostgresStore, SqliteStore
from spindel.store._backend import Slot
from spindel.store._claims import ClaimRoom
from spindel.store._runs_part import RUNS_PART

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from uuid import UUID

    from benchmarks._bare_writer import Sink
    from benchmarks._harness import Settings
    from spindel.store import Mutation

__all__ = ["Databases", "Files", "PostgresDatabases", "make_file", "postgres_databases"]

# What a server that is to keep its promises is run with; everything else is as for tests.
_DURABLE: Final = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "autovacuum": "on"}


class Databases(Protocol):
    """Lends databases to samples."""

    def lend(self) -> AbstractContextManager[str]:
        """Give the place of a database of its own, which is gone after the block."""
        ...

    def open_store(self, place: str) -> SqliteStore | PostgresStore:
        """Give its store, to be entered."""
        ...

    def open_sink(self, place: str) -> Sink:
        """Open it for the bare writer."""
        ...

    def count_stored(self, place: str) -> Counter[str]:
        """Count the rows by status, all that have the witness of their return, and of their adapter."""
        ...


async def make_file(path: Path) -> None:
    """Make a store's file, as the store makes it."""
    async with SqliteStore(path):
        pass


class Files:
    """Files of SQLite.

    Args:
        settings: with the folder that they are in.
        first: what each of them begins as.
    """

    def __init__(self, settings: Settings, first: Path) -> None:
        self._settings = settings
        self._first = first

    @contextmanager
    def lend(self) -> Iterator[str]:
        """See `Databases`."""
        with new_file(self._settings.folder) as path:
            shutil.copyfile(self._first, path)
            yield str(path)

    def open_store(self, place: str) -> SqliteStore:
        """See `Databases`."""
        return SqliteStore(place)

    def open_sink(self, place: str) -> Sink:
        """See `Databases`."""
        return FileSink(place)

    def count_stored(self, place: str) -> Counter[str]:
        """See `Databases`."""
        return count_stored(place)


class PostgresDatabases:
    """Databases of one server.

    Args:
        cluster: the server.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._first: str = cluster.create_database()
        trio.run(self._make)

    async def _make(self) -> None:
        async with PostgresStore(self._first):
            pass

    @contextmanager
    def lend(self) -> Iterator[str]:
        """See `Databases`."""
        place: str = self._cluster.create_database(self._first)
        # What copying has left for later isn't the sample's to write.
        self._cluster.run_sql("CHECKPOINT")
        try:
            yield place
        finally:
            self._cluster.drop_database(place)

    def open_store(self, place: str) -> PostgresStore:
        """See `Databases`."""
        return PostgresStore(place)

    def open_sink(self, place: str) -> Sink:
        """See `Databases`."""
        return _PostgresSink(place)

    def count_stored(self, place: str) -> Counter[str]:
        """See `Databases`."""
        name = place.partition("?")[0].rpartition("/")[2]
        rows: list[Any] = self._cluster.run_sql("SELECT status, count(*) FROM spindel.runs GROUP BY status", name)
        counts: Counter[str] = Counter(dict(rows))
        ((counts["witnesses"], counts["adapters"]),) = self._cluster.run_sql(
            "SELECT count(family_return_ack), count(job_adapter_cleanup_ack) FROM spindel.runs", name
        )
        return counts


@contextmanager
def postgres_databases() -> Iterator[PostgresDatabases]:
    """Run a server for the block, which syncs each commit to the disk that temporary files are on.

    Raises:
        FileNotFoundError: this machine has no PostgreSQL server.
    """
    from spindel.testing.postgres import PostgresCluster  # noqa: PLC0415  psycopg is of an extra

    with PostgresCluster(settings=_DURABLE) as cluster:
        yield PostgresDatabases(cluster)


class _PostgresSink:
    """A database of PostgreSQL, by the store's own backend: a batch is encoded, applied and committed as there."""

    def __init__(self, dsn: str) -> None:
        from spindel.store._postgres_database import Database  # noqa: PLC0415  psycopg is of an extra

        self._backend = Database(dsn, (RUNS_PART,), SystemClock()).backend
        self._backend.connect()

    def own_room(self, incarnation: UUID, now: int) -> None:
        """See `Sink`."""
        self.commit([ClaimRoom(room=ROOM, incarnation=incarnation, owner="{}", at=now)])

    def prepare(self, mutation: Mutation[Any]) -> Any:
        """See `Sink`: the mutation itself, since a batch is encoded as one."""
        return mutation

    def commit(self, prepared: Sequence[Any]) -> None:
        """See `Sink`."""
        slots = [Slot(mutation, None) for mutation in prepared]
        self._backend.apply(slots)
        self._backend.commit()
        for slot in slots:
            if slot.error is not None:
                raise slot.error

    def close(self) -> None:
        """See `Sink`."""
        self._backend.close()
