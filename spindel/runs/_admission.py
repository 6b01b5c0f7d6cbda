"""Admission: reserve, write the first row, start. It may fail at every step, and nothing is lost or started twice.

    reserve ──> starting ──> admitted ──> ...
       │            │
       │            └─ uncertain row: confirmed once; else held, and from then on only ever fenced
       └─ refused, cancelled or unused: no trace

A reservation registers the child's id before the first await, so a closing room and a sealing parent see either
nothing or an obligation that somebody owns. After the acknowledged row everything else happens in one turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

from spindel.errors import (
    AdmissionError,
    AdmissionRefusedError,
    AdmissionTokenError,
    AdmissionUncertainError,
    DuplicateRunError,
    FamilyCancelledError,
    FamilySealedError,
    ParentNotLiveError,
    RoomAdmissionClosedError,
    RoomOwnershipLostError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.observe import RunCancelRequested, RunStarted
from spindel.runs._entry import Entry, FamilyState
from spindel.runs._execution import run_to_end
from spindel.runs._hosting import host_of
from spindel.runs._options import PLAIN, check_options, check_run_id
from spindel.runs._states import LeasePhase, Publication, RoomState
from spindel.store import AdmitRun, Confirmation, FenceAdmission

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from spindel.ids import LeaseId, RunId
    from spindel.runs._options import Child, Particulars, RunOptions
    from spindel.runs._room import Room
    from spindel.runs._run import Run

__all__ = ["AdmissionToken", "Reservation", "admit", "admit_each", "leave", "reserve"]

# A schedule point at every admission costs as much as the rest of it; none at all lets a loop starve the others.
_SCHEDULE_EVERY: Final = 32
_ADMITTING_CHILDREN: Final = frozenset({RoomState.OPEN, RoomState.SEALED})


@trio.lowlevel.enable_ki_protection
def reserve(room: Room, parent: Entry | None, run_id: RunId | None) -> Entry:
    """Register an admission in its family, in one turn, before any effect.

    Raises:
        AdmissionError: one of its refusals; it leaves no lease, row or event.
    """
    if parent is None:
        if room.state is not RoomState.OPEN:
            raise RoomAdmissionClosedError(room.name, room.state.value)
        family = room.family
    else:
        if room.entries.get(parent.key) is not parent or not parent.live:
            raise ParentNotLiveError(parent.run_id)
        if parent.sealed:
            raise FamilySealedError(parent.run_id)
        if parent.cancel_reason is not None:
            raise FamilyCancelledError(parent.run_id, parent.cancel_reason)
        if room.state not in _ADMITTING_CHILDREN:
            raise RoomAdmissionClosedError(room.name, room.state.value)
        if parent.family is None:
            parent.family = FamilyState()
        family = parent.family
    if run_id is None:
        run_id = room.new_run_id()
    elif check_run_id(run_id).int in room.entries:
        raise DuplicateRunError(run_id)
    entry = Entry(room, parent, family, run_id)
    family.leases[entry.key] = entry
    room.entries[entry.key] = entry
    return entry


@trio.lowlevel.enable_ki_protection
def leave(entry: Entry) -> None:
    """Note that the callback which reserved has exited; an admission that never was goes now."""
    entry.callback_exited = True
    if entry.phase is LeasePhase.RESERVED:
        _drop_unadmitted(entry)
    else:
        entry.release_if_over()


@trio.lowlevel.enable_ki_protection
async def admit(
    entry: Entry, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], options: RunOptions
) -> Run[Any]:
    """Admit a reserved child: its first row, then its task.

    Cancellation: a checkpoint before the row is written (a schedule point every 32nd time without a durable store);
        afterwards the admission is decided whatever happens to the caller.

    Raises:
        AdmissionError: why it was not admitted.
    """
    room = entry.room
    particulars = check_options(options) if options else PLAIN
    room.admissions += 1
    if room.admissions % _SCHEDULE_EVERY:
        await trio.lowlevel.checkpoint_if_cancelled()
    else:
        await trio.lowlevel.checkpoint()
    parent = entry.parent
    if parent is None:
        home = room.nursery
    else:
        host = host_of(parent)
        home = host.children or await host.wait_open()
    if room.state is RoomState.LOST:
        raise RoomOwnershipLostError(room.name, room.epoch)
    admission = entry.admission = _first_row(entry, particulars)
    if room.store is not None:
        entry.phase = LeasePhase.STARTING
        try:
            await room.store.write_shielded(admission)
        except WriteRefusedError as error:
            raise _refused(entry, error) from error
        except WriteUncertainError as error:
            await _resolve_uncertain(entry, admission, error)
    return _start(entry, home, fn, args, particulars)


@trio.lowlevel.enable_ki_protection
async def admit_each(parent: Entry, children: Sequence[Child[Any]]) -> list[Run[Any] | AdmissionError]:
    """Reserve and admit several children in their order, with one wait for all their rows.

    Cancellation: a checkpoint before anything is reserved; then each is decided first.
    """
    await trio.lowlevel.checkpoint()
    room = parent.room
    checked = [check_options(child.options) for child in children]
    entries: list[Entry | AdmissionError] = []
    for child in children:
        try:
            entries.append(reserve(room, parent, child.options.get("run_id")))
        except AdmissionError as error:
            entries.append(error)
    live = [entry for entry in entries if isinstance(entry, Entry)]
    results: dict[int, Run[Any] | AdmissionError] = {}
    try:
        if live:
            host = host_of(parent)
            home = host.children or await host.wait_open()
            ready = iter(zip(children, checked, strict=True))
            written = await _write_rows(room, entries, checked)
            for entry, (child, particulars) in zip(entries, ready, strict=True):
                if not isinstance(entry, Entry):
                    continue
                assert entry.admission is not None
                problem = written.get(entry.key)
                try:
                    if isinstance(problem, WriteRefusedError):
                        raise _refused(entry, problem) from problem
                    if isinstance(problem, WriteUncertainError):
                        await _resolve_uncertain(entry, entry.admission, problem)
                    results[entry.key] = _start(entry, home, child.fn, child.args, particulars)
                except AdmissionError as error:
                    results[entry.key] = error
    finally:
        for entry in live:
            leave(entry)
    return [results[entry.key] if isinstance(entry, Entry) else entry for entry in entries]


async def _write_rows(
    room: Room, entries: Sequence[Entry | AdmissionError], checked: Sequence[Particulars]
) -> dict[int, WriteRefusedError | WriteUncertainError]:
    rows: list[AdmitRun] = []
    written: list[Entry] = []
    for entry, particulars in zip(entries, checked, strict=True):
        if isinstance(entry, Entry):
            entry.admission = _first_row(entry, particulars)
            rows.append(entry.admission)
            written.append(entry)
    if room.store is None:
        return {}
    for entry in written:
        entry.phase = LeasePhase.STARTING
    answers = await room.store.write_each(rows)
    return {
        entry.key: answer
        for entry, answer in zip(written, answers, strict=True)
        if isinstance(answer, (WriteRefusedError, WriteUncertainError))
    }


def _first_row(entry: Entry, particulars: Particulars) -> AdmitRun:
    room = entry.room
    parent = entry.parent
    now = room.now_micros()
    actor = particulars.actor
    if actor is None:
        actor = room.actor if parent is None or parent.admission is None else parent.admission.actor
    return AdmitRun(
        room=room.name,
        epoch=room.epoch,
        incarnation=room.incarnation,
        id=entry.run_id,
        kind=particulars.kind,
        actor=actor,
        parent_id=None if parent is None else parent.run_id,
        trigger_id=particulars.trigger_id,
        provenance=particulars.provenance,
        family_version=entry.family_version,
        created_at=now,
        started_at=now,
    )


def _start(
    entry: Entry, home: trio.Nursery, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], particulars: Particulars
) -> Run[Any]:
    """Pass custody to the child, in one turn: controls first, then task and event."""
    room = entry.room
    entry.fn = fn
    entry.args = args
    entry.home = home
    scope = entry.scope = trio.CancelScope()
    if particulars is not PLAIN:
        entry.on_child_failure = particulars.on_child_failure
        entry.finisher = particulars.finisher
        if particulars.publish is not None:
            entry.publish = particulars.publish
            entry.publication = Publication.PENDING
    entry.phase = LeasePhase.ADMITTED
    entry.live = True
    assert entry.admission is not None
    room.events.emit(RunStarted, entry.run_id, entry.admission.parent_id, entry.admission.kind, entry.admission.actor)
    if entry.cancel_reason is not None:
        # Asked while it was reserved: it starts, so that it ends like every other, and meets the request at once.
        room.events.emit(RunCancelRequested, entry.run_id, entry.cancel_reason)
        scope.cancel()
    run = entry.handle()
    if particulars.context is None:
        home.start_soon(run_to_end, entry, name=fn)
    else:
        particulars.context.copy().run(lambda: home.start_soon(run_to_end, entry, name=fn))
    return run


def _drop_unadmitted(entry: Entry) -> None:
    del entry.room.entries[entry.key]
    entry.end = "finished"
    entry.drop_lease()


def _refused(entry: Entry, error: WriteRefusedError) -> AdmissionError | RoomOwnershipLostError:
    """Map a refused first row; the lease becomes unused, and goes with its callback."""
    room = entry.room
    # Nothing was committed, so nothing is owed.
    entry.phase = LeasePhase.RESERVED
    if error.code == "not-owner":
        room.lose()
        return RoomOwnershipLostError(room.name, room.epoch)
    if error.code in ("run-exists", "terminal-fence"):
        return DuplicateRunError(entry.run_id)
    return AdmissionRefusedError(entry.run_id, error.code, transient=error.transient, detail=error.detail)


async def _resolve_uncertain(entry: Entry, admission: AdmitRun, error: WriteUncertainError) -> None:
    """Look an uncertain first row up, once. Returns if it is stored; else the Run never begins.

    Raises:
        AdmissionError: refused, or still uncertain: then the lease is held.
    """
    room = entry.room
    assert room.store is not None, "only a store is uncertain"
    try:
        confirmation = await room.store.confirm(admission)
    except WriteUncertainError:
        confirmation = Confirmation.ABSENT
    if confirmation is Confirmation.PRESENT:
        return
    if confirmation is Confirmation.CONFLICT:
        raise _refused(entry, WriteRefusedError("terminal-fence")) from error
    if entry.parent is None:
        await _fence_root(entry, admission)
        raise AdmissionUncertainError(entry.run_id, fenced=True) from error
    _hold_starting(entry, error)
    raise AdmissionUncertainError(entry.run_id, entry.lease_id) from error


async def _fence_root(entry: Entry, admission: AdmitRun) -> None:
    """A root Run's uncertain row gets one fence; if that fails too, the room holds it, so that it isn't forgotten."""
    room = entry.room
    assert room.store is not None
    fence = FenceAdmission(admission=admission, error=None, ended_at=room.now_micros())
    try:
        await room.store.write_shielded(fence)
    except WriteRefusedError as error:
        if error.code == "not-owner":
            room.lose()
            entry.phase = LeasePhase.RESERVED
            raise RoomOwnershipLostError(room.name, room.epoch) from error
        _hold_starting(entry, error)
        raise AdmissionUncertainError(entry.run_id) from error
    except WriteUncertainError as error:
        _hold_starting(entry, error)
        raise AdmissionUncertainError(entry.run_id) from error
    entry.phase = LeasePhase.RESERVED


def _hold_starting(entry: Entry, error: BaseException) -> None:
    def resolve(_: str) -> None:
        entry.owner.abandoned = True
        del entry.room.entries[entry.key]
        entry.end = "abandoned"
        entry.returned = True
        entry.release_if_over()

    entry.room.hold(entry, LeasePhase.STARTING.value, error, resolve)


class AdmissionToken:
    """The single-use marker of one reservation. It can't be copied or pickled.

    Attributes:
        run_id: the child's id.
        lease_id: the admission lease's id.
    """

    __slots__ = ("_entry", "_exited", "_parent", "_task", "_uses")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._parent = entry.parent
        self._task = trio.lowlevel.current_task()
        # One element; taking it is a compare-and-set that holds between threads.
        self._uses = [None]
        self._exited = False

    @property
    def run_id(self) -> RunId:
        """The child's id."""
        return self._entry.run_id

    @property
    def lease_id(self) -> LeaseId:
        """The admission lease's id."""
        return self._entry.lease_id

    def consume(self, parent: Entry) -> Entry:
        """Use it up.

        Raises:
            AdmissionTokenError: the first that holds of consumed, foreign-parent, foreign-context, expired; foreign
                use consumes nothing.
        """
        if not self._uses:
            raise AdmissionTokenError("consumed", self.run_id)
        if parent is not self._parent:
            raise AdmissionTokenError("foreign-parent", self.run_id)
        try:
            task = trio.lowlevel.current_task()
        except RuntimeError:
            task = None
        if task is not self._task:
            raise AdmissionTokenError("foreign-context", self.run_id)
        if self._exited:
            raise AdmissionTokenError("expired", self.run_id)
        try:
            self._uses.pop()
        except IndexError:
            raise AdmissionTokenError("consumed", self.run_id) from None
        return self._entry

    def expire(self) -> None:
        """Note that its block was left."""
        self._exited = True

    def __copy__(self) -> AdmissionToken:
        raise TypeError("an admission token can't be copied")

    def __deepcopy__(self, memo: object) -> AdmissionToken:
        raise TypeError("an admission token can't be copied")

    def __reduce__(self) -> str:
        raise TypeError("an admission token can't be pickled")


class Reservation:
    """The block of `Run.reserve`: it reserves on entry, and its exit is the callback exit of the lease."""

    __slots__ = ("_parent", "_run_id", "_token")

    def __init__(self, parent: Entry, run_id: RunId | None) -> None:
        self._parent = parent
        self._run_id = run_id
        self._token: AdmissionToken | None = None

    def __enter__(self) -> AdmissionToken:
        task = trio.lowlevel.current_task()
        entry = reserve(self._parent.room, self._parent, self._run_id)
        if entry.owner.blocks is None:
            entry.owner.blocks = []
        entry.owner.blocks.append(task)
        entry.reserved_by = task
        token = self._token = AdmissionToken(entry)
        return token

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        token = self._token
        assert token is not None, "left without having been entered"
        entry = token._entry
        token.expire()
        blocks = entry.owner.blocks
        assert blocks is not None
        blocks.remove(token._task)
        leave(entry)
