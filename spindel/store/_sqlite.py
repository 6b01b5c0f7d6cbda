"""The SQLite store: one file, one writer with group commit, one reader beside it."""

from __future__ import annotations

import os
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

import apsw
import trio

from spindel.clock import SystemClock
from spindel.errors import RoomInUseError, SchemaError, WriteRefusedError, WriteUncertainError
from spindel.store._claims import ClaimRoom, LeaveRoom
from spindel.store._connection import find_file, open_for_reading, open_for_writing, schema_errors
from spindel.store._executor import run_in_lane
from spindel.store._migrations import collect_migrations, open_store_file, recognise
from spindel.store._ownership import RoomLock, describe_owner
from spindel.store._records import check_room_name
from spindel.store._runs_part import RUNS_PART
from spindel.store._served import ServedStore
from spindel.store._sqlite_backend import SqliteBackend
from spindel.store._sqlite_check import check_file
from spindel.store._sqlite_reads import RunReader
from spindel.store._writer import Writer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from types import TracebackType

    from spindel.clock import WallClock
    from spindel.store._check import CheckReport
    from spindel.store._contract import RoomClaim, StorePart
    from spindel.store._executor import Executor, Lane
    from spindel.store._served import Reader

__all__ = ["SqliteStore"]

T = TypeVar("T")

_LOOK_SECONDS: Final = 0.05


class SqliteStore(ServedStore):
    """Durable facts in one SQLite file, shared by any number of rooms and processes; each room has one owner.

    Args:
        path: the file; it is made if it isn't there.
        executor: `thread`, or `inline` to run the blocking work in the loop itself, or an object of your own.
        read_only: only read, also a file of an older version; nothing is created or brought forward.
        parts: what layers above keep here.
        vfs: the name of a registered `apsw.VFS`, for tests of the disk's failures.
        wall_clock: dates what the store itself records; the default is the machine's clock.

    Writes are durable before they are acknowledged (a journal ahead of the file, synced at each commit).

    Raises:
        SchemaError: the path is empty.
    """

    __slots__ = (
        "_backend",
        "_migrations",
        "_parts",
        "_path",
        "_reader",
        "_reader_lane",
        "_vfs",
        "_wall_clock",
        "_writer_lane",
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        executor: Literal["thread", "inline"] | Executor = "thread",
        read_only: bool = False,
        parts: Iterable[StorePart] = (),
        vfs: str | None = None,
        wall_clock: WallClock | None = None,
    ) -> None:
        super().__init__(executor=executor, read_only=read_only)
        if not os.fspath(path):
            raise SchemaError("''", "the path is empty; name a file")
        # Fixed now, since the program may change its folder before the file is opened again.
        self._path = str(Path(path).absolute())
        self._parts = (RUNS_PART, *parts)
        self._migrations = collect_migrations(self._parts, "sqlite")
        self._vfs = vfs
        self._wall_clock = SystemClock() if wall_clock is None else wall_clock
        self._backend = SqliteBackend(self._parts, self._connect)
        self._reader_lane: Lane | None = None
        self._reader: RunReader | None = None
        self._writer_lane: Lane | None = None

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._path

    @property
    def place(self) -> str:
        """The file, as in `path`."""
        return self._path

    async def __aenter__(self) -> Self:
        """Open the file: recognise it, bring it forward, start its writer and its reader.

        Raises:
            SchemaError: no database, newer, foreign, read-only or damaged; it was not changed.
        """
        if self._reader_lane is not None:
            raise RuntimeError(f"the store {self._path} is open already; use another SqliteStore for another block")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._reader_lane = self._executor.open_lane("store reader")
        try:
            if not self._read_only:
                self._writer_lane = self._executor.open_lane("store writer")
                self._writer = Writer(self._writer_lane, self._backend)
                await run_in_lane(self._writer_lane, self._open_writer)
            self._reader = await run_in_lane(self._reader_lane, self._open_reader)
        except BaseException:
            await self._close()  # noqa: ASYNC102  no wait in it can be cancelled
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        """Close the file after everything queued was written; the threads have ended when this returns."""
        await self._close()  # noqa: ASYNC102  as above

    @asynccontextmanager
    async def claim_room(self, claim: RoomClaim) -> AsyncGenerator[int, None]:
        """Own a room for the length of a block; the value is its epoch.

        Durability: the claim is on disk when the block begins, that it was left when the block has ended.

        Raises:
            RoomInUseError: it has a living owner, here or in another process; the error names it.
            WriteRefusedError: the claim could not be stored, or the lock not be made.
            WriteUncertainError: the claim may have been stored; the room is free all the same.
        """
        name = check_room_name(claim.name)
        writer = self._for_writing()
        await trio.lowlevel.checkpoint_if_cancelled()
        with RoomLock(self._path, name) as lock:
            if not lock.held:
                raise RoomInUseError(name, await self._read_owner(name))
            owner = describe_owner(claim.at)
            epoch: int = await writer.write(
                ClaimRoom(room=name, incarnation=claim.incarnation, owner=owner, at=claim.at)
            )
            try:
                yield epoch
            finally:
                at = claim.at if claim.wall_clock is None else claim.wall_clock.now_micros()
                # If this fails the row goes on naming this process as owner. The lock, which rules, is freed anyway.
                with suppress(WriteRefusedError, WriteUncertainError):
                    await writer.write(LeaveRoom(room=name, epoch=epoch, at=at))  # noqa: ASYNC102  as above

    @asynccontextmanager
    async def watch_room(self, room: str) -> AsyncGenerator[Callable[[], Awaitable[None]]]:  # noqa: ARG002  a file tells of none in particular
        """See `ServedStore.watch_room`: a number of the file is asked for, twenty times a second."""
        seen = await self._read_version()

        async def wait_changed() -> None:
            nonlocal seen
            while (found := await self._read_version()) == seen:  # noqa: ASYNC110  a file tells nobody
                await trio.sleep(_LOOK_SECONDS)
            seen = found

        yield wait_changed

    def _prepare_check(
        self, progress: Callable[[int, int], object]
    ) -> tuple[Callable[[], CheckReport], Callable[[], object]]:
        stop = threading.Event()

        def check() -> CheckReport:
            with schema_errors(self._path):
                return check_file(self._path, self._vfs, self._migrations, stopped=stop.is_set, progress=progress)

        return check, stop.set

    # -- opening and closing -----------------------------------------------------------------------------------------

    def _connect(self) -> apsw.Connection:
        return open_for_writing(self._path, self._vfs)

    def _open_writer(self) -> None:
        with schema_errors(self._path):
            self._backend.open(open_store_file(self._path, self._vfs, self._migrations, self._wall_clock))

    def _open_reader(self) -> RunReader:
        with schema_errors(self._path):
            if self._read_only and find_file(self._path) is None:
                raise SchemaError(self._path, "there is no such file; name an existing one")
            connection = open_for_reading(self._path, self._vfs)
            try:
                empty = not recognise(connection, self._path, self._migrations)
                reader = RunReader(connection)
            except BaseException:
                connection.close(True)
                raise
            if empty:
                reader.close()
                raise SchemaError(self._path, "it is empty: no room was ever opened in it")
        return reader

    async def _close(self) -> None:
        # Whoever writes from now on is refused; what was queued before is written.
        writer, self._writer = self._writer, None
        reader, self._reader = self._reader, None
        if self._reader_lane is not None:
            if reader is not None:
                await run_in_lane(self._reader_lane, reader.close)
            self._reader_lane.close()
            self._reader_lane = None
        if self._writer_lane is not None:
            if writer is not None:
                await writer.drain()
                # Last, so that this connection moves the journal into the file and clears it away.
                await run_in_lane(self._writer_lane, self._backend.close)
            self._writer_lane.close()
            self._writer_lane = None

    # -- helpers -----------------------------------------------------------------------------------------------------

    async def _read(self, question: Callable[[Reader], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._reader is None or self._reader_lane is None:
            raise RuntimeError(f"the store {self._path} is not open; use it inside `async with store`")
        return await run_in_lane(self._reader_lane, self._ask, self._reader, question)

    def _ask(self, reader: RunReader, question: Callable[[Reader], T]) -> T:
        with schema_errors(self._path):
            return question(reader)

    async def _read_version(self) -> int:
        reader = self._reader
        assert reader is not None, "what is watched is open"
        return await self._read(lambda _: reader.read_version())

    async def _read_owner(self, room: str) -> dict[str, Any]:
        """Read who is recorded as owner; empty if that isn't known (yet)."""
        try:
            rooms = await self.list_rooms()
        except SchemaError:
            return {}
        owners = {record.name: record.owner for record in rooms}
        return dict(owners.get(room) or {})
