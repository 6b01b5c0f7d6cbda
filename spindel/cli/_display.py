"""What `spindel run` shows while it runs, on standard error: nothing, plain lines, or (`_live`) a tree on a terminal.

A display only watches. It gets no say in what runs, and what it can't show it drops.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click
import trio

from spindel.cli._tally import Tally
from spindel.cli._text import clip, describe_counts, printable, seconds
from spindel.errors import WatchLaggedError
from spindel.runs import RoomState

if TYPE_CHECKING:
    from spindel.observe import RunProgress
    from spindel.runs import Room

__all__ = ["Display", "PlainDisplay", "WatchingDisplay", "describe_progress", "describe_tally", "log_to"]

_BUFFER: Final = 16_384
_LINE_SECONDS: Final = 2.0
_MESSAGE_CHARACTERS_MAX: Final = 100


class Display:
    """Shows nothing but warnings; the base of the others."""

    def say(self, text: str) -> None:
        """Tell news: a line for whoever looks."""

    def warn(self, text: str) -> None:
        """Tell what must not be missed."""
        # Whoever closed standard error doesn't want to know, and a Run must not fail for it.
        with suppress(OSError):
            click.echo(text, err=True)

    async def follow(self, room: Room, ready: trio.Event) -> None:  # noqa: ARG002  nothing to see
        """Watch the room until it ends; `ready` is set when nothing can be missed any more."""
        await trio.lowlevel.checkpoint()
        ready.set()

    def close(self) -> None:
        """Give the terminal back as it was."""


class WatchingDisplay(Display):
    """Follows a room's events, and refreshes now and then."""

    refresh_seconds = _LINE_SECONDS

    def __init__(self) -> None:
        self.tally = Tally()

    async def follow(self, room: Room, ready: trio.Event) -> None:
        """See `Display.follow`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, room, ready)
            while room.state not in (RoomState.CLOSED, RoomState.LOST):
                await trio.sleep(self.refresh_seconds)
                await self.refresh(room)

    async def refresh(self, room: Room) -> None:
        """Show how things stand."""
        raise NotImplementedError

    async def _listen(self, room: Room, ready: trio.Event) -> None:
        while True:
            async with room.watch(buffer=_BUFFER) as watch:
                self.tally.restart(watch.snapshot)
                ready.set()
                try:
                    async for event in watch:
                        self.tally.apply(event)
                except WatchLaggedError:
                    self.tally.exact = False
                    continue
                return


class PlainDisplay(WatchingDisplay):
    """A line every two seconds, if there is news."""

    def __init__(self) -> None:
        super().__init__()
        self._began = trio.current_time()
        self._last = ""

    def say(self, text: str) -> None:
        """See `Display.say`."""
        self.warn(text)

    async def refresh(self, room: Room) -> None:  # noqa: ARG002  the tally knows
        """See `WatchingDisplay.refresh`."""
        line = describe_tally(self.tally)
        if line != self._last:
            self._last = line
            self.say(f"{seconds(trio.current_time() - self._began)}: {line}")


def describe_tally(tally: Tally) -> str:
    """Write counts, holds and the last progress in one line."""
    text = describe_counts(tally.counts())
    if not tally.exact:
        text += " (at least)"
    if tally.held:
        text += f", {tally.held} held"
    if tally.progress is not None:
        text += f"; {describe_progress(tally.progress)}"
    return text


def describe_progress(progress: RunProgress) -> str:
    """Write how far a Run is."""
    done = f"{progress.done:,.12g}"
    text = done if progress.total is None else f"{done}/{progress.total:,.12g}"
    return f"{text} {clip(printable(progress.message), _MESSAGE_CHARACTERS_MAX)}".rstrip()


class _LogHandler(logging.Handler):
    """Shows the log of spindel, unless the program has taken logging into its own hands."""

    def __init__(self, display: Display, level: int) -> None:
        super().__init__(level)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self._display.warn(f"{record.levelname.lower()}: {printable(record.getMessage())}")


def log_to(display: Display, *, quiet: bool) -> logging.Handler:
    """Make the handler that shows what spindel logs."""
    return _LogHandler(display, logging.ERROR if quiet else logging.WARNING)
