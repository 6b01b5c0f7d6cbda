"""The SQLite store: one file, one writer with group commit, one reader beside it."""

from __future__ import annotations

import os
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, cast

import apsw
import trio

from spindel.clock import SystemClock
from spindel.errors import RoomInUseError, SchemaError, WriteRefusedError, WriteUncertainError
from spindel.store._check import check_file
from spindel.store._connection import find_file, open_for_reading, open_for_writing, schema_errors
from spindel.store._executor import choose_executor, run_in_lane
from spindel.store._migrations import collect_migrations, open_store_file, recognise
from spindel.store._ownership import RoomLock, describe_owner
from spindel.store._records import check_limit, check_room_name
from spindel.store._rules import check_mutation
from spindel.store._sqlite_reads import RunReader
from spindel.store._sqlite_runs import RUNS_PART, ClaimRoom, LeaveRoom
from spindel.store._writer import Writer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
    from types import TracebackType

    from spindel.clock import WallClock
    from spindel.ids import RunId
    from spindel.store._check import CheckReport
    from spindel.store._contract import Confirmation, RoomClaim, StorePart
    from spindel.store._executor import Executor, Lane
    from spindel.store._mutations import Mutation
    from spindel.store._records import RoomRecord, RunPage, RunQuery, RunRecord

__all__ = ["SqliteStore"]

A = TypeVar("A")
T = TypeVar("T")

_UNOWNED: Final = frozenset({ClaimRoom, LeaveRoom})


class SqliteStore:
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
        "_executor",
        "_migrations",
        "_parts",
        "_path",
        "_read_only",
        "_reader",
        "_reader_lane",
        "_vfs",
        "_wall_clock",
        "_writer",
        "_writer_lane",
    )

    durable = True

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
        if not os.fspath(path):
            raise SchemaError("''", "the path is empty; name a file")
        # Fixed now, since the program may change its folder before the file is opened again.
        self._path = str(Path(path).absolute())
        self._executor = choose_executor(executor)
        self._read_only = read_only
        self._parts = (RUNS_PART, *parts)
        self._migrations = collect_migrations(self._parts)
        self._vfs = vfs
        self._wall_clock = SystemClock() if wall_clock is None else wall_clock
        self._reader_lane: Lane | None = None
        self._reader: RunReader | None = None
        self._writer_lane: Lane | None = None
        self._writer: Writer | None = None

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._path

    @property
    def commits(self) -> int:
        """How many batches were committed so far, for measurements of group commit."""
        return 0 if self._writer is None else self._writer.commits

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
                self._writer = Writer(self._writer_lane, self._parts, _UNOWNED, self._connect)
                await run_in_lane(self._writer_lane, self._open_writer, self._writer)
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

    async def write(self, mutation: Mutation[A]) -> A:
        """Apply one mutation.

        Durability: on return it is committed and synced to disk.

        Cancellation: it is checked once before the mutation is queued; afterwards the write can't be cancelled.

        Raises:
            WriteRefusedError: nothing was committed, nothing will be.
            WriteUncertainError: it may have been committed, or may still be; use `confirm`.
            InvalidRecordError: it holds something that no record may hold, or no part knows it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        writer = self._for_writing()
        check_mutation(mutation)
        writer.check_known(mutation)
        return cast("A", await writer.write(mutation))

    async def write_shielded(self, mutation: Mutation[A]) -> A:
        """As `write`, without looking at cancellation at all: for endings, which always happen."""
        writer = self._for_writing()
        check_mutation(mutation)
        writer.check_known(mutation)
        return cast("A", await writer.write(mutation))

    async def write_each(
        self, mutations: Sequence[Mutation[Any]]
    ) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Apply several independent mutations, in order, with one wait for all; errors are given as values.

        Cancellation: none; check before, if it matters.

        Raises:
            InvalidRecordError: as `write`, for any of them; then none was queued.
        """
        writer = self._for_writing()
        for mutation in mutations:
            check_mutation(mutation)
            writer.check_known(mutation)
        return await writer.write_each(mutations)

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Read a mutation's identity back, after everything that was queued before.

        Raises:
            WriteUncertainError: the reading itself failed, or can't be believed yet after a failed commit.
        """
        writer = self._for_writing()
        check_mutation(mutation)
        writer.check_known(mutation)
        return await writer.confirm(mutation)

    async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run with its causes, or None if the room has none of that id."""
        return await self._read(lambda reader: reader.load_run(room, run_id))

    async def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page of Runs.

        Raises:
            InvalidRecordError: the limit is not 1 to 100.
        """
        check_limit(query.limit)
        return await self._read(lambda reader: reader.list_runs(query))

    async def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read all rooms, by name."""
        return await self._read(RunReader.list_rooms)

    async def check(self, progress: Callable[[int, int], object] | None = None) -> CheckReport:
        """Verify every stored invariant, reading only; other processes may use the file meanwhile.

        It has a connection and a thread of its own, so other reads don't wait for it. While it goes on, the journal
        keeps what is written.

        Args:
            progress: called in the loop with how many Runs were read, of how many.

        Cancellation: it ends the check within moments.

        Raises:
            SchemaError: the file can't be read at all.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        token = trio.lowlevel.current_trio_token()
        stop = threading.Event()
        lane = self._executor.open_lane("store check")

        def report(done: int, total: int) -> None:
            if progress is not None:
                token.run_sync_soon(progress, done, total)

        try:
            return await run_in_lane(lane, self._check, stop.is_set, report, stop=stop.set)
        except apsw.InterruptError:
            # Only a cancellation sets it, and that is still to be delivered.
            await trio.lowlevel.checkpoint()  # noqa: ASYNC120  being cancelled is what happened
            raise
        finally:
            lane.close()

    def _check(self, stopped: Callable[[], bool], progress: Callable[[int, int], object]) -> CheckReport:
        with schema_errors(self._path):
            return check_file(self._path, self._vfs, self._migrations, stopped=stopped, progress=progress)

    # -- opening and closing -----------------------------------------------------------------------------------------

    def _connect(self) -> apsw.Connection:
        return open_for_writing(self._path, self._vfs)

    def _open_writer(self, writer: Writer) -> None:
        with schema_errors(self._path):
            writer.open(open_store_file(self._path, self._vfs, self._migrations, self._wall_clock))

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
                await run_in_lane(self._writer_lane, writer.close)
            self._writer_lane.close()
            self._writer_lane = None

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _for_writing(self) -> Writer:
        if self._writer is None:
            if self._read_only:
                raise WriteRefusedError("read-only", detail=f"{self._path} was opened only to be read")
            raise WriteRefusedError("store-closed", detail=f"{self._path} is not open")
        return self._writer

    async def _read(self, question: Callable[[RunReader], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._reader is None or self._reader_lane is None:
            raise RuntimeError(f"the store {self._path} is not open; use it inside `async with store`")
        return await run_in_lane(self._reader_lane, self._ask, self._reader, question)

    def _ask(self, reader: RunReader, question: Callable[[RunReader], T]) -> T:
        with schema_errors(self._path):
            return question(reader)

    async def _read_owner(self, room: str) -> dict[str, Any]:
        """Read who is recorded as owner; empty if that isn't known (yet)."""
        try:
            rooms = await self._read(RunReader.list_rooms)
        except SchemaError:
            return {}
        owners = {record.name: record.owner for record in rooms}
        return dict(owners.get(room) or {})
