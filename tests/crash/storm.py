"""A storm of signals on the example job: SIGINT, then SIGKILL, each at many moments of hashing 2,000 files.

`python -m tests.crash.storm --moments 50` runs it at full size; the suite runs a few moments. After each signal the
file must tell the truth:

- SIGINT: the exit code is 130, or 0 if the value was there already; no row is left running, no thread is left, the
  output is whole or not there, and the check passes.
- SIGKILL: whoever opens the room meanwhile is refused and told by whom it is held; the next opening names every row
  that was running as orphaned and changes no other; the check passes.
"""

# ruff: noqa: T201  a command prints

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pytest
import trio

from spindel.errors import RoomInUseError
from spindel.runs import open_reader, open_room
from spindel.store import RunStatus, SqliteStore
from tests.cli.commands import ENVIRONMENT, ROOT, Command, Finished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spindel.ids import RunId

DIRECTORIES: Final = 200
FILES_EACH: Final = 10
FILE_BYTES: Final = 16 * 1024
GOLDEN: Final = 0.6180339887498949

# As `spindel`, and then tells which threads are left. Idle workers of Trio's own cache don't count.
PROGRAM: Final = """
import sys, threading
from spindel.cli import main
try:
    main(sys.argv[1:])
finally:
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    left = [name for name in left if not name.startswith("Trio thread ")]
    if left:
        print("threads left:", left, file=sys.stderr)
"""


@attrs.frozen
class Job:
    """The job in a folder: a tree to hash, a file of rooms, an output."""

    folder: Path

    @property
    def db(self) -> Path:
        return self.folder / "runs.db"

    @property
    def out(self) -> Path:
        return self.folder / "out.txt"

    def prepare(self) -> float:
        """Make the tree, do the job once, and give how many seconds it took."""
        for number in range(DIRECTORIES):
            directory = self.folder / "tree" / f"{number % 14}" / f"{number}"
            directory.mkdir(parents=True)
            for file in range(FILES_EACH):
                (directory / f"{file}").write_bytes(f"{number} {file} ".encode() * (FILE_BYTES // 8))
        command = self.start()
        began = time.monotonic()
        assert command.finish().code == 0
        took = time.monotonic() - began
        assert self.out.read_bytes().count(b"\n") == DIRECTORIES * FILES_EACH
        return took

    def start(self) -> Command:
        """Start the job, and wait until its Run has begun."""
        self.out.unlink(missing_ok=True)
        target = f"{ROOT / 'docs' / 'examples' / 'hash_tree.py'}:main"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "run", "--db", "runs.db", target, "tree", "out.txt"],
            cwd=self.folder,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        command = Command(process)
        command.err.wait_line("run ")
        return command

    def interrupt(self, moment: float) -> int:
        """Send SIGINT after so many seconds; gives the exit code."""
        done = self._signal_at(moment, self.start(), signal.SIGINT)
        whole = DIRECTORIES * FILES_EACH

        assert done.code in {0, 130}, done
        assert "threads left" not in done.err, done
        assert "Traceback" not in done.err, done
        assert not self.out.exists() if done.code else self.out.read_bytes().count(b"\n") == whole, done
        assert {path.name for path in self.folder.iterdir()} <= {"tree", "runs.db", "out.txt"}, done
        assert trio.run(self._running) == set(), done
        trio.run(self._check)
        return done.code

    def kill(self, moment: float) -> int:
        """Kill it after so many seconds; gives how many Runs were cut off."""
        command = self.start()
        trio.run(self._find_it_in_use, command.process.pid)
        done = self._signal_at(moment, command, signal.SIGKILL)
        cut_off = trio.run(self._running)

        assert done.code in {0, -signal.SIGKILL}, done
        trio.run(self._adopt, cut_off)
        trio.run(self._check)
        assert trio.run(self._running) == set(), done
        return len(cut_off)

    def _signal_at(self, moment: float, command: Command, number: signal.Signals) -> Finished:
        try:
            command.process.wait(moment)
        except subprocess.TimeoutExpired:
            command.process.send_signal(number)
        return command.finish()

    async def _running(self) -> set[RunId]:
        found: set[RunId] = set()
        async with open_reader(self.db, name="main") as reader:
            page = await reader.list_runs(status=RunStatus.RUNNING, limit=100)
            found.update(record.id for record in page.runs)
            while page.next is not None:
                page = await reader.list_runs(status=RunStatus.RUNNING, before=page.next, limit=100)
                found.update(record.id for record in page.runs)
        return found

    async def _find_it_in_use(self, pid: int) -> None:
        with pytest.raises(RoomInUseError, match=f"in use by process {pid}"):
            async with open_room(self.db, name="main"):
                pass

    async def _adopt(self, cut_off: set[RunId]) -> None:
        async with open_room(self.db, name="main") as room:
            for run_id in cut_off:
                record = await room.load(run_id)
                assert record is not None
                assert (record.status, record.reason) == (RunStatus.FAILED, "orphaned"), record
                assert record.family_return_ack is None, record

    async def _check(self) -> None:
        async with SqliteStore(self.db, read_only=True) as store:
            report = await store.check()
        assert report.ok, report.findings


def moments(count: int, seed: float, duration: float) -> Iterator[float]:
    """Give moments that cover the duration evenly, wherever they begin."""
    for number in range(count):
        yield (seed + number * GOLDEN) % 1.0 * duration


def main() -> None:
    """Run the storm and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=float, default=int.from_bytes(os.urandom(4)) / 2**32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spindel-storm-") as name:
        job = Job(Path(name))
        duration = job.prepare()
        print(f"the job takes {duration:.2f} s; seed {options.seed}")
        codes = Counter(job.interrupt(moment) for moment in moments(options.moments, options.seed, duration))
        print(f"SIGINT at {options.moments} moments: exit codes {dict(codes)}")
        cut_off = [job.kill(moment) for moment in moments(options.moments, options.seed, duration)]
        print(f"SIGKILL at {options.moments} moments: {sum(cut_off)} Runs cut off, {max(cut_off)} at most at once")


if __name__ == "__main__":
    main()
