"""SIGINT, SIGTERM and SIGUSR1 of `spindel run`, from before its function is loaded until the process has ended.

The first two are for the loop; the third leaves at once. It is counted in the handler itself and not in a task: a
function that blocks the loop is exactly what a third signal is for.

| phase | what a signal does |
|---|---|
| loading | raises `KeyboardInterrupt`: nothing was opened, and an import may hang |
| starting | waits until the loop listens |
| listening | goes to the loop |
| over | nothing: the outcome stands |

SIGUSR1 asks where everything is, which is told from the handler itself for the same reason.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
from typing import TYPE_CHECKING, Final

from spindel.cli._exit import code_of_signal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Signals"]

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)
_LEAVE_AT: Final = 3
_STDERR: Final = 2
_SHOW_CURSOR: Final = b"\x1b[?25h"
_LEFT: Final = b"\nLeft at once; what was running in a file is named as orphaned when its room is opened again.\n"


class Signals:
    """Counts signals and hands them on. Made once a process; it stays installed to the end."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._count = 0
        self._loading = True
        self._over = False
        self._pending: list[int] = []
        self._listener: Callable[[int], None] | None = None
        self._dump: Callable[[], None] | None = None

    def install(self) -> None:
        """Take the signals over."""
        for number in _NUMBERS:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGUSR1, self._tell)
        # While the interpreter is taken down it gives signals their old meaning back. By then nothing is left to be
        # interrupted, and a late signal must not turn a stored outcome into another exit code.
        atexit.register(_ignore)

    def loaded(self) -> None:
        """End the loading: from now on a signal waits for the loop."""
        self._loading = False

    def listen(self, listener: Callable[[int], None]) -> None:
        """Hand signals on, those that came meanwhile at once. The listener is called in the handler."""
        self._listener = listener
        pending, self._pending = self._pending, []
        for number in pending:
            listener(number)

    def dump_by(self, dump: Callable[[], None]) -> None:
        """Say what tells where everything is. It is called in the handler."""
        self._dump = dump

    def end(self) -> None:
        """Hand nothing on any more."""
        self._over = True
        self._listener = None
        self._dump = None

    def _tell(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  what the system calls
        if self._over:
            return
        try:
            if self._dump is not None:
                self._dump()
                return
        except Exception:  # noqa: BLE001  whoever asks gets the threads at least, and what was interrupted goes on
            self._dump = None
        # Nothing lives yet; but an import may hang.
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  what the system calls
        self._count += 1
        if self._count >= _LEAVE_AT:
            self._leave(number)
        if self._over:
            return
        if self.first is None:
            self.first = number
        if self._loading:
            raise KeyboardInterrupt
        if self._listener is None:
            self._pending.append(number)
        else:
            self._listener(number)

    def _leave(self, number: int) -> None:
        # Straight to the descriptor: the program may be anywhere, also inside a write of its own.
        try:
            os.write(_STDERR, _SHOW_CURSOR + _LEFT if os.isatty(_STDERR) else _LEFT)
        finally:
            os._exit(code_of_signal(number))


def _ignore() -> None:
    for number in (*_NUMBERS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
