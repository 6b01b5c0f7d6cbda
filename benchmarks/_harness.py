"""What every benchmark shares: settings, taking turns, watches, rooms on a disk, the checksum.

A benchmark is a module `bench_NAME.py` with a docstring whose first line is its question, and one function
`run(settings) -> Figures`. It may have `STORES`, the stores that it can be asked for, and `ROWS = True` if it can be
asked for a history. Nothing else has to be told: `python -m benchmarks` finds it.

Three habits make a figure mean the same on a noisy machine:

- What is compared takes turns in one process, forwards and backwards, and a ratio is the median of the ratios within
  a turn; so a slow minute meets both sides.
- Work of one thread is taken by process time, which a busy neighbour stretches least; work that waits for the disk by
  wall clock. The garbage collector runs before each sample, and stays on in it: what a program makes, it pays for.
- Each sample counts what it did and reads back what it stored. The counts are the checksum, so that a benchmark can't
  skip its work.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
import zlib
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, TypeVar

import apsw
import attrs
import trio

from spindel.errors import AdmissionError
from spindel.runs import Child, open_room

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence

    from spindel.runs import Room, Run
    from spindel.store import RunStatus

__all__ = [
    "GROUP",
    "ROOM",
    "Figures",
    "Settings",
    "Stopwatch",
    "checksum",
    "count_stored",
    "describe_machine",
    "file_system",
    "in_memory",
    "median_rate",
    "new_file",
    "opened_room",
    "paired_ratio",
    "read_back",
    "sample",
    "start_in_groups",
    "take_turns",
]

T = TypeVar("T")

ROOM: Final = "bench"
GROUP: Final = 256
"""How many children are started with one wait."""

_IN_MEMORY: Final = frozenset({"ramfs", "tmpfs"})


@attrs.frozen(kw_only=True)
class Settings:
    """What was asked for on the command line.

    Attributes:
        size: `small` finishes in seconds and is for tests; `large` is for measuring.
        store: `memory`, `sqlite` or `postgres`, None if the benchmark shall do what it does by itself.
        rows: how long a history the files begin with, None if it wasn't said.
        folder: an empty folder on a real disk.
    """

    size: str
    store: str | None
    rows: int | None
    folder: Path

    @property
    def large(self) -> bool:
        """True for the size that is for measuring."""
        return self.size == "large"


@attrs.frozen(kw_only=True)
class Figures:
    """What a benchmark gives back.

    Attributes:
        repetitions: how many turns were taken.
        counts: what was done and read back, for the checksum; equal settings give equal counts on every machine.
        keys: the figures by name: `_rate` is operations a second, `_seconds` seconds, `_bytes` bytes; `_ratio` and
            `_growth` have no unit.
        notes: lines for a reader, which `--json` leaves out.
    """

    repetitions: int
    counts: Counter[str]
    keys: dict[str, float | bool]
    notes: tuple[str, ...] = ()


def checksum(counts: Mapping[str, int]) -> str:
    """Sum up what was done: eight hexadecimal digits."""
    text = "\n".join(f"{name}={count}" for name, count in sorted(counts.items()))
    return f"{zlib.crc32(text.encode()):08x}"


# -- time --------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the stretches between `start` and `stop`."""

    __slots__ = ("_clock", "_since", "seconds")

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._since = 0.0
        self.seconds = 0.0

    def start(self) -> None:
        """Begin a stretch."""
        self._since = self._clock()

    def stop(self) -> None:
        """End it."""
        self.seconds += self._clock() - self._since


def sample(fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run an async function in a loop of its own, with nobody else's garbage."""
    gc.collect()
    return trio.run(fn, *args)


def take_turns(measures: Mapping[str, Callable[[], T]], repetitions: int) -> dict[str, list[T]]:
    """Call each measure once a turn, every other turn in the opposite order, and give all samples by name."""
    names = list(measures)
    samples: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(repetitions):
        if sys.stderr.isatty():
            print(f"turn {turn + 1} of {repetitions}", end="\r", file=sys.stderr, flush=True)
        for name in names if turn % 2 == 0 else reversed(names):
            samples[name].append(measures[name]())
    return samples


def median_rate(operations: int, seconds: Sequence[float]) -> float:
    """Give the operations a second of the median sample."""
    return operations / median(seconds)


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Give the median of the ratios within each turn."""
    return median(above / below for above, below in zip(over, under, strict=True))


# -- rooms -------------------------------------------------------------------------------------------------------------


@contextmanager
def new_file(folder: Path) -> Iterator[Path]:
    """Give the path of a database of its own, which is gone after the block."""
    with TemporaryDirectory(prefix="sample-", dir=folder) as place:
        yield Path(place) / "bench.db"


@asynccontextmanager
async def opened_room(settings: Settings) -> AsyncGenerator[Room]:
    """Open a room over the store that was asked for: one in memory if none was."""
    if settings.store == "sqlite":
        with new_file(settings.folder) as path:
            async with open_room(path, name=ROOM) as room:
                yield room
    else:
        async with open_room(name=ROOM) as room:
            yield room


async def start_in_groups(run: Run[Any], children: int, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Start so many children, 256 at a time, as somebody would who has many and a disk to wait for.

    Raises:
        AdmissionError: one of them was refused.
    """
    child = Child(fn, args)
    for first in range(0, children, GROUP):
        for started in await run.start_children([child] * min(GROUP, children - first)):
            if isinstance(started, AdmissionError):
                raise started


async def read_back(room: Room, status: RunStatus, **query: Any) -> int:
    """Count a room's rows of this status that have the witness of their return; `query` as in `Room.list_runs`."""
    count = 0
    page = await room.list_runs(status=status, limit=100, **query)
    while True:
        count += sum(1 for row in page.runs if row.family_return_ack is not None)
        if page.next is None:
            return count
        page = await room.list_runs(status=status, limit=100, before=page.next, **query)


def count_stored(path: Path | str) -> Counter[str]:
    """Count the rows of a closed file by status, all that have the witness of their return, and of their adapter."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        rows: list[Any] = connection.execute("SELECT status, count(*) FROM runs GROUP BY status").fetchall()
        counts: Counter[str] = Counter(dict(rows))
        counts["witnesses"] = connection.execute("SELECT count(family_return_ack) FROM runs").get
        counts["adapters"] = connection.execute("SELECT count(job_adapter_cleanup_ack) FROM runs").get
    finally:
        connection.close()
    return counts


# -- the machine -------------------------------------------------------------------------------------------------------


def file_system(folder: Path) -> str:
    """Name the kind of file system that a folder is on, as far as the system tells."""
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    place = str(folder.resolve())
    for line in mounts:
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and (place == point or place.startswith(point.rstrip("/") + "/")):
            best, kind = point, found
    return kind


def in_memory(folder: Path) -> bool:
    """Tell whether a folder only looks like a disk: what is synced there costs nothing and survives nothing."""
    return file_system(folder) in _IN_MEMORY


def describe_machine(folder: Path) -> str:
    """Say in one line what the figures were taken on."""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{platform.python_implementation()} {platform.python_version()}, trio {version('trio')}, "
        f"SQLite {apsw.sqlite_lib_version()}, disk {file_system(folder)}"
    )
