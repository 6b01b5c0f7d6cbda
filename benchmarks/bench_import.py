"""What does it cost to have spindel at all: the seconds of its import, the memory of an idle room?

| key | what | unit |
|---|---|---|
| `import_seconds` | importing all that a program with a durable room needs | s |
| `import_ratio` | the same / importing Trio alone | |
| `idle_megabytes` | resident memory of a process with an open, idle, durable room | MB |
| `idle_ratio` | the same / a process in which Trio alone is idle | |

Held fixed: each sample is a new process of the same interpreter, whose compiled files are there already. The import is
timed inside it, so the interpreter's own start is not in it; the memory is the peak that the system has seen.

Non-goals: the command line, which imports the runtime late.

Sketch: Trio is the larger half of either. On top come attrs, msgspec and apsw, SQLite's page cache, two threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from statistics import median
from typing import Final

import attrs

from benchmarks._harness import Figures, Settings, new_file, paired_ratio, take_turns

_SCRIPT: Final = """\
import json, resource, sys, time
since = time.perf_counter()
{imports}
seconds = time.perf_counter() - since
async def idle():
    {idle}
    return 1
opened = trio.run(idle)
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([seconds, kilobytes / 1024, opened]))
"""
_TRIO: Final = _SCRIPT.format(imports="import trio", idle="await trio.lowlevel.checkpoint()")
_SPINDEL: Final = _SCRIPT.format(
    imports="import trio\nfrom spindel.runs import open_room",
    idle="async with open_room(sys.argv[1], name='bench'): await trio.lowlevel.checkpoint()",
)


@attrs.frozen
class _Idle:
    """What one process saw."""

    seconds: float
    megabytes: float


def run(settings: Settings) -> Figures:
    """Measure."""
    repetitions = 15 if settings.large else 2
    counts: Counter[str] = Counter()
    taken = take_turns(
        {
            name: partial(_start, settings, name, script, counts)
            for name, script in (("trio", _TRIO), ("room", _SPINDEL))
        },
        repetitions,
    )
    trio_, room = taken["trio"], taken["room"]
    return Figures(
        repetitions=repetitions,
        counts=counts,
        keys={
            "import_seconds": median(idle.seconds for idle in room),
            "import_ratio": paired_ratio([idle.seconds for idle in room], [idle.seconds for idle in trio_]),
            "idle_megabytes": median(idle.megabytes for idle in room),
            "idle_ratio": paired_ratio([idle.megabytes for idle in room], [idle.megabytes for idle in trio_]),
        },
    )


def _start(settings: Settings, name: str, script: str, counts: Counter[str]) -> _Idle:
    with new_file(settings.folder) as path:
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], check=True, capture_output=True, encoding="utf-8"
        )
        counts[f"{name}_files"] += path.exists()
    seconds, megabytes, opened = json.loads(done.stdout)
    counts[f"{name}_opened"] += opened
    return _Idle(seconds, megabytes)
