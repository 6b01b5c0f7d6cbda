"""How many bytes does a parked live Run or Job hold, against a parked Trio task?

| key | what | unit |
|---|---|---|
| `task_bytes` | a task of a bare nursery, parked in a sleep that never ends | bytes |
| `run_bytes` | a live child Run whose body is parked the same way, its stored row included | bytes |
| `job_bytes` | a live Job, a child with two callbacks and no key, parked the same way | bytes |
| `run_ratio` | `run_bytes` / `task_bytes` | |

Method: `tracemalloc`, which counts what Python allocates, exactly: traced bytes with 10,000 parked minus traced bytes
before the first was started, both after a full collection, divided by their number. The family's host and the tables'
spare room are in it, by their share. `--store sqlite` leaves the rows to the file.

Held fixed: the body, apart from the Run that it gets. Nobody has asked for an outcome or watches.

Non-goals: memory outside Python's allocator (`import` looks at the whole process), and what bodies keep themselves.

Sketch: a task is its coroutine's frames, its context and Trio's record. A Run has a frame more, an entry of 40 slots,
a scope with its status, a handle, its id and its first row: about as much again, and a half. A Job has its owner, its
handle, its identity, and two events more.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from benchmarks._harness import (
    Figures,
    Settings,
    opened_room,
    paired_ratio,
    read_back,
    sample,
    start_in_groups,
    take_turns,
)
from spindel.jobs import start_job
from spindel.store import RunStatus

if TYPE_CHECKING:
    from spindel.runs import Outcome, Run

STORES: Final = ("memory", "sqlite")


@attrs.frozen
class _Scale:
    parked: int
    repetitions: int


_SMALL: Final = _Scale(parked=500, repetitions=1)
_LARGE: Final = _Scale(parked=10_000, repetitions=3)


def run(settings: Settings) -> Figures:
    """Measure."""
    scale = _LARGE if settings.large else _SMALL
    counts: Counter[str] = Counter()
    taken = take_turns(
        {
            "task": partial(sample, _tasks, scale.parked, counts),
            "run": partial(sample, _runs, settings, scale.parked, counts),
            "job": partial(sample, _jobs, settings, scale.parked, counts),
        },
        scale.repetitions,
    )
    return Figures(
        repetitions=scale.repetitions,
        counts=counts,
        keys={
            "task_bytes": median(taken["task"]),
            "run_bytes": median(taken["run"]),
            "job_bytes": median(taken["job"]),
            "run_ratio": paired_ratio(taken["run"], taken["task"]),
        },
    )


class _Scales:
    """Weighs what is allocated between its making and `weigh`."""

    def __init__(self) -> None:
        gc.collect()
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]

    def weigh(self) -> int:
        """Give the bytes that are held now and weren't before."""
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - self._before
        tracemalloc.stop()
        return held


async def _parked_task() -> None:
    await trio.sleep_forever()


async def _parked(_: Run[None]) -> None:
    await trio.sleep_forever()


async def _tasks(parked: int, counts: Counter[str]) -> float:
    async with trio.open_nursery() as nursery:
        scales = _Scales()
        for _ in range(parked):
            nursery.start_soon(_parked_task)
        await wait_all_tasks_blocked()
        held = scales.weigh()
        counts["tasks"] += len(nursery.child_tasks)
        nursery.cancel_scope.cancel()
    return held / parked


async def _runs(settings: Settings, parked: int, counts: Counter[str]) -> float:
    started = trio.Event()

    async def body(run: Run[None]) -> None:
        await start_in_groups(run, parked, _parked)
        started.set()
        await trio.sleep_forever()

    async with opened_room(settings) as room:
        scales = _Scales()
        root = await room.start(body)
        await started.wait()
        await wait_all_tasks_blocked()
        held = scales.weigh()
        counts["runs"] += len(room.live())
        root.cancel()
        await root.wait_returned()
        counts["rows"] += await read_back(room, RunStatus.CANCELLED)
    return held / parked


async def _pass_on(_: Outcome[None]) -> None:
    await trio.lowlevel.checkpoint()


async def _jobs(settings: Settings, parked: int, counts: Counter[str]) -> float:
    started = trio.Event()

    async def body(run: Run[None]) -> None:
        for _ in range(parked):
            await start_job(run, _parked, before_finish=_pass_on, on_settled=_pass_on)
        started.set()
        await trio.sleep_forever()

    async with opened_room(settings) as room:
        scales = _Scales()
        root = await room.start(body)
        await started.wait()
        await wait_all_tasks_blocked()
        held = scales.weigh()
        counts["jobs"] += len(room.live())
        root.cancel()
        await root.wait_returned()
        counts["job_rows"] += await read_back(room, RunStatus.CANCELLED)
    return held / parked
