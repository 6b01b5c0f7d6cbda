"""Real processes of the command line, each under a deadline that only a fault reaches."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parent.parent.parent
DEADLINE_SECONDS = 60
SPINDEL = [sys.executable, "-m", "spindel"]
ENVIRONMENT: Mapping[str, str] = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "COLUMNS": "100",
}

PROGRAM = '''
"""What the tests of the command line run."""

import os
import threading
import trio
from spindel import RunWaiting

async def echo(run, *words):
    print("printed by the program")
    return {"words": list(words)}

async def text(run):
    return "a text"

async def nothing(run):
    pass

async def no_data(run):
    return {1}

async def fail(run):
    raise ValueError("no \\x1b[31mluck")

async def fail_often(run):
    raise ExceptionGroup("all", [ValueError("one"), ExceptionGroup("more", [KeyError("two"), KeyError("three")])])

async def fail_below(run):
    child = await run.start_child(fail)
    await child.result()

async def leave(run):
    raise SystemExit(7)

async def interrupt(run):
    raise KeyboardInterrupt

async def wait_for_more(run):
    raise RunWaiting("more")

async def stop_itself(run):
    run.cancel("enough")
    await trio.sleep_forever()

async def sleep(run):
    print("ready", flush=True)
    await trio.sleep_forever()

async def finish_late(run):
    returning = trio.Event()
    async def child(run):
        await returning.wait()  # its parent's task has gone on to its end by then, without a checkpoint between
        print("ready", flush=True)
        await trio.sleep_forever()
    await run.start_child(child)
    returning.set()
    return "done"

async def deaf(run):
    print("ready", flush=True)
    await run.run_native(threading.Event().wait)

async def block(run):
    print("ready", flush=True)
    while True:
        pass

async def hold(run):
    async def child(run):
        pass
    async def publish(outcome):
        raise OSError("nobody takes it")
    await run.start_child(child, kind="letter", publish=publish)

async def fill_disk(run):
    with open("filling", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass
    try:
        while True:
            await run.start_child(nothing)
    finally:
        os.unlink("filling")

async def grow(run):
    async def branch(run, depth):
        run.report_progress(depth, 3, "growing")
        if depth:
            for number in range(2):
                await run.start_child(branch, depth - 1, kind="branch", provenance={"name": f"twig {number}"})
    await run.start_child(branch, 3, kind="branch", provenance={"name": "stem\\x1b[31m"})

async def optional(run, first, second="x"):
    return first + second

async def endless(run, first, *rest):
    return [first, *rest]

async def keyword(run, *, needed):
    pass

async def without_run():
    pass

def plain(run):
    pass

async def generator(run):
    yield 1

number = 5
'''


@attrs.frozen
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The one object on standard output."""
        return json.loads(self.out)


class Stream:
    """One output of a command, read by a thread of its own, so that a command never waits for its reader."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._lines: list[str] = []
        self._fresh: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_line(self, start: str) -> str:
        """Wait for the next line that begins so, and give it."""
        while (line := self._fresh.get(timeout=DEADLINE_SECONDS)) is not None:
            if line.startswith(start):
                return line
        raise AssertionError(f"it ended without saying {start!r}: {self._lines}")

    def text(self) -> str:
        """Wait for the end and give everything."""
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "something still holds the pipe"
        return "".join(self._lines)

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self._lines.append(line)
                self._fresh.put(line)
        self._fresh.put(None)


class Command:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.out = Stream(process.stdout)
        self.err = Stream(process.stderr)

    def finish(self) -> Finished:
        """Wait for the end."""
        code = self.process.wait(DEADLINE_SECONDS)
        return Finished(code, self.out.text(), self.err.text())


class CommandLine:
    """Starts commands in one folder, which holds `program.py`.

    Args:
        folder: where they run.
        prefix: what they are started by, such as `setpriv`.
    """

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        self.folder = folder
        self._prefix = prefix
        self._started: list[subprocess.Popen[str]] = []
        (folder / "program.py").write_text(PROGRAM)

    def __call__(self, *arguments: str | bytes | Path) -> Finished:
        """Run a command to its end."""
        return self.start(*arguments).finish()

    def start(self, *arguments: str | bytes | Path) -> Command:
        """Start a command."""
        process = subprocess.Popen(
            [*self._prefix, *SPINDEL, *arguments],
            cwd=self.folder,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that nothing of it outlives a test
        )
        self._started.append(process)
        return Command(process)

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def contents(folder: Path) -> dict[str, bytes]:
    """Give a folder as a value: the name and the bytes of each file."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
