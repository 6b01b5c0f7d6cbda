"""A room: the owner of Runs, for the length of a block.

    async with open_room("runs.db", name="main") as room:
        run = await room.start(work, 42)

| state | root Runs | children of live Runs | entered |
|---|---|---|---|
| OPEN | yes | yes | orphans adopted |
| SEALED | no | yes | the block's body ended normally |
| FENCED | no | only what was reserved before | `close`, the body raised, the scope around it was cancelled |
| CLOSED | no | no | nothing live, leased or held |
| LOST | no | no | a newer owner has the room |

The block's tasks, from outside in: a *watcher*, which is parked, refuses every abort and turns a cancelled scope around
the room into a cancel request to every Run; a *supervisor*, which keeps two shielded nurseries open, the pool's and,
in it, that of the root Runs. The body runs in the caller's own task, unshielded, beside them.

Ctrl-C: everything here and in the tasks of Runs, except the bodies, is protected from a `KeyboardInterrupt` in the
middle, which would tear a lifecycle apart. It reaches a body, or the block where it waits, and nothing between.
"""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple, final

import trio

from spindel.clock import Backoff, SystemClock
from spindel.errors import (
    InvalidRecordError,
    RoomCloseInProgressError,
    RoomCloseRefusedError,
    RoomOwnershipLostError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.ids import IdSource, LeaseId, RunId
from spindel.observe import Emitter, RoomFenced, RoomSealed
from spindel.runs._admission import admit, leave, reserve
from spindel.runs._cancelling import request_cancel
from spindel.runs._entry import FamilyState
from spindel.runs._frontier import check_wait
from spindel.runs._holds import HeldObligation, Holds
from spindel.runs._parking import require_loop, sleep_shielded
from spindel.runs._pool import WorkerPool
from spindel.runs._reader import list_room, opened_store
from spindel.runs._run import Run
from spindel.runs._states import ROOM_NEXT, RoomState
from spindel.runs._watch import RoomSnapshot, RoomWatch, RunSnapshot
from spindel.store import AdoptOrphans, Confirmation, MemoryStore, RoomClaim, check_reason, check_room_name

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from types import TracebackType
    from typing import Unpack
    from uuid import UUID

    from spindel.clock import WallClock
    from spindel.runs._entry import Entry
    from spindel.runs._options import RunOptions
    from spindel.store import Mutation, RunCursor, RunPage, RunRecord, RunStatus, Store

__all__ = ["Room", "open_room"]

A = TypeVar("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_log: Final = logging.getLogger("spindel.runs")
_ORPHANS_A_WRITE: Final = 500
_ADOPT_RETRY: Final = Backoff(0.025, 1.0)
_ADOPT_ATTEMPTS: Final = 6


@final
class Room:
    """See the module. Made by `open_room` only.

    Attributes:
        name: the room's name.
        incarnation: the UUID of this opening.
        durable: True if it has a store; what the store's own `durable` says is another question.
        state: what it admits.
    """

    def __init__(
        self, name: str, store: Store | None, epoch: int, incarnation: UUID, ids: IdSource, wall_clock: WallClock,
        report_seconds: float,
    ) -> None:  # fmt: skip
        self.name = name
        self.incarnation = incarnation
        self.durable = store is not None
        self.state = RoomState.OPEN
        # What follows is for this package; users have no business there.
        self.store = store
        self.epoch = epoch
        self.actor = "local"
        # The control context: what is done for Runs after their work is done in copies of it.
        self.context = copy_context()
        self.entries: dict[int, Entry] = {}
        self.family = FamilyState()
        self.admissions = 0
        # True while a cancel callback is being called.
        self.calling_back = False
        self.nursery: trio.Nursery
        self.pool: WorkerPool
        self._token: trio.lowlevel.TrioToken
        self._ids = ids
        self._wall_clock = wall_clock
        self._last_micros = 0
        self.events = Emitter(self.now_micros)
        self._report_seconds = report_seconds
        self.holds = Holds(self)
        self._idle = trio.Event()
        self.family.joined = self._idle.set
        self._not_open = trio.Event()
        self._closing = False
        self._interrupt: BaseException | None = None
        self._block: trio.CancelScope | None = None

    def __repr__(self) -> str:
        return f"<Room {self.name!r} {self.state.value}, {len(self.entries)} live>"

    # -- everyday ---------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def start(
        self, fn: Callable[[Run[T], *Ts], Awaitable[T]], *args: *Ts, **options: Unpack[RunOptions]
    ) -> Run[T]:
        """Start a root Run: `fn(run, *args)`, owned and joined by the room.

        Durability: on return its row is stored.

        Cancellation: a checkpoint before the row is written. Once it is written the Run is started, also if the
            caller was cancelled meanwhile.

        Raises:
            InvalidRecordError: an option is unknown or holds what no record may hold.
            RoomAdmissionClosedError, DuplicateRunError, AdmissionRefusedError: refused; nothing is left of it.
            NotConstructedError: its preparation refused before any effect.
            PreparationError: its preparation failed, or what was prepared for a refused row is not gone; the Run never
                begins, and the error tells its cleanup.
            AdmissionUncertainError: the row may exist; it tells whether it was fenced. The Run never begins.
        """
        # A cancelled scope around the room has fenced it; whoever is inside that scope is cancelled, not refused.
        await trio.lowlevel.checkpoint_if_cancelled()
        entry = reserve(self, None, options.get("run_id"))
        try:
            return await admit(entry, fn, args, options)
        finally:
            leave(entry)

    def find(self, run_id: RunId) -> Run[Any] | None:
        """Give a live Run of this room, or None."""
        entry = self.entries.get(run_id.int)
        return entry.handle() if entry is not None and entry.live else None

    def live(self) -> tuple[RunSnapshot, ...]:
        """Give the live Runs, in the order of their admission."""
        return tuple(_snapshot(entry) for entry in self.entries.values() if entry.live)

    def cancel_all(self, reason: str = "cancel-requested") -> int:
        """Ask every live Run to stop; root Runs may still be started afterwards.

        Returns:
            How many undecided Runs were asked.

        Raises:
            InvalidRecordError: the reason isn't 1 to 64 of `[a-z0-9-]`.
        """
        require_loop("Room.cancel_all")
        reason = check_reason(reason)
        asked = sum(1 for entry in self.entries.values() if entry.live and entry.verdict is None)
        request_cancel(self.family.leases.values(), reason)
        return asked

    def held(self) -> tuple[HeldObligation, ...]:
        """Give what waits for an operator."""
        return self.holds.facts()

    @asynccontextmanager
    async def watch(self, *, buffer: int = 256) -> AsyncGenerator[RoomWatch]:
        """Watch: a snapshot of the live Runs, then every event after it, without a gap.

        Publishing never waits for a watcher; one that falls more than `buffer` events behind ends.

        Raises:
            InvalidRecordError: the buffer is not at least 1.
        """
        if buffer < 1:
            raise InvalidRecordError("buffer", f"{buffer!r} is not at least 1")
        subscription = self.events.subscribe(buffer)
        snapshot = RoomSnapshot(self.events.sequence, self.live())
        try:
            yield RoomWatch(self.name, snapshot, subscription)
        finally:
            self.events.unsubscribe(subscription)
            subscription.close()

    async def load(self, run_id: RunId) -> RunRecord | None:
        """Read a Run's row with its causes; None if the room has none of that id, or has no store."""
        if self.store is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self.store.load_run(self.name, run_id)

    async def list_runs(
        self,
        *,
        status: RunStatus | None = None,
        parent: RunId | None = None,
        under: RunId | None = None,
        before: RunCursor | None = None,
        limit: int = 20,
    ) -> RunPage:
        """Read a page of rows: newest start first, ids descending among equal starts.

        Args:
            status: only this stored status.
            parent: only direct children of this Run.
            under: only this Run and its structural descendants.
            before: the `next` of the page before.
            limit: 1 to 100.

        Raises:
            InvalidRecordError: the limit or the status is out of range, or the room has no store.
        """
        if self.store is None:
            raise InvalidRecordError("room", f"{self.name!r} has no store, so it keeps no rows to list")
        return await list_room(self.store, self.name, status, parent, under, before, limit)

    async def wait_sealed(self) -> None:
        """Wait until the room is no longer OPEN: for servers that stop taking work then.

        Cancellation: a checkpoint.
        """
        await self._not_open.wait()

    async def close(self, *, grace_seconds: float = 5.0) -> None:
        """Shut the gate, cancel exactly what was admitted or reserved, and wait until it has returned.

        Cancellation: a checkpoint; the fence and the requests stay.

        Args:
            grace_seconds: how long to wait on Trio's clock.

        Raises:
            InvalidRecordError: the grace is negative, or no number.
            RoomCloseRefusedError: Runs or holds remain after the grace. The fence stays; call it again.
            RoomCloseInProgressError: another task is closing it.
            WaitRefusedError: called by a Run of this room, or under a frontier.
            RoomOwnershipLostError: a newer owner has the room.
        """
        if not grace_seconds >= 0:
            raise InvalidRecordError("grace_seconds", f"{grace_seconds!r} is not at least 0")
        check_wait(None, self.family)
        await trio.lowlevel.checkpoint()
        if self.state is RoomState.CLOSED:
            return
        if self._closing:
            raise RoomCloseInProgressError(self.name)
        self._closing = True
        try:
            if self.state is RoomState.FENCED:
                # Whoever closes again reminds those who are still there.
                request_cancel(self.family.leases.values(), "room-closing")
            self.fence("room-closing")
            with trio.move_on_after(grace_seconds):
                await self._idle.wait()
            if self.state is RoomState.LOST:
                raise RoomOwnershipLostError(self.name, self.epoch)
            if not self._idle.is_set():
                remaining = [entry.run_id for entry in self.entries.values()]
                raise RoomCloseRefusedError(self.name, remaining, self.held())
            self._set_closed()
        finally:
            self._closing = False

    # -- for this package -------------------------------------------------------------------------------------------

    def now_micros(self) -> int:
        """Give the wall time; it never goes backwards within a room."""
        now = self._wall_clock.now_micros()
        if now < self._last_micros:
            return self._last_micros
        self._last_micros = now
        return now

    def start_time_at(self, micros: int) -> None:
        """Let no time of this room be earlier."""
        self._last_micros = max(self._last_micros, micros)

    def call_in_loop(self, fn: Callable[..., object], *args: object) -> None:
        """Call `fn(*args)` in the room's loop, from any thread; dropped once the loop has ended."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(fn, *args)

    def next_uuid(self) -> UUID:
        """Give a fresh id."""
        return self._ids.next_uuid()

    def new_run_id(self) -> RunId:
        """Give a fresh Run id."""
        return RunId(self._ids.next_uuid())

    def new_lease_id(self) -> LeaseId:
        """Give a fresh lease id."""
        return LeaseId(self._ids.next_uuid())

    def make_handle(self, entry: Entry) -> Run[Any]:
        """Make the handle of an entry."""
        return Run(entry)

    async def write(self, mutation: Mutation[A]) -> A:
        """Apply a mutation that must happen, not cancellable; if a newer owner has the room, note that.

        Raises:
            WriteRefusedError, WriteUncertainError: as the store says.
            RoomOwnershipLostError: a newer owner has the room.
        """
        assert self.store is not None, "a room without a store writes nothing"
        try:
            return await self.store.write_shielded(mutation)
        except WriteRefusedError as error:
            if error.code == "not-owner":
                self.lose()
                raise RoomOwnershipLostError(self.name, self.epoch) from error
            raise

    @trio.lowlevel.enable_ki_protection
    def fence(self, reason: str) -> None:
        """Shut the gate and ask everything admitted or reserved to stop, in one turn; once."""
        if self.state not in (RoomState.OPEN, RoomState.SEALED):
            return
        self._set_state(RoomState.FENCED)
        self.events.emit(RoomFenced, reason)
        request_cancel(self.family.leases.values(), reason)
        self.family.seal()

    def lose(self) -> None:
        """Note that a newer owner has the room: stop everything, write nothing more."""
        if self.state is RoomState.LOST:
            return
        if self.state is not RoomState.CLOSED:
            self._set_state(RoomState.LOST)
        _log.error("room %r was taken over by a newer owner; its Runs are cancelled", self.name)
        request_cancel(self.family.leases.values(), "room-lost")
        self.family.seal()
        # No recovery can be stored any more, so no hold may keep the block.
        self.call_in_loop(self.holds.abandon)
        self._cancel_block()

    def interrupt(self, error: BaseException) -> None:
        """Take an error that is no `Exception`: stop everything, and raise it from the block after the last return."""
        if self._interrupt is None:
            self._interrupt = error
        self.fence("room-closing")
        self._cancel_block()

    def find_entry(self, run_id: RunId) -> Entry | None:
        """Give the registry entry, live or not: an ended Run's lease may still be owed, as for its publication."""
        return self.entries.get(run_id.int)

    # -- the block --------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def supervise(self, ready: trio.Event, threads_max: int) -> None:
        """Keep the room's nurseries open until everything has returned."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as pool, trio.open_nursery() as runs:
                self._token = trio.lowlevel.current_trio_token()
                self.pool = WorkerPool(self, pool, threads_max)
                self.nursery = runs
                ready.set()
                await self._idle.wait()

    @trio.lowlevel.enable_ki_protection
    async def watch_scope(self, register: Callable[[Callable[[], None]], None]) -> None:
        """Turn a cancelled scope around the room into a cancel request to every Run."""
        task = trio.lowlevel.current_task()

        def aborted(_: object) -> trio.lowlevel.Abort:
            self.fence("room-closing")
            return trio.lowlevel.Abort.FAILED

        register(lambda: trio.lowlevel.reschedule(task))
        await trio.lowlevel.wait_task_rescheduled(aborted)

    def enter_block(self, scope: trio.CancelScope) -> None:
        """Remember the scope around the block's body."""
        self._block = scope

    def body_ended(self, problem: BaseException | None) -> None:
        """Seal after a normal end, fence after any other."""
        if problem is not None:
            self.fence("room-closing")
        elif self.state is RoomState.OPEN:
            self._set_state(RoomState.SEALED)
            self.events.emit(RoomSealed)
            self.family.seal()

    @trio.lowlevel.enable_ki_protection
    async def drain(self) -> BaseException | None:
        """Wait, shielded, until every Run has returned; name holds while they keep the block.

        Returns:
            What met the wait, such as a `KeyboardInterrupt`, or None.
        """
        problem: BaseException | None = None
        while not self._idle.is_set():
            try:
                with trio.CancelScope(shield=True), trio.move_on_after(self._report_seconds):
                    await self._idle.wait()
            except BaseException as error:  # noqa: ASYNC103, BLE001  raised again by the block, after the last return
                problem = problem or error
                self.fence("room-closing")
            if not self._idle.is_set():
                self.holds.report()
        return problem

    def leave_block(self) -> BaseException | None:
        """Close the books; gives what the block must raise before anything else."""
        if self.state is RoomState.LOST:
            self.events.close()
            return self._interrupt or RoomOwnershipLostError(self.name, self.epoch)
        self._set_closed()
        self.events.close()
        return self._interrupt

    def _set_state(self, state: RoomState) -> None:
        assert state in ROOM_NEXT[self.state], f"no way from {self.state} to {state}"
        self.state = state
        self._not_open.set()

    def _set_closed(self) -> None:
        # The last return wakes a closer and the end of the block in one turn, in either order.
        if self.state is not RoomState.CLOSED:
            self._set_state(RoomState.CLOSED)

    def _cancel_block(self) -> None:
        if self._block is not None:
            self._block.cancel()


def open_room(
    store: Store | str | os.PathLike[str] | None = None,
    *,
    name: str,
    durable: bool = True,
    wall_clock: WallClock | None = None,
    report_seconds: float = 60.0,
    threads_max: int = 64,
    ids: IdSource | None = None,
) -> AbstractAsyncContextManager[Room]:
    """Own a room for the length of a block, and wait at its end until every Run has returned.

    Durability: on entry, what an earlier owner left running is stored as `failed`/`orphaned`.

    Cancellation: a scope around the block that is cancelled becomes a cancel request to every Run; it is raised again
        after the last return.

    Args:
        store: an open store; or the path of a SQLite file or the address of a PostgreSQL database
            (`postgresql://user@host/database`), opened and closed by the room; None for a memory store.
        name: 1 to 128 of `[a-z0-9._/-]`.
        durable: False, with no store given, makes a room without any store: no rows, no witnesses, no causes.
        wall_clock: the time of rows and events; the machine's by default.
        report_seconds: how often holds that keep the block are named.
        threads_max: how many native launches run at once.
        ids: the source of ids; by default one on the wall clock with the system's randomness.

    Raises:
        InvalidRecordError: an argument is out of range.
        RoomInUseError: the room has a living owner.
        SchemaError: the file is no database of ours.
        RoomOwnershipLostError: raised by the block when a newer owner took the room.
    """
    name = check_room_name(name)
    if not durable and store is not None:
        raise InvalidRecordError("durable", "False means a room without a store; leave the store out")
    if not report_seconds > 0:
        raise InvalidRecordError("report_seconds", f"{report_seconds!r} is not greater than 0")
    if threads_max < 1:
        raise InvalidRecordError("threads_max", f"{threads_max!r} is not at least 1")
    clock = SystemClock() if wall_clock is None else wall_clock
    source = IdSource(clock.now_micros) if ids is None else ids
    if not durable:
        room = Room(name, None, 0, source.next_uuid(), source, clock, report_seconds)
        return _Protected(_open_block(room, threads_max))
    return _Protected(_open_durable(store, name, clock, source, report_seconds, threads_max))


class _Protected(AbstractAsyncContextManager[Room]):
    """Keeps Ctrl-C out of entering and leaving, `contextlib`'s own frames included.

    Python itself leaves one gap that nobody can close: between the end of the body and the call of `__aexit__`.
    """

    def __init__(self, manager: AbstractAsyncContextManager[Room]) -> None:
        self._manager = manager

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Room:
        return await self._manager.__aenter__()

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        return await self._manager.__aexit__(exc_type, exc, tb)  # noqa: ASYNC102  the wrapped one decides


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _open_durable(
    store: Store | str | os.PathLike[str] | None,
    name: str,
    clock: WallClock,
    ids: IdSource,
    report_seconds: float,
    threads_max: int,
) -> AsyncGenerator[Room]:
    incarnation = ids.next_uuid()
    owned: list[Room] = []

    def lose() -> None:
        # Before the room is made, its first write hears of it.
        for room in owned:
            room.lose()

    claim = RoomClaim(name, incarnation, clock.now_micros(), clock, lose)
    async with (
        opened_store(MemoryStore() if store is None else store) as opened,
        opened.claim_room(claim) as epoch,
    ):
        room = Room(name, opened, epoch, incarnation, ids, clock, report_seconds)
        owned.append(room)
        # A wall clock that was set back since the last opening must not date rows before what is stored.
        room.start_time_at(next((record.opened_at for record in await opened.list_rooms() if record.name == name), 0))
        await _adopt_orphans(room)
        async with _open_block(room, threads_max):
            yield room


async def _adopt_orphans(room: Room) -> None:
    """Fence what earlier incarnations left running, before the gate opens."""
    assert room.store is not None
    delays = _ADOPT_RETRY.delays()
    attempts = 0
    while True:
        mutation = AdoptOrphans(
            room=room.name, epoch=room.epoch, incarnation=room.incarnation, at=room.now_micros(), limit=_ORPHANS_A_WRITE
        )
        try:
            adopted: int = await room.store.write(mutation)
        except (WriteUncertainError, WriteRefusedError) as error:
            # Adopting is a set operation on whatever is still running, so it is its own repeat.
            attempts += 1
            if (isinstance(error, WriteRefusedError) and not error.transient) or attempts >= _ADOPT_ATTEMPTS:
                raise
            await sleep_shielded(next(delays))
            continue
        # A full batch may have been the last one; looking costs less than another write.
        if adopted < _ORPHANS_A_WRITE or await _is_adopted(room.store, mutation):
            return


async def _is_adopted(store: Store, mutation: AdoptOrphans) -> bool:
    try:
        return await store.confirm(mutation) is Confirmation.PRESENT
    except WriteUncertainError:
        return False


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _open_block(room: Room, threads_max: int) -> AsyncGenerator[Room]:
    problem: BaseException | None = None
    released: list[Callable[[], None]] = []
    ready = trio.Event()
    async with trio.open_nursery() as outer:
        outer.start_soon(room.supervise, ready, threads_max, name=f"room {room.name}")
        outer.start_soon(room.watch_scope, released.append, name=f"watcher of room {room.name}")
        # Schedule points instead of waits, here and at the end: a Ctrl-C that met a wait of this nursery would leave
        # as a group, or leave the supervisor waiting for a room that never opened. So it meets the body or the drain.
        while not (ready.is_set() and released):
            await trio.lowlevel.cancel_shielded_checkpoint()
        room.enter_block(outer.cancel_scope)
        try:
            yield room
        except BaseException as error:  # noqa: ASYNC103, BLE001  raised again below, as it is, after the last return
            problem = error
        room.body_ended(problem)
        met = await room.drain()
        problem = problem or met
        released[0]()
        while outer.child_tasks:
            await trio.lowlevel.cancel_shielded_checkpoint()
    first = room.leave_block()
    if first is not None:
        if problem is not None and not isinstance(problem, trio.Cancelled):
            raise first from problem
        raise first
    if problem is not None:
        raise problem
    # A scope around the room that was cancelled while the block only waited is raised again here.
    await trio.lowlevel.checkpoint_if_cancelled()


def _snapshot(entry: Entry) -> RunSnapshot:
    run = entry.handle()
    assert entry.admission is not None, "a live Run keeps its first row"
    return RunSnapshot(
        run.id, run.parent_id, run.kind, run.actor, run.status, run.cancel_reason, entry.admission.started_at
    )
