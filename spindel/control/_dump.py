"""What lives in a process at one moment: Runs, tasks, threads, and where each of them is.

It is read in one turn and changes nothing, also from a signal's handler, which may come between any two steps of the
interpreter. It tells names, files and lines: no values of variables, no lines of source, no messages of errors.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Final

import trio

from spindel.control._wire import Dump, DumpedRun, DumpedTask, DumpedThread
from spindel.jobs._owner import JobOwner
from spindel.runs._frontier import current_entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from spindel.runs import Room
    from spindel.runs._entry import Entry

__all__ = ["describe_dump", "take_dump"]

_RUNS_MAX: Final = 1_000
_TASKS_MAX: Final = 2_000
_THREADS_MAX: Final = 200
_FRAMES_OUTER: Final = 10
_FRAMES_INNER: Final = 30
_NAME_CHARACTERS_MAX: Final = 200


def take_dump(room: Room, *, runs_max: int = _RUNS_MAX, tasks_max: int = _TASKS_MAX) -> Dump:
    """Tell what lives in the room, and where all tasks and threads of the process are, and how much it leaves out.

    Args:
        room: the room.
        runs_max: so many Runs at most, those that were admitted first.
        tasks_max: so many tasks at most, those of Runs and of none together.
    """
    tasks: defaultdict[int | None, list[DumpedTask]] = defaultdict(list)
    live = [entry for entry in list(room.entries.values()) if entry.live and entry.admission is not None]
    shown = {entry.key: entry for entry in live[:runs_max]}
    hidden = {entry.key for entry in live[runs_max:]}
    shown_tasks = omitted_tasks = 0
    for task in _all_tasks():
        entry = task.context.get(current_entry)
        # An entry of another room, or one whose Run has ended, has no line to stand under.
        key = entry.key if entry is not None and shown.get(entry.key) is entry else None
        if key is None and entry is not None and entry.key in hidden and entry.room is room:
            continue
        if shown_tasks == tasks_max:
            omitted_tasks += 1
            continue
        shown_tasks += 1
        tasks[key].append(_describe_task(task))
    launches: defaultdict[int, list[str]] = defaultdict(list)
    for launch in list(room.pool.launches.values()):
        launches[launch.entry.key].append(f"{launch.kind.value} {launch.state.value}")
    threads = sys._current_frames()
    return Dump(
        room=room.name,
        state=room.state.value,
        runs=tuple(_describe_run(entry, launches[key], tasks[key]) for key, entry in shown.items()),
        tasks=tuple(tasks[None]),
        threads=tuple(_describe_threads(threads)),
        omitted=len(hidden),
        omitted_tasks=omitted_tasks,
        omitted_threads=max(0, len(threads) - _THREADS_MAX),
    )


def describe_dump(dump: Dump) -> str:
    """Write a dump for people: the tree of Runs with their tasks, then other tasks, then threads."""
    lines = [f"room {dump.room} is {dump.state}; {len(dump.runs) + dump.omitted:,} live Runs"]
    below: defaultdict[object, list[DumpedRun]] = defaultdict(list)
    ids = {run.id for run in dump.runs}
    for run in dump.runs:
        below[run.parent_id if run.parent_id in ids else None].append(run)
    # Trees may be deep, so they are walked without recursion.
    waiting = [(0, run) for run in reversed(below[None])]
    while waiting:
        depth, run = waiting.pop()
        indent = "  " * depth
        stage = "" if run.stage is None else f" at {run.stage.value}"
        lines.append(f"{indent}run {run.id} {run.kind} {run.status}{stage}")
        lines.extend(f"{indent}    launch {launch}" for launch in run.launches)
        for task in run.tasks:
            lines.extend(f"{indent}    {line}" for line in _task_lines(task))
        waiting.extend((depth + 1, child) for child in reversed(below[run.id]))
    if dump.omitted:
        lines.append(f"… {dump.omitted:,} more Runs, with their tasks")
    if dump.tasks:
        lines.append("tasks of no Run:")
        for task in dump.tasks:
            lines.extend(f"    {line}" for line in _task_lines(task))
    if dump.omitted_tasks:
        lines.append(f"… {dump.omitted_tasks:,} more tasks")
    lines.append("threads:")
    for thread in dump.threads:
        lines.append(f"    thread {thread.name}")
        lines.extend(f"        {frame}" for frame in thread.frames)
    if dump.omitted_threads:
        lines.append(f"… {dump.omitted_threads:,} more threads")
    return "\n".join(lines)


def _task_lines(task: DumpedTask) -> Iterator[str]:
    yield f"task {task.name}{', running: see its thread' if task.running else ''}"
    for frame in task.frames:
        yield f"    {frame}"


def _all_tasks() -> Iterator[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    waiting = [] if root is None else [root]
    while waiting:
        task = waiting.pop()
        yield task
        for nursery in task.child_nurseries:
            waiting.extend(nursery.child_tasks)


def _describe_task(task: trio.lowlevel.Task) -> DumpedTask:
    try:
        running = task is trio.lowlevel.current_task()
    except RuntimeError:
        running = False  # a signal's handler, while all tasks wait
    frames = () if running else _describe_frames(list(_frames(task)))
    return DumpedTask(name=task.name[:_NAME_CHARACTERS_MAX], frames=frames, running=running)


def _frames(task: trio.lowlevel.Task) -> Iterator[tuple[FrameType, int]]:
    try:
        yield from task.iter_await_frames()
    except TypeError:
        return  # it waits for something that another library made and that has no frames


def _describe_run(entry: Entry, launches: list[str], tasks: list[DumpedTask]) -> DumpedRun:
    run, admission, owner = entry.handle(), entry.admission, entry.finisher
    assert admission is not None, "a live Run keeps its first row"
    return DumpedRun(
        id=run.id,
        parent_id=run.parent_id,
        kind=run.kind,
        status=run.status.value,
        started_at=admission.started_at,
        stage=owner.stage if isinstance(owner, JobOwner) else None,
        launches=tuple(launches),
        tasks=tuple(tasks),
    )


def _describe_threads(threads: Mapping[int, FrameType]) -> Iterator[DumpedThread]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, innermost in islice(threads.items(), _THREADS_MAX):
        frames: list[tuple[FrameType, int]] = []
        frame: FrameType | None = innermost
        while frame is not None:
            frames.append((frame, frame.f_lineno))
            frame = frame.f_back
        name = names.get(ident, f"{ident}")[:_NAME_CHARACTERS_MAX]
        yield DumpedThread(name=name, frames=_describe_frames(frames[::-1]))


def _describe_frames(frames: Sequence[tuple[FrameType, int]]) -> tuple[str, ...]:
    """Tell both ends of a stack: how it was come by, and where it is; and how much lies between them."""
    between = len(frames) - _FRAMES_OUTER - _FRAMES_INNER
    if between <= 0:
        return tuple(_place(*frame) for frame in frames)
    outer, inner = frames[:_FRAMES_OUTER], frames[-_FRAMES_INNER:]
    return (*(_place(*frame) for frame in outer), f"… {between:,} frames", *(_place(*frame) for frame in inner))


def _place(frame: FrameType, line: int | None) -> str:
    return f"{frame.f_code.co_filename}:{line or 0} in {frame.f_code.co_qualname}"
