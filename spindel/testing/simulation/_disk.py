"""What outlives a program's process: the disk, which is a memory store's object or a SQLite file under a virtual disk.

A disk gives the store for one life of the program, and takes a crash: what was acknowledged stays, what was on its way
may stay or not. The room's lock isn't taken, since a dead process holds none and a simulation has one owner at a time.
"""

from __future__ import annotations

import shutil
from collections import deque
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import trio

from spindel.store import MemoryStore, SqliteStore
from spindel.store._claims import ClaimRoom, LeaveRoom
from spindel.testing.powerloss import PowerLossVFS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from random import Random  # noqa: TID251  for annotations

    from spindel.clock import WallClock
    from spindel.store import Lane, RoomClaim, Store, StorePart
    from spindel.testing.simulation._plan import StoreKind

__all__ = ["Disk", "make_disk"]

T = TypeVar("T")

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  a folder of the run's own is made in it


class Disk(Protocol):
    """See the module."""

    def open(
        self, wall_clock: WallClock, pause: Callable[[], Awaitable[None]], die: Callable[[], None]
    ) -> AbstractAsyncContextManager[Store]:
        """Open the store for one life of the program.

        Args:
            wall_clock: dates what the store itself records.
            pause: takes as long as a hop to another thread.
            die: called when the power has failed in the middle of the disk's own work.
        """
        ...

    def cut_power(self, n: int) -> bool:
        """Let the power fail in the n-th operation of the disk from now; False if this kind of disk has none."""
        ...

    def crash(self, random: Random, *, power: bool) -> None:
        """The process has died, maybe with the power; called after its loop was dropped."""
        ...

    def close(self) -> None:
        """Take everything away."""
        ...


def make_disk(kind: StoreKind, parts: tuple[StorePart, ...] = ()) -> Disk:
    """Make an empty disk."""
    return _MemoryDisk(parts) if kind == "memory" else _SqliteDisk(parts)


class _MemoryDisk:
    """A memory store that outlives its process: each of its writes is one turn, so a crash is before or after it."""

    def __init__(self, parts: tuple[StorePart, ...]) -> None:
        self._store = MemoryStore(parts)

    def open(
        self,
        wall_clock: WallClock,  # noqa: ARG002  rows are dated by the room
        pause: Callable[[], Awaitable[None]],  # noqa: ARG002  nothing to wait for
        die: Callable[[], None],  # noqa: ARG002  nothing to be in the middle of
    ) -> AbstractAsyncContextManager[Store]:
        return self._store

    def cut_power(self, n: int) -> bool:  # noqa: ARG002  a turn is one operation
        return False

    def crash(self, random: Random, *, power: bool) -> None:  # noqa: ARG002  nothing unsynced to lose
        for room in self._store._rooms.values():
            room.owned = False

    def close(self) -> None:
        pass


class _SqliteDisk:
    """A file under a virtual disk, in a folder that another one follows after a power loss."""

    def __init__(self, parts: tuple[StorePart, ...]) -> None:
        self._parts = parts
        self._home = Path(
            mkdtemp(prefix="spindel-simulation-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
        )
        self._folder = self._home / "0"
        self._folder.mkdir()
        self._vfs: PowerLossVFS | None = None
        self._store: _LocklessStore | None = None

    @asynccontextmanager
    async def open(
        self, wall_clock: WallClock, pause: Callable[[], Awaitable[None]], die: Callable[[], None]
    ) -> AsyncGenerator[Store]:
        vfs = self._vfs = PowerLossVFS()
        self._store = _LocklessStore(
            self._folder / "runs.db",
            executor=_HoppingExecutor(pause, lambda: None if vfs.powered else die()),
            parts=self._parts,
            vfs=vfs.name,
            wall_clock=wall_clock,
        )
        async with self._store as store:
            yield store

    def cut_power(self, n: int) -> bool:
        assert self._vfs is not None, "only what was opened loses its power"
        self._vfs.cut_power(n)
        return True

    def crash(self, random: Random, *, power: bool) -> None:
        assert self._vfs is not None, "only what was opened crashes"
        assert self._store is not None, "as above"
        # From here on nothing reaches the files, so what closing would do to them is not done.
        self._vfs.powered = False
        self._store.drop()
        if power:
            survivors = self._home / str(int(self._folder.name) + 1)
            survivors.mkdir()
            self._vfs.write_survivors(survivors, random.getrandbits(32))
            self._folder = survivors

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)


class _LocklessStore(SqliteStore):
    """A `SqliteStore` whose rooms are claimed in their rows only, and that can be dropped as a dead process drops it."""

    __slots__ = ()

    @asynccontextmanager
    async def claim_room(self, claim: RoomClaim) -> AsyncGenerator[int, None]:
        writer = self._for_writing()
        await trio.lowlevel.checkpoint_if_cancelled()
        epoch: int = await writer.write(
            ClaimRoom(room=claim.name, incarnation=claim.incarnation, owner="{}", at=claim.at)
        )
        try:
            yield epoch
        finally:
            at = claim.at if claim.wall_clock is None else claim.wall_clock.now_micros()
            await writer.write(LeaveRoom(room=claim.name, epoch=epoch, at=at))  # noqa: ASYNC102  it can't be cancelled

    def drop(self) -> None:
        """Close what the system closes for a dead process."""
        if self._writer is not None:
            self._backend.close()
        if self._reader is not None:
            self._reader.close()


class _HoppingExecutor:
    """Lanes as threads would be, without threads: work takes a while, then its result takes a while."""

    def __init__(self, pause: Callable[[], Awaitable[None]], check_power: Callable[[], None]) -> None:
        self._pause = pause
        self._check_power = check_power

    def open_lane(self, name: str) -> Lane:
        return _HoppingLane(name, self._pause, self._check_power)


class _HoppingLane:
    def __init__(self, name: str, pause: Callable[[], Awaitable[None]], check_power: Callable[[], None]) -> None:
        self._name = name
        self._pause = pause
        self._check_power = check_power
        self._queue: deque[tuple[Callable[[], Any], Callable[[Any], object]]] = deque()
        self._busy = False

    def submit(self, work: Callable[[], T], deliver: Callable[[T], object]) -> None:
        self._queue.append((work, deliver))
        if not self._busy:
            self._busy = True
            trio.lowlevel.spawn_system_task(self._drain, name=f"thread of the {self._name}")

    def close(self) -> None:
        assert not self._busy, "everything submitted was delivered before"

    async def _drain(self) -> None:
        while self._queue:
            work, deliver = self._queue.popleft()
            await self._pause()
            result = work()
            # Without power nobody hears of it: the loop is dropped at the next checkpoint.
            self._check_power()
            await self._pause()
            deliver(result)
        self._busy = False
