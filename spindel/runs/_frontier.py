"""Which Run the code belongs to, which exclusive stretches are open, and which waits are refused because of them.

A frontier is an exclusive stretch that may contain a store write. Whoever waits for a Run inside one could wait for
somebody who needs that very stretch, so such waits are refused before they begin, instead of deadlocking.

A frontier belongs to the task that opened it. It also covers tasks in nurseries that the holder opens inside it, since
the holder can't leave before they end, and the threads that it enters. A task that the holder merely starts elsewhere
is not covered: nobody waits for it.

How a thread is known. `trio.from_thread` runs code in the very task that entered the thread, which needs nothing. With
a `trio_token` it runs code in a system task, and what that has in common with the task which entered the thread is the
context alone: so a stretch is noted in its holder's context, and looked for in that of the outermost task. Two things
Trio doesn't tell. A task that the holder started elsewhere has its context, too, and nobody sees it enter a thread: what
that thread waits for by token is refused while the stretch lasts, though it could end. And a task that somebody else
started in a nursery of the holder's doesn't have it: what its thread waits for by token is not refused. `run_native`
looks at the task that calls it, so it gets both right.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio

from spindel.errors import WaitRefusedError
from spindel.store import check_reason

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from spindel.ids import LeaseId
    from spindel.runs._entry import Entry, FamilyState
    from spindel.runs._run import Run

__all__ = [
    "Block",
    "carried_into_a_thread",
    "carry",
    "check_wait",
    "check_wait_lease",
    "current_entry",
    "current_run",
    "enter_run",
    "frontier",
    "held_frontier",
    "is_carrying",
    "reserving",
    "without_frontiers",
]

current_entry: Final[ContextVar[Entry | None]] = ContextVar("spindel run", default=None)

# The entry queue runs callbacks in a task of its own; a coroutine stepped from there has no task to suspend.
_CALLBACK_TASK: Final = "<TrioToken.run_sync_soon task>"


@attrs.define(eq=False)
class _Stretch:
    """What covers a task: its reason, holder, how many nurseries the holder had open, and whether it still lasts."""

    reason: str
    holder: trio.lowlevel.Task
    nurseries: int
    lasts: bool = True


@attrs.define(eq=False)
class Block(_Stretch):
    """The stretch in which a task is inside an admission: its reserve block, or the construction of what it needs."""

    entry: Entry = attrs.field(kw_only=True)


S = TypeVar("S", bound=_Stretch)

_open: Final[trio.lowlevel.RunVar[list[_Stretch]]] = trio.lowlevel.RunVar("spindel frontiers")
# The stretches of a context, outermost first, for the threads that are entered with it.
_carried: Final[ContextVar[tuple[_Stretch, ...]]] = ContextVar("spindel stretches", default=())


def current_run() -> Run[Any] | None:
    """Give the Run whose body, plain task, callback or launch this code is, or None outside every Run."""
    entry = current_entry.get()
    return None if entry is None else entry.handle()


@contextmanager
def frontier(reason: str) -> Generator[None]:
    """Mark an exclusive stretch of a layer above: waits for Runs inside it are refused with this reason.

    That covers the task, those in nurseries that it opens inside, and the threads that these enter, also where they call
    back with a `trio_token`. Of a plain `trio.to_thread.run_sync` Trio then tells the context alone, so a task that was
    merely started from here, elsewhere, and enters one is refused without need, and one that somebody else started in
    a nursery of this task is not refused. `Run.run_native` gets both right.

    Args:
        reason: `[a-z0-9-]{1,64}`, such as `host-line`.

    Raises:
        InvalidRecordError: the reason is none.
        RuntimeError: called outside a Trio task.
    """
    check_reason(reason)
    task = trio.lowlevel.current_task()
    with _listed(_Stretch(reason, task, len(task.child_nurseries)), _frontiers()):
        yield


@contextmanager
def reserving(entry: Entry) -> Generator[None]:
    """Mark that this task is inside the admission of `entry`: waiting there for its parent could never end."""
    task = trio.lowlevel.current_task()
    family = entry.owner
    if family.blocks is None:
        family.blocks = []
    with _listed(Block("self", task, len(task.child_nurseries), entry=entry), family.blocks):
        yield


@contextmanager
def _listed(stretch: S, stretches: list[S]) -> Generator[None]:
    """Keep a stretch in its list, and in this context, for the length of a block; blocks may end in any order."""
    stretches.append(stretch)
    _carried.set((*_lasting(), stretch))
    try:
        yield
    finally:
        stretches.remove(stretch)
        stretch.lasts = False
        _carried.set(_lasting())


def _lasting() -> tuple[_Stretch, ...]:
    return tuple(stretch for stretch in _carried.get() if stretch.lasts)


@contextmanager
def without_frontiers() -> Generator[None]:
    """Put all frontiers of the loop aside for code of an author's that is called in the middle of a turn.

    It is no task's, though a task that holds one may have called, and it can't wait, so nobody else sees them gone.
    """
    frontiers = _frontiers()
    if not frontiers:
        yield
        return
    _open.set([])
    try:
        yield
    finally:
        _open.set(frontiers)


def held_frontier() -> str | None:
    """Give the reason that a wait in this task would meet, or None."""
    try:
        task = trio.lowlevel.current_task()
    except RuntimeError:
        return "no-task"
    return _held_by(task)


def carried_into_a_thread() -> tuple[object, ...]:
    """Give the stretches that cover this task, for a thread that it enters with a fresh context."""
    frontiers, carried = _frontiers(), _carried.get()
    if not frontiers and not carried:
        return ()
    task = trio.lowlevel.current_task()
    blocks = [stretch for stretch in carried if isinstance(stretch, Block) and stretch.lasts]
    return tuple(stretch for stretch in (*blocks, *frontiers) if _covering(task, (stretch,)) is not None)


def carry(stretches: tuple[object, ...]) -> None:
    """Take them into the context of the thread."""
    _carried.set(tuple(stretch for stretch in stretches if isinstance(stretch, _Stretch)))


def is_carrying() -> bool:
    """Tell whether this code's context has a stretch, which a task that is merely started from here must not have."""
    return bool(_carried.get())


def enter_run(entry: Entry) -> None:
    """Bind this context to a Run, for a task of its own or a callback. The stretches of whoever started it stay behind."""
    current_entry.set(entry)
    if _carried.get():
        _carried.set(())


def check_wait(target: Entry | None, room_family: FamilyState | None = None) -> None:
    """Refuse a wait that could never end.

    Args:
        target: the Run to be waited for, None for a whole room.
        room_family: the room's own family, if the room is to be waited for.

    Raises:
        WaitRefusedError: under a frontier, without a task, or for oneself, an ancestor or the own room.
    """
    task = _waiting_task()
    family = room_family if target is None else target.family
    if family is not None and family.blocks and _covering(task, family.blocks) is not None:
        # This task is inside an admission of the target, which can't return before that is left.
        raise WaitRefusedError("self")
    waiting = current_entry.get()
    if waiting is None:
        return
    if target is None:
        if waiting.room.family is room_family:
            raise WaitRefusedError("self")
        return
    # Only a Run at most as deep as the waiting one can be the waiting one or its ancestor; this keeps the common
    # wait, a parent for its child, free of a walk.
    ancestor: Entry | None = waiting
    while ancestor is not None and ancestor.depth >= target.depth:
        if ancestor is target:
            raise WaitRefusedError("self")
        ancestor = ancestor.parent


def check_wait_lease(parent: Entry, lease_id: LeaseId) -> None:
    """Refuse a wait for a lease that could never end.

    Raises:
        WaitRefusedError: under a frontier, without a task, or inside that lease's own reserve block.
    """
    task = _waiting_task()
    family = parent.family
    if family is not None and family.blocks:
        own = [block for block in family.blocks if block.entry.lease_id == lease_id]
        if _covering(task, own) is not None:
            raise WaitRefusedError("self")


def _waiting_task() -> trio.lowlevel.Task:
    try:
        task = trio.lowlevel.current_task()
    except RuntimeError:
        raise WaitRefusedError("no-task") from None
    reason = _held_by(task)
    if reason is not None:
        raise WaitRefusedError(reason)
    return task


def _frontiers() -> list[_Stretch]:
    try:
        return _open.get()
    except LookupError:
        frontiers: list[_Stretch] = []
        _open.set(frontiers)
        return frontiers


def _held_by(task: trio.lowlevel.Task) -> str | None:
    if task.name == _CALLBACK_TASK:
        return "no-task"
    frontiers = _frontiers()
    if not frontiers:
        return None
    stretch = _covering(task, frontiers)
    return None if stretch is None else stretch.reason


def _covering(task: trio.lowlevel.Task, stretches: Sequence[S]) -> S | None:
    """Give the innermost of these stretches that covers a task: its own, an ancestor's, or that of its thread."""
    for stretch in reversed(stretches):
        if stretch.holder is task:
            return stretch
    outermost, nursery = task, task.parent_nursery
    while nursery is not None:
        parent = nursery.parent_task
        for stretch in reversed(stretches):
            if stretch.holder is parent and nursery in parent.child_nurseries[stretch.nurseries :]:
                return stretch
        nursery = parent.parent_nursery
        if nursery is not None:
            outermost = parent
    # Only a task of Trio's own nursery can have come from a thread, with the context of whoever entered that. What the
    # outermost task holds itself was looked at above, and a task that it started elsewhere is not covered by it.
    carried = outermost.context.get(_carried, ())
    for stretch in reversed(stretches):
        if stretch in carried and stretch.holder is not outermost:
            return stretch
    return None
