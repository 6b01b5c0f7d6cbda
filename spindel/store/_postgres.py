"""The PostgreSQL store: rooms of many processes on one database.

Three sessions, each in a thread of its own:

| session | what it does | when it is lost |
|---|---|---|
| writer | batches of mutations, one transaction each | before COMMIT: refused as transient; from COMMIT on: uncertain |
| reader | reads, each a snapshot of its own | the question is asked again on another one |
| locks | idle; holds the advisory lock of every room that this store has claimed | see `_postgres_ownership` |

What overlaps and what doesn't: a batch locks the rows of its rooms, by name, and keeps them until its COMMIT. So the
mutations of one room come one after another, whoever sends them, and a claim comes between two batches, never into one.
Rooms of different owners don't wait for each other.

Share one store among all rooms of a process: each store has three connections.

Nothing of this module needs psycopg until a store is made.
"""

from __future__ import annotations

import logging
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

import attrs
import trio

from spindel.clock import Backoff, SystemClock
from spindel.errors import RoomInUseError, SchemaError, WriteRefusedError, WriteUncertainError
from spindel.store._backend import UnavailableError
from spindel.store._claims import ClaimRoom, LeaveRoom
from spindel.store._executor import run_in_lane
from spindel.store._ownership import describe_owner, owner_lives_here
from spindel.store._records import check_room_name
from spindel.store._runs_part import RUNS_PART
from spindel.store._served import ReadStoppedError, ServedStore
from spindel.store._writer import Writer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from types import TracebackType

    from spindel.clock import WallClock
    from spindel.store._check import CheckReport
    from spindel.store._contract import RoomClaim, StorePart
    from spindel.store._executor import Executor, Lane
    from spindel.store._postgres_database import Database
    from spindel.store._served import Reader

__all__ = ["PostgresStore"]

T = TypeVar("T")

_RENEWAL: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)
_LOOK_SECONDS: Final = 1.0
_log: Final = logging.getLogger("spindel.store")


class PostgresStore(ServedStore):
    """Durable facts in a PostgreSQL database, shared by any number of rooms and processes; each room has one owner.

    Args:
        dsn: the address, `postgresql://user@host:port/database` or in libpq's other form. A password in it reaches no
            message; better is none in it (`PGPASSWORD`, `~/.pgpass`).
        executor: `thread`, or `inline` to run the blocking work in the loop itself, or an object of your own.
        read_only: only read, also a database of an older version, or a standby.
        parts: what layers above keep here.
        wall_clock: dates what the store itself records; the default is the machine's clock.

    Writes are durable before they are acknowledged, as far as the server keeps its promise: `synchronous_commit` is
    turned on where it was off, while `fsync` is the server's own.

    Raises:
        SchemaError: the address is none, or psycopg isn't installed.
        InvalidRecordError: a part has nothing for PostgreSQL.
    """

    __slots__ = (
        "_claims",
        "_database",
        "_lock_lane",
        "_reader_lane",
        "_unwatched",
        "_watching",
        "_writer_lane",
    )

    def __init__(
        self,
        dsn: str,
        *,
        executor: Literal["thread", "inline"] | Executor = "thread",
        read_only: bool = False,
        parts: Iterable[StorePart] = (),
        wall_clock: WallClock | None = None,
    ) -> None:
        super().__init__(executor=executor, read_only=read_only)
        self._database = _load_database(dsn, (RUNS_PART, *parts), SystemClock() if wall_clock is None else wall_clock)
        self._reader_lane: Lane | None = None
        self._writer_lane: Lane | None = None
        self._lock_lane: Lane | None = None
        self._claims: dict[str, _Claimed] = {}
        self._watching = trio.CancelScope()
        self._unwatched: trio.Event | None = None

    @property
    def place(self) -> str:
        """The database's name in messages, which has no password."""
        return self._database.place

    async def __aenter__(self) -> Self:
        """Connect: recognise the database, bring it forward, start the writer and the reader.

        Raises:
            SchemaError: it can't be reached, is newer, foreign, or a standby that is to be written; it was not changed.
        """
        if self._reader_lane is not None:
            raise RuntimeError(f"the store {self.place} is open already; use another PostgresStore for another block")
        await trio.lowlevel.checkpoint_if_cancelled()
        database = self._database
        self._reader_lane = self._executor.open_lane("store reader")
        try:
            if not self._read_only:
                self._writer_lane = self._executor.open_lane("store writer")
                self._lock_lane = self._executor.open_lane("store locks")
                self._writer = Writer(self._writer_lane, database.backend)
                await run_in_lane(self._writer_lane, database.open_writer)
                await run_in_lane(self._lock_lane, database.open_locks)
                self._watching = trio.CancelScope()
                self._unwatched = trio.Event()
                trio.lowlevel.spawn_system_task(
                    self._watch, self._lock_lane, self._unwatched, name="watch of the locks"
                )
            await run_in_lane(self._reader_lane, database.open_reader)
        except BaseException:
            await self._close()  # noqa: ASYNC102  no wait in it can be cancelled
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        """Close the sessions after everything queued was written; the threads have ended when this returns."""
        await self._close()  # noqa: ASYNC102  as above

    @asynccontextmanager
    async def claim_room(self, claim: RoomClaim) -> AsyncGenerator[int, None]:
        """Own a room for the length of a block; the value is its epoch.

        Durability: the claim is on disk when the block begins, that it was left when the block has ended.

        Raises:
            RoomInUseError: it has a living owner, here or in another process; the error names it.
            WriteRefusedError: the claim could not be stored, or the lock not be asked for.
            WriteUncertainError: the claim may have been stored; the room is free all the same.
        """
        name = check_room_name(claim.name)
        writer = self._for_writing()
        lane, locks = self._lock_lane, self._database.locks
        assert lane is not None, "what writes has its locks"
        await trio.lowlevel.checkpoint_if_cancelled()
        taken = await run_in_lane(lane, locks.take, name)
        try:
            recorded = await self._read_owner(name)
            if not taken or owner_lives_here(recorded):
                raise RoomInUseError(name, recorded)
            epoch: int = await writer.write(
                ClaimRoom(room=name, incarnation=claim.incarnation, owner=describe_owner(claim.at), at=claim.at)
            )
            self._claims[name] = _Claimed(epoch, claim)
            try:
                yield epoch
            finally:
                del self._claims[name]
                at = claim.at if claim.wall_clock is None else claim.wall_clock.now_micros()
                # If this fails the row goes on naming this process as owner. The lock, which rules, is freed anyway.
                with suppress(WriteRefusedError, WriteUncertainError):
                    await writer.write(LeaveRoom(room=name, epoch=epoch, at=at))  # noqa: ASYNC102  can't be cancelled
        finally:
            if taken:
                await run_in_lane(lane, locks.release, name)  # noqa: ASYNC102  as above

    @asynccontextmanager
    async def watch_room(self, room: str) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
        """See `ServedStore.watch_room`: one more session listens, and each second it is a second later anyway."""
        await trio.lowlevel.checkpoint_if_cancelled()
        hints = self._database.make_hints()
        lane = self._executor.open_lane("store hints")

        async def wait_changed() -> None:
            with trio.move_on_after(_LOOK_SECONDS):
                while not await run_in_lane(lane, hints.take, room):
                    if not await _wait_readable(hints.watched):
                        await trio.sleep_forever()

        try:
            await run_in_lane(lane, hints.take, room)
            yield wait_changed
        finally:
            await run_in_lane(lane, hints.close)  # noqa: ASYNC102  no wait in it can be cancelled
            lane.close()

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def _close(self) -> None:
        # Whoever writes from now on is refused; what was queued before is written.
        writer, self._writer = self._writer, None
        if self._unwatched is not None:
            self._watching.cancel()
            unwatched, self._unwatched = self._unwatched, None
            with trio.CancelScope(shield=True):
                await unwatched.wait()
        database = self._database
        for lane, close in (
            (self._reader_lane, database.close_reader),
            (self._lock_lane, database.locks.close),
        ):
            if lane is not None:
                await run_in_lane(lane, close)
                lane.close()
        self._reader_lane = self._lock_lane = None
        if self._writer_lane is not None:
            if writer is not None:
                await writer.drain()
            await run_in_lane(self._writer_lane, database.backend.close)
            self._writer_lane.close()
            self._writer_lane = None

    # -- the watch ---------------------------------------------------------------------------------------------------

    async def _watch(self, lane: Lane, ended: trio.Event) -> None:
        """See to the locks whenever their session has news, from opening to closing; a system task."""
        try:
            with self._watching:
                while True:
                    await self._wait_for_news()
                    delays = _RENEWAL.delays()
                    while not await self._renew(lane):  # noqa: ASYNC110  the server tells nobody that it is back
                        await trio.sleep(next(delays))
        except Exception:  # noqa: BLE001  a system task that raises would end the loop
            _log.exception(
                "the watch of the locks of %s broke down; lost rooms are noticed by their writes", self.place
            )
        finally:
            ended.set()

    async def _wait_for_news(self) -> None:
        await _wait_readable(self._database.locks.watched)

    async def _renew(self, lane: Lane) -> bool:
        """Look after all rooms; False if that has to be done again soon."""
        locks, claims = self._database.locks, dict(self._claims)
        try:
            lost = await run_in_lane(lane, locks.renew, {room: claimed.epoch for room, claimed in claims.items()})
        except UnavailableError as problem:
            _log.warning("the locks of %s can't be looked after: %s", self.place, problem)
            return False
        for room in lost:
            claimed = claims[room]
            if self._claims.get(room) is claimed and not claimed.told:
                claimed.told = True
                if claimed.claim.on_lost is not None:
                    claimed.claim.on_lost()
        return not locks.unguarded

    # -- reading -----------------------------------------------------------------------------------------------------

    async def _read(self, question: Callable[[Reader], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._reader_lane is None:
            raise RuntimeError(f"the store {self.place} is not open; use it inside `async with store`")
        ask, stop = self._database.prepare_question(question)
        try:
            return await run_in_lane(self._reader_lane, ask, stop=stop)
        except ReadStoppedError:
            await trio.lowlevel.checkpoint()  # noqa: ASYNC120  being cancelled is what happened
            raise

    def _prepare_check(
        self, progress: Callable[[int, int], object]
    ) -> tuple[Callable[[], CheckReport], Callable[[], object]]:
        return self._database.prepare_check(progress)

    async def _read_owner(self, room: str) -> dict[str, Any]:
        """Read who is recorded as owner; empty if that isn't known (yet)."""
        try:
            rooms = await self.list_rooms()
        except SchemaError:
            return {}
        owners = {record.name: record.owner for record in rooms}
        return dict(owners.get(room) or {})


@attrs.define(eq=False)
class _Claimed:
    epoch: int
    claim: RoomClaim
    told: bool = False


async def _wait_readable(watched: Callable[[], int]) -> bool:
    """Wait until a session has news; False if there is none to wait for."""
    try:
        descriptor = watched()
    except UnavailableError:
        return False
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        trio.lowlevel.notify_closing(descriptor)
        os.close(descriptor)
    return True


def _load_database(dsn: str, parts: tuple[StorePart, ...], wall_clock: WallClock) -> Database:
    try:
        from spindel.store._postgres_database import Database  # noqa: PLC0415  of an extra, and slow to import
    except ImportError as problem:
        raise SchemaError(
            "the PostgreSQL store", f"psycopg can't be imported; install it with `spindel[postgres]` ({problem})"
        ) from problem
    return Database(dsn, parts, wall_clock)
