"""What does starting and physically joining a child cost?

| key | what | unit |
|---|---|---|
| `trio_rate` | tasks of a bare Trio nursery | tasks/s |
| `task_rate`, `task_ratio` | plain tasks of a Run; against `trio_rate` | tasks/s |
| `run_rate`, `run_ratio` | child Runs, memory store; against `trio_rate` | Runs/s |
| `durable_rate` | child Runs in a file, `start_children` in groups of 256 | Runs/s |
| `durable_rate_tasks` | the same from 256 tasks that await `start_child` | Runs/s |
| `writer_rate` | the bare writer committing the same rows from 256 tasks | writes/s |
| `durable_ratio` | `durable_rate` x 2 writes a child / `writer_rate` | |
| `mutations_per_commit` | only with `--store postgres`: of `durable_rate_tasks` | |
| `sqlite_rate`, `sqlite_ratio` | only with `--store postgres`: `durable_rate` in files; against that, turn by turn | Runs/s |

Held fixed: the body of a child and of a task is one checkpoint, on both sides, and counts itself; families of 10,000,
one after another in one room; plain tasks start after the nurseries are open; each sample has its own loop, room and
file. In memory by process time, durable by wall clock, from before the first start until the family has returned.
`--rows N` gives the durable files a history of N finished rows. `--store` measures one half only; with `postgres` the
durable figures are those of a server that is started for it, which syncs each commit, as files do.

The size of a family matters in memory: a nursery's tasks all live at once, and a thousand of them fit into a
processor's cache where ten thousand don't, while of our children a few dozen live at once. So the ratios are printed
for families of 1,000 too, where they are less kind to us.

Non-goals: what a body does; how long one child takes when the machine is idle (that is the disk's sync).

Sketch, in units of spawning and joining one bare task (t). A child in memory: task 1 + scope 1.2 + entry, two
mutations, handle, lease 1: about 3, so a ratio of 0.3 to 0.4. A durable child: in the bare writer 2 x (queue, wait, be
resumed 1 + the statement with its triggers 2) = 6; ours the same 6 + the child 3 + its checks 1.5: about 10.5, so 0.55,
whatever the disk does, as long as batches stay large.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Final

import attrs
import trio

from benchmarks._bare_writer import WRITES_PER_CHILD, write_rows
from benchmarks._databases import Files, make_file, postgres_databases
from benchmarks._harness import (
    GROUP,
    ROOM,
    Figures,
    Settings,
    Stopwatch,
    median_rate,
    new_file,
    paired_ratio,
    read_back,
    sample,
    start_in_groups,
    take_turns,
)
from benchmarks._history import fill_history
from spindel.runs import open_room
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from benchmarks._databases import Databases
    from spindel.runs import Run

STORES: Final = ("memory", "sqlite", "postgres")
ROWS: Final = True


@attrs.frozen
class _Families:
    """So many families, each of so many children, one after another."""

    families: int
    children: int

    @property
    def total(self) -> int:
        return self.families * self.children


@attrs.frozen
class _Scale:
    families: _Families
    # Printed beside the others.
    smaller: _Families
    durable: int
    repetitions: int


_SMALL: Final = _Scale(families=_Families(1, 1_000), smaller=_Families(2, 100), durable=512, repetitions=3)
_LARGE: Final = _Scale(families=_Families(2, 10_000), smaller=_Families(20, 1_000), durable=8_192, repetitions=11)


def run(settings: Settings) -> Figures:
    """Measure."""
    scale = _LARGE if settings.large else _SMALL
    counts: Counter[str] = Counter()
    keys: dict[str, float | bool] = {}
    notes: tuple[str, ...] = ()
    if settings.store in {None, "memory"}:
        notes = _measure_memory(scale, counts, keys)
    if settings.store != "memory":
        _measure_durable(settings, scale, counts, keys)
    return Figures(repetitions=scale.repetitions, counts=counts, keys=keys, notes=notes)


# -- in memory ---------------------------------------------------------------------------------------------------------


def _measure_memory(scale: _Scale, counts: Counter[str], keys: dict[str, float | bool]) -> tuple[str, ...]:
    def measures(families: _Families) -> dict[str, Callable[[], float]]:
        return {
            f"{name}_{families.children}": partial(sample, measure, families, counts)
            for name, measure in (("trio", _trio), ("task", _tasks), ("run", _runs))
        }

    seconds = take_turns(measures(scale.families) | measures(scale.smaller), scale.repetitions)
    bare, task, run, *smaller = seconds.values()
    children = scale.families.total
    keys["trio_rate"] = median_rate(children, bare)
    keys["task_rate"] = median_rate(children, task)
    keys["task_ratio"] = paired_ratio(bare, task)
    keys["run_rate"] = median_rate(children, run)
    keys["run_ratio"] = paired_ratio(bare, run)
    bare, task, run = smaller
    rate = median_rate(scale.smaller.total, bare)
    ratios = f"task_ratio {paired_ratio(bare, task):.3f}, run_ratio {paired_ratio(bare, run):.3f}"
    return (f"in families of {scale.smaller.children:,}: {rate:,.0f} bare tasks/s, {ratios}",)


async def _task(done: Iterator[int]) -> None:
    await trio.lowlevel.checkpoint()
    next(done)


async def _leaf(_: Run[None], done: Iterator[int]) -> None:
    await trio.lowlevel.checkpoint()
    next(done)


async def _trio(families: _Families, counts: Counter[str]) -> float:
    watch, done = Stopwatch(), count()
    for _ in range(families.families):
        async with trio.open_nursery() as nursery:
            watch.start()
            for _ in range(families.children):
                nursery.start_soon(_task, done)
        watch.stop()
    counts["bare_tasks"] += next(done)
    return watch.seconds


async def _tasks(families: _Families, counts: Counter[str]) -> float:
    watch, done = Stopwatch(), count()

    async def body(run: Run[None]) -> None:
        opened = trio.Event()

        async def first() -> None:
            opened.set()

        run.start_soon(first)
        await opened.wait()
        watch.start()
        for _ in range(families.children):
            run.start_soon(_task, done)

    async with open_room(name=ROOM) as room:
        for _ in range(families.families):
            root = await room.start(body)
            await root.wait_returned()
            watch.stop()
        counts["tasks"] += next(done)
        counts["task_roots"] += await read_back(room, RunStatus.COMPLETED)
    return watch.seconds


async def _runs(families: _Families, counts: Counter[str]) -> float:
    watch, done = Stopwatch(), count()

    async def body(run: Run[None]) -> None:
        watch.start()
        for _ in range(families.children):
            await run.start_child(_leaf, done)

    async with open_room(name=ROOM) as room:
        for _ in range(families.families):
            root = await room.start(body)
            await root.wait_returned()
            watch.stop()
            counts["run_rows"] += await read_back(room, RunStatus.COMPLETED, parent=root.id)
        counts["runs"] += next(done)
    return watch.seconds


# -- durable -----------------------------------------------------------------------------------------------------------


def _measure_durable(settings: Settings, scale: _Scale, counts: Counter[str], keys: dict[str, float | bool]) -> None:
    batches: list[float] = []
    postgres = settings.store == "postgres"
    with _files(settings) as files, postgres_databases() if postgres else nullcontext(files) as databases:
        begin = (databases, settings, scale)
        measures = {
            "durable": partial(_durable, *begin, counts, "durable", _start_groups, []),
            "tasks": partial(_durable, *begin, counts, "durable_tasks", _start_from_tasks, batches),
            "writer": partial(_writer, *begin, counts),
        }
        if postgres:
            # Beside the others, and no part of what the benchmark did.
            measures["sqlite"] = partial(_durable, files, settings, scale, Counter(), "durable", _start_groups, [])
        seconds = take_turns(measures, scale.repetitions)
    children = scale.durable
    keys["durable_rate"] = median_rate(children, seconds["durable"])
    keys["durable_rate_tasks"] = median_rate(children, seconds["tasks"])
    keys["writer_rate"] = median_rate(children * WRITES_PER_CHILD, seconds["writer"])
    keys["durable_ratio"] = paired_ratio(seconds["writer"], seconds["durable"])
    if postgres:
        keys["mutations_per_commit"] = median(batches)
        keys["sqlite_rate"] = median_rate(children, seconds["sqlite"])
        keys["sqlite_ratio"] = paired_ratio(seconds["sqlite"], seconds["durable"])


async def _start_groups(run: Run[None], children: int, done: Iterator[int]) -> None:
    await start_in_groups(run, children, _leaf, done)


async def _start_from_tasks(run: Run[None], children: int, done: Iterator[int]) -> None:
    async def start() -> None:
        for _ in range(children // GROUP):
            await run.start_child(_leaf, done)

    async with trio.open_nursery() as nursery:
        for _ in range(GROUP):
            nursery.start_soon(start)


def _durable(
    databases: Databases,
    settings: Settings,
    scale: _Scale,
    counts: Counter[str],
    name: str,
    start: Callable[..., Awaitable[None]],
    batches: list[float],
) -> float:
    watch, done = Stopwatch(time.perf_counter), count()

    async def body(run: Run[None]) -> None:
        watch.start()
        await start(run, scale.durable, done)

    async def measure() -> None:
        async with databases.open_store(place) as store, open_room(store, name=ROOM) as room:
            commits, committed = store.commits, store.committed
            root = await room.start(body)
            await root.wait_returned()
            watch.stop()
            batches.append((store.committed - committed) / (store.commits - commits))

    with databases.lend() as place:
        sample(measure)
        _count(counts, name, next(done), databases.count_stored(place), settings.rows)
    return watch.seconds


def _writer(databases: Databases, settings: Settings, scale: _Scale, counts: Counter[str]) -> float:
    watch = Stopwatch(time.perf_counter)
    with databases.lend() as place:
        sample(write_rows, databases.open_sink(place), scale.durable, GROUP, watch)
        _count(counts, "writer", scale.durable, databases.count_stored(place), settings.rows)
    return watch.seconds


@contextmanager
def _files(settings: Settings) -> Iterator[Files]:
    with new_file(settings.folder) as first:
        trio.run(make_file, first)
        if settings.rows is not None:
            fill_history(first, settings.rows)
        yield Files(settings, first)


def _count(counts: Counter[str], name: str, bodies: int, stored: Counter[str], history: int | None) -> None:
    counts[f"{name}_bodies"] += bodies
    counts[f"{name}_rows"] += stored["completed"] - (history or 0)
    counts[f"{name}_witnesses"] += stored["witnesses"] - (history or 0)
