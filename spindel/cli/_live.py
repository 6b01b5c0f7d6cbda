"""The live tree on a terminal: the upper levels of what is alive, with counts and progress."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spindel.cli._display import WatchingDisplay, describe_progress, describe_tally
from spindel.cli._drawing import Rest, draw
from spindel.cli._text import describe_name, printable, seconds

if TYPE_CHECKING:
    from spindel.cli._tally import Node
    from spindel.runs import Room

__all__ = ["LiveDisplay"]

_REFRESH_SECONDS: Final = 0.1
_LINES_MAX: Final = 20
_LINES_BESIDE: Final = 4
"""Lines of a small terminal that the tree leaves free: the counts, and what is said above."""
_STYLES: Final = {"running": "green", "cancelling": "yellow"}


class LiveDisplay(WatchingDisplay):
    """Draws the tree anew ten times a second, from the loop: no thread of the display ever runs beside it."""

    refresh_seconds = _REFRESH_SECONDS

    def __init__(self) -> None:
        super().__init__()
        self._began = trio.current_time()
        self._console = Console(stderr=True, highlight=False)
        # What the program prints goes above the tree; but not what goes to a file or another program.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._live.start()

    def say(self, text: str) -> None:
        """See `Display.say`."""
        self.warn(text)

    def warn(self, text: str) -> None:
        """See `Display.warn`."""
        with suppress(OSError):
            self._console.print(Text(text))

    def close(self) -> None:
        """See `Display.close`."""
        with suppress(OSError):
            self._live.update(Text(""))
            self._live.stop()

    async def refresh(self, room: Room) -> None:
        """See `WatchingDisplay.refresh`."""
        rows = self._rows(max(1, min(_LINES_MAX, self._console.height - _LINES_BESIDE)))
        for _, row in rows:
            if not isinstance(row, Rest) and row.name is None:
                await self._look_up(room, row)
        now = time.time_ns() // 1000
        elapsed = seconds(trio.current_time() - self._began)
        counts = Text(f"{elapsed}  {describe_tally(self.tally)}", style="bold", no_wrap=True, overflow="ellipsis")
        lines = [counts, *(self._line(prefix, row, now) for prefix, row in rows)]
        with suppress(OSError):
            self._live.update(Group(*lines), refresh=True)

    def _rows(self, lines_max: int) -> list[tuple[str, Node | Rest[Node]]]:
        """Choose as many nodes as fit, with the lines that tell what was left out."""
        roots = list(self.tally.roots.values())
        # A family may be large, so it is copied once, not for each try.
        families: dict[int, list[Node]] = {}

        def children(node: Node) -> list[Node]:
            family = families.get(id(node))
            if family is None:
                family = families[id(node)] = list(node.children.values())
            return family

        nodes_max = lines_max
        while True:
            rows = list(draw(roots, children, nodes_max))
            if len(rows) <= lines_max or nodes_max == 1:
                return rows
            nodes_max -= 1

    async def _look_up(self, room: Room, node: Node) -> None:
        """Find a Run's name: events don't have it, its row does."""
        record = await room.load(node.id)
        node.name = printable(node.kind) if record is None else describe_name(record.kind, record.provenance)

    def _line(self, prefix: str, row: Node | Rest[Node], now: int) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis").append(prefix, style="dim")
        if isinstance(row, Rest):
            return line.append(f"… {len(row.nodes):,} more", style="dim")
        line.append(row.name or printable(row.kind), style=_STYLES.get(row.status, ""))
        if row.status != "running":
            line.append(f" {row.status}", style=_STYLES.get(row.status, ""))
        line.append(f"  {seconds(max(0, now - row.started_at) / 1e6)}")
        # The last progress of all stands in the line of counts; where it is the root's, once is enough.
        if row.progress is not None and row.progress is not self.tally.progress:
            line.append(f"  {describe_progress(row.progress)}")
        return line
