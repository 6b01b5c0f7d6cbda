"""The sessions of a page, run again in a real shell: `console` blocks, and the files that the page tells to save.

The blocks of one page are one session: they run in order, in one shell, in an empty folder. A code block with a caption
is a file of that name. A line that begins with `$ ` is a command, and what follows is what it prints, all of it; what a
command in the background prints follows that command, or whatever the page shows before it goes on, and ends at `wait`.
Ids, times and durations differ from run to run: an id stands for the same one wherever the page shows it, in commands,
too; of times and durations only the form is compared. Lines of progress are left out.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, NamedTuple

from tests.cli.commands import DEADLINE_SECONDS, ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CAPTION = re.compile(r":caption: (\S+)\n+")
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
VARYING = re.compile(
    rf"(?P<id>{UUID})|(?P<time>\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d)|(?P<duration>\d[\d.,]* (?:ms|s|min)\b)|(?P<pid>process \d+)"
)
FORMS = {"time": r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "duration": r"[\d.,]+ (?:ms|s|min)", "pid": r"process \d+"}
# Progress comes by the clock; and that it has killed something the shell tells at a moment and in a form of its own.
NOT_SHOWN = re.compile(r"[\d.]+ (?:s|min|h): |bash: .*\bKilled\b")
END = "\x01"


class Step(NamedTuple):
    """A command of a page, or a file, or what the background goes on to print.

    Attributes:
        line: where it stands on the page, for messages.
        command: None where only the background prints.
        file: the name of a file whose text is in `text`.
    """

    line: int
    command: str | None
    file: str | None
    text: str


def steps_of(page: str) -> Iterator[Step]:
    """Give the steps of a page."""
    for fence in FENCE.finditer(page):
        line = page.count("\n", 0, fence.start(2)) + 1
        caption = CAPTION.match(fence[2])
        if caption is not None:
            yield Step(line, None, caption[1], fence[2][caption.end() :])
        elif fence[1] == "console":
            yield from _commands_of(fence[2], line)


def _commands_of(block: str, line: int) -> Iterator[Step]:
    for part in re.finditer(r"(?:^\$ ((?:.*\\\n)*.*)\n)?((?:^(?!\$ ).*\n)*)", block, re.MULTILINE):
        if part[0]:
            yield Step(line + block.count("\n", 0, part.start()), part[1], None, part[2])


class Session:
    """A shell in a folder, as in an activated environment that lies in `.venv`."""

    def __init__(self, folder: Path) -> None:
        tools = folder / ".venv" / "bin"
        tools.mkdir(parents=True)
        for name, command in (("spindel", "-m spindel"), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            (tools / name).chmod(0o755)
        receive, send = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", "while read -r -d '' line; do eval \"$line\"; done"],
            cwd=folder,
            env={**ENVIRONMENT, "PATH": f"{tools}:{os.environ['PATH']}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=(send,),
            start_new_session=True,
        )
        os.close(send)
        self._to_background = send  # its number in the shell
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._foreground = _Lines(self._process.stdout)
        self._background = _Lines(os.fdopen(receive))
        self._folder = folder
        self._ids: dict[str, str] = {}

    def run(self, page: str, name: str) -> None:
        """Run a page, and compare what it says with what there is.

        Raises:
            AssertionError: something else was printed.
        """
        for step in steps_of(page):
            if step.file is not None:
                (self._folder / step.file).write_text(step.text)
                continue
            expected = step.text.splitlines()
            printed: list[str]
            if step.command is None:
                printed = [self._background.next() for _ in expected]
            else:
                printed = self.execute(self._translate(step.command), len(expected))
            same = len(printed) == len(expected) and all(map(self._matches, expected, printed))
            assert same, f"{name}:{step.line}: {step.command}\nsays:\n{step.text}\nprints:\n" + "\n".join(printed)
        self._send(f"printf '{END}\\n' 1>&{self._to_background}")
        rest = self._background.until_end()
        assert not rest, f"{name} doesn't show what was printed in the background:\n" + "\n".join(rest)

    def execute(self, command: str, lines: int = 0) -> list[str]:
        """Run a command; give what it printed, or so many lines of it if it goes on in the background."""
        if command.endswith(" &"):
            self._send(f"{command[:-2]} 1>&{self._to_background} 2>&1 &")
            return [self._background.next() for _ in range(lines)]
        if command == "wait":
            self._send(f"wait; printf '{END}\\n' 1>&{self._to_background}")
            return self._background.until_end()
        if command.startswith("kill -9 "):
            command += "; wait $!"  # it is dead before the next command
        # A line of its own for the end, since not all that is printed ends with one.
        self._send(f"{{ {command}\n}} </dev/null {self._to_background}>&-; printf '\\n{END}\\n'")
        printed = self._foreground.until_end()
        return printed[:-1] if printed[-1] == "" else printed

    def close(self) -> None:
        """End the shell and all that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_SECONDS)
        self._stdin.close()
        self._foreground.close()
        self._background.close()

    def _send(self, line: str) -> None:
        self._stdin.write(line + "\0")
        self._stdin.flush()

    def _translate(self, command: str) -> str:
        return re.sub(UUID, lambda found: self._ids.get(found[0], found[0]), command)

    def _matches(self, expected: str, printed: str) -> bool:
        """Compare a line; ids that the page shows for the first time stand from now on for those that were printed."""
        form, shown, end = "", [], 0
        for found in VARYING.finditer(expected):
            form += re.escape(expected[end : found.start()])
            end = found.end()
            kind = found.lastgroup or ""
            if kind != "id":
                form += FORMS[kind]
            else:
                shown.append(found[0])
                form += f"({UUID})"
        match = re.fullmatch(form + re.escape(expected[end:]), printed)
        if match is None:
            return False
        return all(
            self._ids.setdefault(mine, theirs) == theirs for mine, theirs in zip(shown, match.groups(), strict=True)
        )


class _Lines:
    """Reads a stream by a thread of its own, so that nobody who prints waits for its reader."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self) -> str:
        return self._lines.get(timeout=DEADLINE_SECONDS)

    def until_end(self) -> list[str]:
        return list(iter(self.next, END))

    def close(self) -> None:
        """Wait for the end of the stream."""
        self._thread.join(DEADLINE_SECONDS)

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                if not NOT_SHOWN.match(line):
                    self._lines.put(line.rstrip("\n"))
