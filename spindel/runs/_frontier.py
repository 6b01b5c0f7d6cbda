"""Which Run the code belongs to, which exclusive stretches are open, and which waits are refused because of them.

A frontier is an exclusive stretch that may contain a store write. Whoever waits for a Run inside one could wait for
somebody who needs that very stretch, so such waits are refused before they begin, instead of deadlocking.

A frontier belongs to the task that opened it. It also covers tasks in nurseries that the holder opens inside it, since
the holder can't leave before they end, and the threads that it enters. A task that the holder merely starts elsewhere
is not covered: nobody waits for it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

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
    "bind_launch",
    "check_wait",
    "check_wait_lease",
    "current_entry",
    "current_run",
    "enter_run",
    "frontier",
    "held_frontier",
    "is_launched",
    "launch_frontier",
    "reserving",
]

current_entry: Final[ContextVar[Entry | None]] = ContextVar("spindel run", default=None)

# The entry queue runs callbacks in a task of its own; a coroutine stepped from there has no task to suspend.
_CALLBACK_TASK: Final = "<TrioToken.run_sync_soon task>"


@attrs.define(eq=False)
class _Frontier:
    reason: str
    holder: trio.lowlevel.Task
    nurseries: int


@attrs.define(eq=False)
class Block(_Frontier):
    """The stretch in which a task is inside an admission: its reserve block, or the construction of what it needs."""

    entry: Entry


_open: Final[trio.lowlevel.RunVar[list[_Frontier]]] = trio.lowlevel.RunVar("spindel frontiers")
_launched_under: Final[ContextVar[_Frontier | None]] = ContextVar("spindel launch frontier", default=None)


def current_run() -> Run[Any] | None:
    """Give the Run whose body, plain task, callback or launch this code is, or None outside every Run."""
    entry = current_entry.get()
    return None if entry is None else entry.handle()


@contextmanager
def frontier(reason: str) -> Generator[None]:
    """Mark an exclusive stretch of a layer above: waits for Runs inside it are refused with this reason.

    Args:
        reason: `[a-z0-9-]{1,64}`, such as `host-line`.

    Raises:
        InvalidRecordError: the reason is none.
        RuntimeError: called outside a Trio task.
    """
    check_reason(reason)
    task = trio.lowlevel.current_task()
    mark = _Frontier(reason, task, len(task.child_nurseries))
    frontiers = _frontiers()
    frontiers.append(mark)
    try:
        yield
    finally:
        frontiers.remove(mark)


@contextmanager
def reserving(entry: Entry) -> Generator[None]:
    """Mark that this task is inside the admission of `entry`: waiting there for its parent could never end."""
    task = trio.lowlevel.current_task()
    block = Block("self", task, len(task.child_nurseries), entry)
    family = entry.owner
    if family.blocks is None:
        family.blocks = []
    family.blocks.append(block)
    try:
        yield
    finally:
        family.blocks.remove(block)


def held_frontier() -> str | None:
    """Give the reason that a wait in this task would meet, or None."""
    try:
        task = trio.lowlevel.current_task()
    except RuntimeError:
        return "no-task"
    return _held_by(task)


def launch_frontier() -> object:
    """Give the frontier that a launch by this task would carry into its thread, or None."""
    frontiers = _frontiers()
    return _covering(trio.lowlevel.current_task(), frontiers) if frontiers else None


def bind_launch(mark: object) -> None:
    """Carry a frontier into the fresh context of a launch."""
    _launched_under.set(mark if isinstance(mark, _Frontier) else None)


def is_launched() -> bool:
    """Tell whether this code's context came with a frontier's thread, as that of `trio.from_thread` does."""
    return _launched_under.get() is not None


def enter_run(entry: Entry) -> None:
    """Bind this context to a Run, for a task of its own. The frontier of a thread that started it stays behind."""
    current_entry.set(entry)
    if _launched_under.get() is not None:
        _launched_under.set(None)


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


def _frontiers() -> list[_Frontier]:
    try:
        return _open.get()
    except LookupError:
        frontiers: list[_Frontier] = []
        _open.set(frontiers)
        return frontiers


def _held_by(task: trio.lowlevel.Task) -> str | None:
    if task.name == _CALLBACK_TASK:
        return "no-task"
    frontiers = _frontiers()
    if not frontiers:
        return None
    mark = _covering(task, frontiers)
    if mark is None:
        launched = _launched_under.get()
        mark = launched if launched in frontiers else None
    return None if mark is None else mark.reason


def _covering(task: trio.lowlevel.Task, frontiers: Sequence[_Frontier]) -> _Frontier | None:
    for mark in reversed(frontiers):
        if mark.holder is task:
            return mark
    nursery = task.parent_nursery
    while nursery is not None:
        parent = nursery.parent_task
        for mark in reversed(frontiers):
            if mark.holder is parent and nursery in parent.child_nurseries[mark.nurseries :]:
                return mark
        nursery = parent.parent_nursery
    return None
