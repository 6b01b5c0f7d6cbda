"""How long from one cancel request until every child has physically returned?

| key | what |
|---|---|
| `cancel_ratio` | time of a bare Trio nursery / ours |
| `late_child_cancelled` | a child that was reserved before the request and admitted after it met the request too |

Held fixed: 10,000 children of one Run, which is still at work itself; each is parked in a sleep that never ends. The
same number of tasks, parked the same way, in one nursery whose scope is cancelled. Each body notes that it was left. By
process time in memory (by wall clock with `--store sqlite`), from the request until the Run, or the nursery, has
returned.

Non-goals: clean-up that takes time; native threads and processes, which are waited for however long they take.

Sketch: a bare task is resumed by its nursery's one scope and ends: 0.4 of what spawning and joining it costs. Ours is
that, with a scope of its own to cancel, a decision, an outcome row and two records to drop: about double.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from benchmarks._harness import (
    Figures,
    Settings,
    Stopwatch,
    median_rate,
    opened_room,
    paired_ratio,
    read_back,
    sample,
    start_in_groups,
    take_turns,
)
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spindel.runs import Run

STORES: Final = ("memory", "sqlite")


@attrs.frozen
class _Scale:
    children: int
    repetitions: int


_SMALL: Final = _Scale(children=300, repetitions=3)
_LARGE: Final = _Scale(children=10_000, repetitions=9)


def run(settings: Settings) -> Figures:
    """Measure."""
    scale = _LARGE if settings.large else _SMALL
    clock = time.perf_counter if settings.store == "sqlite" else time.process_time
    counts: Counter[str] = Counter()
    seconds = take_turns(
        {
            "trio": partial(sample, _trio, scale.children, clock, counts),
            "run": partial(sample, _runs, settings, scale.children, clock, counts),
        },
        scale.repetitions,
    )
    late = sample(_late_child_is_cancelled, settings)
    counts["late_children_cancelled"] = int(late)
    return Figures(
        repetitions=scale.repetitions,
        counts=counts,
        keys={"cancel_ratio": paired_ratio(seconds["trio"], seconds["run"]), "late_child_cancelled": late},
        notes=tuple(f"{name:<5} {median_rate(scale.children, taken):>9,.0f} /s" for name, taken in seconds.items()),
    )


async def _parked_task(left: Iterator[int]) -> None:
    try:
        await trio.sleep_forever()
    finally:
        next(left)


async def _parked(_: Run[None], left: Iterator[int]) -> None:
    try:
        await trio.sleep_forever()
    finally:
        next(left)


async def _trio(children: int, clock: Callable[[], float], counts: Counter[str]) -> float:
    watch, left = Stopwatch(clock), count()
    async with trio.open_nursery() as nursery:
        for _ in range(children):
            nursery.start_soon(_parked_task, left)
        await wait_all_tasks_blocked()
        watch.start()
        nursery.cancel_scope.cancel()
    watch.stop()
    counts["bare_tasks"] += next(left)
    return watch.seconds


async def _runs(settings: Settings, children: int, clock: Callable[[], float], counts: Counter[str]) -> float:
    watch, left = Stopwatch(clock), count()

    started = trio.Event()

    async def body(run: Run[None]) -> None:
        await start_in_groups(run, children, _parked, left)
        started.set()
        await trio.sleep_forever()

    async with opened_room(settings) as room:
        root = await room.start(body)
        await started.wait()
        await wait_all_tasks_blocked()
        watch.start()
        root.cancel()
        await root.wait_returned()
        watch.stop()
        counts["runs"] += next(left)
        counts["run_rows"] += await read_back(room, RunStatus.CANCELLED, parent=root.id)
    return watch.seconds


async def _late_child_is_cancelled(settings: Settings) -> bool:
    """Admit a child that was reserved before the request came, from a clean-up that still may."""
    left = count()
    late: list[Run[None]] = []

    async def body(run: Run[None]) -> None:
        with run.reserve() as token:
            run.cancel()
            with trio.CancelScope(shield=True):
                late.append(await run.admit(token, _parked, left))

    async with opened_room(settings) as room:
        root = await room.start(body)
        await root.wait_returned()
        row = await room.load(late[0].id)
    return next(left) == 1 and row is not None and row.status is RunStatus.CANCELLED
