"""What does a Job cost, from its start to settled with all its witnesses, for 1, 10 and 100 at once?

| key | what | unit |
|---|---|---|
| `rate_1`, `rate_10`, `rate_100` | Jobs, started and awaited one after another by 1, 10 and 100 tasks | Jobs/s |
| `p50_1`, `p95_1` | one Job when it is the only one: the median, and what 19 of 20 stay below | s |
| `p99_100` | one Job among 100 at once: what 99 of 100 stay below | s |
| `commits_per_job_100` | commits of the store / Jobs, with 100 at once | |
| `bare_rate_10`, `bare_rate_100` | the bare writer doing the four writes of a Job, from as many tasks | Jobs/s |
| `bare_ratio_10`, `bare_ratio_100` | `rate_10` / `bare_rate_10` and `rate_100` / `bare_rate_100`, turn by turn | |
| `mutations_per_commit_100` | only with `--store postgres`: with 100 at once | |
| `sqlite_rate_100` | only with `--store postgres`: `rate_100` in files | Jobs/s |
| `sqlite_ratio_1`, `sqlite_ratio_10`, `sqlite_ratio_100` | the rates / those in files, turn by turn | |
| `history_ratio` | only with `--rows N`: `rate_100` over N finished rows / over an empty file | |

Held fixed: the body is one checkpoint and counts itself, and there are no callbacks; each task starts a root Job and
awaits its outcome before the next one, so a task has one Job at a time; each sample has its own loop, room and file; by
wall clock, from before the first start until the last task knows. Everything is in a file, synced at each commit; with
`--store postgres` in a server that is started for it, which does the same.

Non-goals: what callbacks do; how quickly a held Job is recovered.

Sketch, in units of spawning and joining one bare task (t). In the bare writer 4 x (queue, wait, be resumed 1 + the
statement with its triggers 2) = 12. Ours the same 12, + task 1, scope 1.2, waiter 0.7, witnesses 2, entry, checks,
owner and walk 4: about 21, so 0.57 with large batches; with small ones the disk's sync is most of both sides, and the
ratio is nearer to 1. One alone takes four commits, one after another, each with two hand-overs between threads.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import count
from statistics import median, quantiles
from typing import TYPE_CHECKING, Final

import attrs
import trio

from benchmarks._bare_writer import make_jobs, write_rows
from benchmarks._databases import Files, make_file, postgres_databases
from benchmarks._harness import (
    ROOM,
    Figures,
    Settings,
    Stopwatch,
    median_rate,
    new_file,
    paired_ratio,
    sample,
    take_turns,
)
from benchmarks._history import fill_history
from spindel.jobs import start_job
from spindel.runs import open_room

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks._databases import Databases
    from spindel.runs import Room, Run

STORES: Final = ("sqlite", "postgres")
ROWS: Final = True


@attrs.frozen
class _Scale:
    # How many Jobs in all, by how many there are at once.
    jobs: dict[int, int]
    repetitions: int


_SMALL: Final = _Scale(jobs={1: 20, 10: 100, 100: 300}, repetitions=2)
_LARGE: Final = _Scale(jobs={1: 400, 10: 4_000, 100: 10_000}, repetitions=9)


@attrs.frozen
class _Sample:
    seconds: float
    latencies: list[float] = attrs.Factory(list)
    commits: int = 0
    committed: int = 0


def run(settings: Settings) -> Figures:
    """Measure."""
    scale = _LARGE if settings.large else _SMALL
    counts: Counter[str] = Counter()
    postgres = settings.store == "postgres"
    with new_file(settings.folder) as empty, new_file(settings.folder) as filled:
        for path in (empty, filled):
            trio.run(make_file, path)
        files = Files(settings, empty)
        with postgres_databases() if postgres else nullcontext(files) as databases:
            measures = {f"jobs_{tasks}": partial(_jobs, databases, tasks, scale, counts) for tasks in scale.jobs}
            for tasks in (10, 100):
                measures[f"bare_{tasks}"] = partial(_bare, databases, tasks, scale, counts)
            if settings.rows is not None:
                fill_history(filled, settings.rows)
                measures["history"] = partial(_jobs, Files(settings, filled), 100, scale, counts, settings.rows)
            if postgres:
                # Beside the others, and no part of what the benchmark did.
                for tasks in scale.jobs:
                    measures[f"sqlite_{tasks}"] = partial(_jobs, files, tasks, scale, Counter())
            taken = take_turns(measures, scale.repetitions)
    seconds = {name: [one.seconds for one in samples] for name, samples in taken.items()}
    keys: dict[str, float | bool] = {}
    for tasks, jobs in scale.jobs.items():
        keys[f"rate_{tasks}"] = median_rate(jobs, seconds[f"jobs_{tasks}"])
    alone = [quantiles(one.latencies, n=20) for one in taken["jobs_1"]]
    keys["p50_1"] = median(cuts[9] for cuts in alone)
    keys["p95_1"] = median(cuts[18] for cuts in alone)
    keys["p99_100"] = median(quantiles(one.latencies, n=100)[98] for one in taken["jobs_100"])
    keys["commits_per_job_100"] = median(one.commits for one in taken["jobs_100"]) / scale.jobs[100]
    for tasks in (10, 100):
        keys[f"bare_rate_{tasks}"] = median_rate(scale.jobs[tasks], seconds[f"bare_{tasks}"])
        keys[f"bare_ratio_{tasks}"] = paired_ratio(seconds[f"bare_{tasks}"], seconds[f"jobs_{tasks}"])
    if postgres:
        _compare_with_files(scale, taken, seconds, keys)
    if settings.rows is not None:
        keys["history_ratio"] = paired_ratio(seconds["jobs_100"], seconds["history"])
    notes = (f"rate_100 / rate_1: {keys['rate_100'] / keys['rate_1']:.1f}",)
    return Figures(repetitions=scale.repetitions, counts=counts, keys=keys, notes=notes)


def _compare_with_files(
    scale: _Scale, taken: dict[str, list[_Sample]], seconds: dict[str, list[float]], keys: dict[str, float | bool]
) -> None:
    keys["mutations_per_commit_100"] = median(one.committed / one.commits for one in taken["jobs_100"])
    keys["sqlite_rate_100"] = median_rate(scale.jobs[100], seconds["sqlite_100"])
    for tasks in scale.jobs:
        keys[f"sqlite_ratio_{tasks}"] = paired_ratio(seconds[f"sqlite_{tasks}"], seconds[f"jobs_{tasks}"])


async def _body(_: Run[None], done: Iterator[int]) -> None:
    await trio.lowlevel.checkpoint()
    next(done)


async def _start_and_await(room: Room, jobs: int, done: Iterator[int], latencies: list[float]) -> None:
    for _ in range(jobs):
        began = time.perf_counter()
        job = await start_job(room, _body, done)
        await job.outcome()
        latencies.append(time.perf_counter() - began)


def _jobs(databases: Databases, tasks: int, scale: _Scale, counts: Counter[str], history: int = 0) -> _Sample:
    watch, done = Stopwatch(time.perf_counter), count()
    latencies: list[float] = []
    batches = (0, 0)

    async def measure() -> None:
        nonlocal batches
        async with databases.open_store(place) as store, open_room(store, name=ROOM) as room:
            commits, committed = store.commits, store.committed
            watch.start()
            async with trio.open_nursery() as nursery:
                for _ in range(tasks):
                    nursery.start_soon(_start_and_await, room, scale.jobs[tasks] // tasks, done, latencies)
            watch.stop()
            batches = (store.commits - commits, store.committed - committed)

    with databases.lend() as place:
        sample(measure)
        _count(counts, f"jobs_{tasks}", databases.count_stored(place), history, next(done))
    return _Sample(watch.seconds, latencies, *batches)


def _bare(databases: Databases, tasks: int, scale: _Scale, counts: Counter[str]) -> _Sample:
    watch = Stopwatch(time.perf_counter)
    with databases.lend() as place:
        sample(write_rows, databases.open_sink(place), scale.jobs[tasks], tasks, watch, make_jobs)
        _count(counts, f"bare_{tasks}", databases.count_stored(place), 0, scale.jobs[tasks])
    return _Sample(watch.seconds)


def _count(counts: Counter[str], name: str, stored: Counter[str], history: int, bodies: int) -> None:
    if history:
        # What a history changes is the time, so it is checked and not counted.
        name = f"{name}_history"
    found = Counter(
        {
            f"{name}_bodies": bodies,
            f"{name}_rows": stored["completed"] - history,
            f"{name}_witnesses": stored["witnesses"] - history,
            f"{name}_adapters": stored["adapters"],
        }
    )
    if not history:
        counts.update(found)
    elif len(set(found.values())) != 1:
        raise RuntimeError(f"over a history something is missing: {found}")
