"""How does the cost of a family grow with its size and its depth?

| key | what |
|---|---|
| `wide_cost_growth` | cost of one child among the most / among the fewest children of one Run |
| `deep_cost_growth` | cost of one level in the deepest / in the flattest chain of only children |

Wide: 1,000, 10,000 and 100,000 children of one Run. Deep: 100 and 1,000 levels, each Run starts one child and ends; its
family joins.

Held fixed: the body is one checkpoint; every sample has a room of its own; small families are repeated within a
sample, so that each sample is about as long as the others. By process time in memory (with `--store sqlite` by wall
clock, and wide in groups of 256), from before the first start until the topmost Run has returned.

Non-goals: the cost itself, which `admission` compares with bare Trio.

Sketch: nothing in an admission or a return looks at siblings or ancestors, so both would be 1. Wide, what grows is what
the interpreter does for many objects that are alive at once: the garbage collector's passes and the processor's
caches; a schedule point each 32nd start keeps that down (a bare nursery, whose tasks all begin together, grows by
1.4). Deep, all Runs of a chain are alive at its end.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

import attrs
import trio

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
    wide: tuple[int, ...]
    deep: tuple[int, ...]
    repetitions: int


_SMALL: Final = _Scale(wide=(100, 300, 1_000), deep=(10, 100), repetitions=1)
_LARGE: Final = _Scale(wide=(1_000, 10_000, 100_000), deep=(100, 1_000), repetitions=5)
_WIDE_SAMPLE: Final = 10_000
_DEEP_SAMPLE: Final = 2_000


def run(settings: Settings) -> Figures:
    """Measure."""
    scale = _LARGE if settings.large else _SMALL
    counts: Counter[str] = Counter()
    notes: list[str] = []
    keys: dict[str, float | bool] = {}
    for shape, sizes, enough in (("wide", scale.wide, _WIDE_SAMPLE), ("deep", scale.deep, _DEEP_SAMPLE)):
        measures = {
            f"{shape}_{size}": partial(_measure, settings, shape, size, _families(size, enough, settings), counts)
            for size in sizes
        }
        costs = take_turns(measures, scale.repetitions)
        smallest, *_, largest = costs.values()
        keys[f"{shape}_cost_growth"] = paired_ratio(largest, smallest)
        notes.extend(f"{name:<12} {median_rate(1, cost):>9,.0f} Runs/s" for name, cost in costs.items())
    return Figures(repetitions=scale.repetitions, counts=counts, keys=keys, notes=tuple(notes))


def _families(size: int, enough: int, settings: Settings) -> int:
    return max(1, enough // size) if settings.large else 1


def _measure(settings: Settings, shape: str, size: int, families: int, counts: Counter[str]) -> float:
    """Give the cost of one child or level, in seconds."""
    durable = settings.store == "sqlite"
    wide = _wide_in_groups if durable else _wide
    body = wide if shape == "wide" else _deep
    watch = Stopwatch(time.perf_counter if durable else time.process_time)
    done = count()

    async def measure() -> None:
        async with opened_room(settings) as room:
            for _ in range(families):
                root = await room.start(body, size, done, watch.start)
                await root.wait_returned()
                watch.stop()
            # The roots, which are no children, are read back as well.
            counts[f"{shape}_{size}_rows"] += await read_back(room, RunStatus.COMPLETED) - families

    sample(measure)
    counts[f"{shape}_{size}_bodies"] += next(done)
    return watch.seconds / (families * size)


async def _leaf(_: Run[None], done: Iterator[int]) -> None:
    await trio.lowlevel.checkpoint()
    next(done)


async def _wide(run: Run[None], size: int, done: Iterator[int], begin: Callable[[], None]) -> None:
    begin()
    for _ in range(size):
        await run.start_child(_leaf, done)


async def _wide_in_groups(run: Run[None], size: int, done: Iterator[int], begin: Callable[[], None]) -> None:
    begin()
    await start_in_groups(run, size, _leaf, done)


async def _deep(run: Run[None], size: int, done: Iterator[int], begin: Callable[[], None]) -> None:
    begin()
    await run.start_child(_level, size - 1, done)


async def _level(run: Run[None], below: int, done: Iterator[int]) -> None:
    await trio.lowlevel.checkpoint()
    next(done)
    if below:
        await run.start_child(_level, below - 1, done)
