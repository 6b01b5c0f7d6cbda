"""On a terminal: the live tree is drawn, Ctrl-C works through the terminal, and the terminal is as it was afterwards."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import DEADLINE_SECONDS, ENVIRONMENT, SPINDEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.commands import CommandLine

pytestmark = pytest.mark.slow

HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
CONTROL_C = b"\x03"
ROWS = 12


class Terminal:
    """A terminal of twelve rows with a command in it."""

    def __init__(self, spindel: CommandLine, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, 100, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.shown = b""
        self.process = subprocess.Popen(
            # A session of its own with this terminal, which sends its Ctrl-C to whom it belongs.
            ["setsid", "--ctty", *SPINDEL, *arguments],
            cwd=spindel.folder,
            env={**ENVIRONMENT, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )

    def wait_for(self, wanted: bytes) -> None:
        """Read until something is shown that wasn't before."""
        start = len(self.shown)
        while wanted not in self.shown[start:]:
            ready, _, _ = select.select([self._ours], [], [], DEADLINE_SECONDS)
            assert ready, f"{wanted!r} did not come: {self.shown!r}"
            self.shown += os.read(self._ours, 65536)

    def press(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._ours, key)

    def finish(self) -> int:
        """Read what is left and give the exit code."""
        while self.process.poll() is None or select.select([self._ours], [], [], 0)[0]:
            if select.select([self._ours], [], [], 0.01)[0]:
                self.shown += os.read(self._ours, 65536)
        return self.process.wait()

    def attributes(self) -> list[object]:
        """How the terminal is set now."""
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        """Take it away."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_the_live_tree_is_drawn_and_ctrl_c_gives_the_terminal_back(
    spindel: CommandLine, terminals: list[Terminal]
) -> None:
    (spindel.folder / "wide.py").write_text(
        "import trio\n"
        "async def leaf(run, number):\n"
        "    run.report_progress(number, 30, 'counting')\n"
        "    await trio.sleep_forever()\n"
        "async def main(run):\n"
        "    for number in range(30):\n"
        "        name = {'name': f'leaf \\x1b[31m{number}'}\n"
        "        await run.start_child(leaf, number, kind='leaf', provenance=name)\n"
        "    await trio.sleep_forever()\n"
    )
    terminal = Terminal(spindel, "run", "wide.py:main")
    terminals.append(terminal)
    terminal.wait_for(b"31 running")
    terminal.wait_for(b"more")
    terminal.press(CONTROL_C)
    code = terminal.finish()

    assert code == 130
    assert b"leaf leaf \\x1b[31m0" in terminal.shown, "names are shown, and can't steer the terminal"
    assert b"29/30 counting" in terminal.shown
    assert b"SIGINT: 31 live Runs asked to stop" in terminal.shown
    assert b"cancelled (sigint): main wide.py:main" in terminal.shown
    assert terminal.shown.index(HIDE_CURSOR) < terminal.shown.rindex(SHOW_CURSOR)
    assert terminal.attributes() == terminal.before
    # One line of counts, and at most what is left of twelve rows.
    assert max(frame.count(b"\r\n") for frame in terminal.shown.split(b"31 running")[1:-1]) < ROWS


def test_leaving_at_once_shows_the_cursor_again(spindel: CommandLine, terminals: list[Terminal]) -> None:
    terminal = Terminal(spindel, "run", "--memory", "program.py:deaf")
    terminals.append(terminal)
    terminal.wait_for(b"1 running")
    terminal.press(CONTROL_C)
    terminal.wait_for(b"SIGINT: 1 live Run")
    terminal.press(CONTROL_C)
    terminal.wait_for(b"still there")
    terminal.press(CONTROL_C)
    code = terminal.finish()

    assert code == 130
    assert terminal.shown.rindex(HIDE_CURSOR) < terminal.shown.rindex(SHOW_CURSOR)
