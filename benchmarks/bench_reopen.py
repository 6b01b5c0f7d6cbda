"""How long does it take to open a room again, over a long history and over what a killed process left running?

| key | what | unit |
|---|---|---|
| `open_growth` | time of opening over the longest history / over the shortest | |
| `orphan_rate` | orphans fenced, over the whole time of the openings that fenced them | rows/s |

Histories of 1,000, 100,000 and 1,000,000 finished rows (`--rows N`: the longest), each with 1,000 orphans: its oldest
rows, which stand as running again before each opening.

Held fixed: the same file for all turns, its journal moved into it before each opening. By wall clock, from the call
until the room's gate is open: the file recognised, the writer and the reader started, the room claimed and, with
orphans, those fenced, all durable.

Non-goals: the first opening of a file in the life of a machine, whose pages come from the disk.

Sketch: opening reads the schema, the migrations, the room's row and, through an index that has running rows only, the
orphans; so the history doesn't matter. Two commits, four hops to a thread; with orphans two more statements of 500
rows, each row changed in its table and its index.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

import attrs
import trio

from benchmarks._databases import make_file
from benchmarks._harness import (
    ROOM,
    Figures,
    Settings,
    Stopwatch,
    count_stored,
    median_rate,
    new_file,
    paired_ratio,
    sample,
    take_turns,
)
from benchmarks._history import fill_history, orphan
from spindel.runs import open_room

if TYPE_CHECKING:
    from pathlib import Path

STORES: Final = ("sqlite",)
ROWS: Final = True


@attrs.frozen
class _Scale:
    histories: tuple[int, ...]
    orphans: int
    repetitions: int


_SMALL: Final = _Scale(histories=(300, 1_000, 3_000), orphans=300, repetitions=1)
_LARGE: Final = _Scale(histories=(1_000, 100_000, 1_000_000), orphans=1_000, repetitions=9)


@attrs.frozen
class _Opening:
    """How long opening took, and opening again over the same rows when nothing was left to fence."""

    with_orphans: float
    without: float


def run(settings: Settings) -> Figures:
    """Measure."""
    scale = _LARGE if settings.large else _SMALL
    histories = scale.histories if settings.rows is None else (*scale.histories[:-1], settings.rows)
    counts: Counter[str] = Counter()
    with ExitStack() as files:
        paths = {rows: files.enter_context(new_file(settings.folder)) for rows in histories}
        for rows, path in paths.items():
            trio.run(make_file, path)
            fill_history(path, rows + scale.orphans)
        openings = take_turns(
            {str(rows): partial(_open, path, scale.orphans, counts) for rows, path in paths.items()}, scale.repetitions
        )
        for rows, path in paths.items():
            stored = count_stored(path)
            counts[f"completed_of_{rows}"] += stored["completed"]
            counts[f"orphaned_of_{rows}"] += stored["failed"]
    shortest, *_, longest = ([opening.with_orphans for opening in taken] for taken in openings.values())
    everywhere = [opening.with_orphans for taken in openings.values() for opening in taken]
    return Figures(
        repetitions=scale.repetitions,
        counts=counts,
        keys={"open_growth": paired_ratio(longest, shortest), "orphan_rate": median_rate(scale.orphans, everywhere)},
        notes=tuple(
            f"{int(rows):>9,} rows: {median(o.with_orphans for o in taken) * 1000:6.1f} ms with orphans, "
            f"{median(o.without for o in taken) * 1000:6.1f} ms without"
            for rows, taken in openings.items()
        ),
    )


def _open(path: Path, orphans: int, counts: Counter[str]) -> _Opening:
    orphan(path, orphans)
    counts["orphans"] += count_stored(path)["running"]
    with_orphans = sample(_time_opening, path)
    stored = count_stored(path)
    counts["fenced"] += stored["failed"]
    counts["still_running"] += stored["running"]
    return _Opening(with_orphans, sample(_time_opening, path))


async def _time_opening(path: Path) -> float:
    watch = Stopwatch(time.perf_counter)
    watch.start()
    async with open_room(path, name=ROOM):
        watch.stop()
    return watch.seconds
