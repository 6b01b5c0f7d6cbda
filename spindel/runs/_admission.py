"""Admission: reserve, write the first row, start. It may fail at every step, and nothing is lost or started twice.

    reserve ──> prepare ──> starting ──> admitted ──> ...
       │           │            │
       │           │            └─ uncertain row: confirmed once; else held, and from then on only ever fenced
       │           └─ failed: fenced, disposed, projected at once; what fails of that is held
       └─ refused, cancelled or unused: no trace

A reservation registers the child's id before the first await, so a closing room and a sealing parent see either
nothing or an obligation that somebody owns. After the acknowledged row everything else happens in one turn.
"""

from __future__ import annotations

import functools
import logging
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import trio

from spindel.errors import (
    AdmissionError,
    AdmissionRefusedError,
    AdmissionUncertainError,
    DuplicateRunError,
    FamilyCancelledError,
    FamilySealedError,
    InvalidRecordError,
    NotConstructedError,
    ParentNotLiveError,
    PreparationError,
    RoomAdmissionClosedError,
    WriteRefusedError,
)
from spindel.observe import RunCancelRequested, RunStarted
from spindel.runs._entry import Entry, FamilyState
from spindel.runs._execution import run_to_end
from spindel.runs._frontier import reserving
from spindel.runs._holds import code_of
from spindel.runs._hosting import host_of
from spindel.runs._options import PLAIN, check_body, check_options, check_run_id
from spindel.runs._outcome import error_text, without_cancelled
from spindel.runs._pool import LaunchGivenUpError
from spindel.runs._preparation import Acquisition, Custody
from spindel.runs._states import LeasePhase, Publication, RoomState
from spindel.runs._undoing import UndisposedError, hold_admission, undo_at_once
from spindel.store import JOB_VERSION, AdmitRun, Confirmation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from spindel.ids import RunId
    from spindel.runs._options import Child, Particulars, RunOptions
    from spindel.runs._preparation import Preparation
    from spindel.runs._room import Room
    from spindel.runs._run import Run
    from spindel.store import JobIdentity

__all__ = ["admit", "admit_each", "leave", "reserve"]

_log: Final = logging.getLogger("spindel.runs")
# A schedule point at every admission costs as much as the rest of it; none at all lets a loop starve the others. A write
# to a disk is one in itself, and a second one would take its Run out of step with those that are written beside it.
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
            parent.family = FamilyState(parent)
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
        entry.finish_unadmitted("finished")
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
    check_body(fn)
    particulars = check_options(options) if options else PLAIN
    room.admissions += 1
    if room.admissions % _SCHEDULE_EVERY or (room.store is not None and room.store.durable):
        await trio.lowlevel.checkpoint_if_cancelled()
    else:
        await trio.lowlevel.checkpoint()
    home = await _home_of(entry.parent, room)
    if particulars.prepare is not None:
        await _construct(entry, particulars, particulars.prepare)
    row = _issue(entry, particulars)
    if room.store is not None:
        try:
            await room.store.write_shielded(row)
        except Exception as error:  # noqa: BLE001  every answer of a store but success is told apart below
            await _judge(entry, error)
    return _start(entry, home, fn, args, particulars)


@trio.lowlevel.enable_ki_protection
async def admit_each(parent: Entry, children: Sequence[Child[Any]]) -> list[Run[Any] | AdmissionError]:
    """Reserve and admit several children in their order, with one wait for all their rows.

    Cancellation: a checkpoint before anything is reserved; then each is decided first.
    """
    for child in children:
        check_body(child.fn)
    checked = [check_options(child.options) for child in children]
    await trio.lowlevel.checkpoint()
    room = parent.room
    results: list[Any] = []
    for child in children:
        try:
            results.append(reserve(room, parent, child.options.get("run_id")))
        except AdmissionError as error:
            results.append(error)
    reserved = [entry for entry in results if isinstance(entry, Entry)]
    cancelled: BaseException | None = None
    try:
        if reserved:
            home = await _home_of(parent, room)
            cancelled = await _construct_each(results, checked)
            await _write_each(room, results, checked)
            for index, (child, particulars) in enumerate(zip(children, checked, strict=True)):
                if isinstance(results[index], Entry):
                    results[index] = _start(results[index], home, child.fn, child.args, particulars)
    finally:
        for entry in reserved:
            leave(entry)
    if cancelled is not None:
        raise cancelled
    return results


async def _construct_each(results: list[Any], checked: Sequence[Particulars]) -> BaseException | None:
    """Prepare in order; a failure takes its child's place. Gives a `Cancelled` that ended it early."""
    cancelled: BaseException | None = None
    for index, particulars in enumerate(checked):
        entry = results[index]
        if not isinstance(entry, Entry) or (particulars.prepare is None and cancelled is None):
            continue
        if cancelled is not None:
            # Not begun, so never begun: its lease is unused. Those before are decided below.
            results[index] = FamilyCancelledError(entry.run_id, "cancelled")
            continue
        assert particulars.prepare is not None
        try:
            await _construct(entry, particulars, particulars.prepare)
        except AdmissionError as error:
            results[index] = error
        except BaseException as error:  # noqa: ASYNC103, BLE001  raised again once every child is decided
            results[index] = FamilyCancelledError(entry.run_id, "cancelled")
            cancelled = error
    return cancelled


async def _write_each(room: Room, results: list[Any], checked: Sequence[Particulars]) -> None:
    """Write the first rows of all that are still to be admitted; an error takes its child's place."""
    written = [index for index, entry in enumerate(results) if isinstance(entry, Entry)]
    rows = [_issue(results[index], checked[index]) for index in written]
    if room.store is None or not rows:
        return
    try:
        answers = await room.store.write_each(rows)
    except Exception as error:  # noqa: BLE001  told apart for each below
        answers = [error] * len(rows)
    for index, answer in zip(written, answers, strict=True):
        if isinstance(answer, Exception):
            try:
                await _judge(results[index], answer)
            except AdmissionError as error:
                results[index] = error
            except InvalidRecordError as error:
                run_id = results[index].run_id
                results[index] = AdmissionRefusedError(run_id, "invalid-record", detail=str(error))


async def _home_of(parent: Entry | None, room: Room) -> trio.Nursery:
    """Give the nursery for a new Run, opened now if it is the first of its family."""
    if parent is None:
        return room.nursery
    host = host_of(parent)
    return host.children or await host.wait_open()


async def _construct(entry: Entry, particulars: Particulars, preparation: Preparation[Any]) -> None:
    """Let a preparation construct what the Run needs; undo what it began if it fails.

    Raises:
        NotConstructedError: it refused before any effect.
        PreparationError: it failed; what became of its effects is told.
        BaseException: `Cancelled` and the like, after the undoing.
    """
    acquisition = Acquisition()
    custody = entry.custody = Custody(acquisition)
    # Frozen before anything happens: if it fails, the fence carries these very timestamps.
    entry.admission = _first_row(entry, particulars)
    entry.phase = LeasePhase.PREPARING
    try:
        with _inside(entry):
            custody.resource = await preparation.construct(entry.run_id, acquisition)
    except BaseException as error:
        if isinstance(error, NotConstructedError) and not acquisition.owned:
            _make_unused(entry)
            raise
        custody.error = error_text(without_cancelled(error)) or "cancelled"
        first = LeasePhase.DISPOSING if entry.room.store is None else LeasePhase.FENCING
        disposal, held = await _undo(entry, first)  # noqa: ASYNC102  no wait in it can be cancelled
        if not isinstance(error, Exception):
            raise
        raise PreparationError(entry.run_id, entry.lease_id, disposal, held=held) from error  # noqa: ASYNC104  no Cancelled


@contextmanager
def _inside(entry: Entry) -> Generator[None]:
    """Mark that this task is inside the admission: waiting there for the parent, or the lease, could never end."""
    with reserving(entry):
        try:
            yield
        finally:
            assert entry.custody is not None
            assert entry.custody.acquisition is not None
            entry.custody.acquisition.close()


async def _undo(entry: Entry, first: LeasePhase) -> tuple[str | None, bool]:
    """Undo an admission that will never be. Gives its disposal, and whether it is held."""
    problem = await undo_at_once(entry, first)
    owned = entry.custody is not None and entry.custody.owned
    if problem is None:
        _make_unused(entry)
        return ("discarded" if owned else "nothing"), False
    if isinstance(problem, LaunchGivenUpError):
        # The very launch of the cleanup was held, and an operator gave it up: that word counts for the lease, too.
        entry.owner.abandoned = True
        entry.finish_unadmitted("abandoned")
        return None, False
    disposal = problem.code if isinstance(problem, UndisposedError) else None
    # A root Run has no parent that waits for its cleanup, so the error tells and nothing is held, except a fence:
    # an unknown row must not be forgotten.
    if entry.room.state is RoomState.LOST or (entry.parent is None and entry.phase is not LeasePhase.FENCING):
        # Also for a caller who is cancelled, and so never sees the error.
        _log.error(
            "what was prepared for run %s is not known to be gone (%s)",
            entry.run_id,
            code_of(problem),
            extra={"run_id": str(entry.run_id)},
        )
        _make_unused(entry)
        return disposal, False
    hold_admission(entry, problem)
    return disposal, True


def _issue(entry: Entry, particulars: Particulars) -> AdmitRun:
    """Freeze the first row; from here on nobody may conclude from its absence that it was not written."""
    if entry.admission is None:
        entry.admission = _first_row(entry, particulars)
    else:
        entry.admission = msgspec.structs.replace(entry.admission, started_at=entry.room.now_micros())
    entry.phase = LeasePhase.STARTING
    return entry.admission


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
        **_job_columns(particulars),
    )


def _job_columns(particulars: Particulars) -> dict[str, Any]:
    """Give the columns by which a layer above makes the Run a Job, if its finisher has an identity."""
    job: JobIdentity | None = getattr(particulars.finisher, "job", None)
    if job is None:
        return {}
    return {
        "job_version": JOB_VERSION,
        "job_key": job.key,
        "job_offer": job.offer,
        "job_experiment": job.experiment,
    }


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
    name = _task_name(fn)
    if particulars.context is None:
        home.start_soon(run_to_end, entry, name=name)
    else:
        particulars.context.copy().run(lambda: home.start_soon(run_to_end, entry, name=name))
    return run


def _task_name(fn: Any) -> object:
    """Name a body's task without the author's `repr`: the row is stored, so nothing may raise any more."""
    while type(fn) in {functools.partial, types.MethodType}:
        fn = fn.func if type(fn) is functools.partial else fn.__func__
    return fn if type(fn) is types.FunctionType else type(fn).__qualname__


def _make_unused(entry: Entry) -> None:
    """Nothing is owed for this admission any more: it has returned, and the lease goes with its callback."""
    entry.custody = None
    entry.finish_unadmitted("finished")


async def _judge(entry: Entry, error: Exception) -> None:
    """Decide what an unacknowledged first row means. Returns if it is stored after all.

    Raises:
        InvalidRecordError: it could not be a row at all.
        AdmissionError: refused; or uncertain: then the lease of a child is held, and a root Run was fenced.
    """
    room, admission = entry.room, entry.admission
    assert room.store is not None, "only a store answers"
    assert admission is not None, "it was issued"
    if isinstance(error, InvalidRecordError):
        await _refuse(entry, error)
    if isinstance(error, WriteRefusedError):
        await _refuse(entry, _refusal(entry, error))
    try:
        confirmation = await room.store.confirm(admission)
    except Exception:  # noqa: BLE001  whatever a reading raises, it says nothing
        confirmation = Confirmation.ABSENT
    if confirmation is Confirmation.PRESENT:
        return
    if confirmation is Confirmation.CONFLICT:
        await _refuse(entry, DuplicateRunError(entry.run_id))
    if entry.parent is None:
        custody = entry.custody = entry.custody or Custody()
        disposal, held = await _undo(entry, LeasePhase.FENCING)
        lease_id = entry.lease_id if held else None
        raise AdmissionUncertainError(entry.run_id, lease_id, fenced=custody.fenced, disposal=disposal) from error
    hold_admission(entry, error)
    raise AdmissionUncertainError(entry.run_id, entry.lease_id) from error


async def _refuse(entry: Entry, error: Exception) -> NoReturn:
    """End an admission whose row can't be: nothing was committed, so there is nothing to fence, only to dispose."""
    if entry.custody is None:
        _make_unused(entry)
        raise error
    disposal, held = await _undo(entry, LeasePhase.DISPOSING)
    if held or disposal not in ("discarded", "nothing"):
        raise PreparationError(entry.run_id, entry.lease_id, disposal, held=held) from error
    raise error


def _refusal(entry: Entry, error: WriteRefusedError) -> AdmissionError:
    if error.code == "not-owner":
        entry.room.lose()
    elif error.code in ("run-exists", "terminal-fence"):
        return DuplicateRunError(entry.run_id)
    elif error.code == "parent-not-live" and entry.parent is not None:
        return ParentNotLiveError(entry.parent.run_id)
    return AdmissionRefusedError(entry.run_id, error.code, transient=error.transient, detail=error.detail)
