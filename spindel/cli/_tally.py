"""What a room's events come to: the live Runs as a tree, and how many have ended how. Bounded by what is alive."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import define, field

from spindel.observe import RunCancelRequested, RunFinished, RunHeld, RunProgress, RunRecovered, RunStarted

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.observe import RoomEvent
    from spindel.runs import RoomSnapshot

__all__ = ["Node", "Tally"]


@define(eq=False)
class Node:
    """A live Run.

    Attributes:
        name: kind and name for people, None until its row was looked at.
        started_at: UTC microseconds.
        progress: what it told last.
    """

    id: RunId
    parent: Node | None
    kind: str
    started_at: int
    status: str = "running"
    name: str | None = None
    progress: RunProgress | None = None
    children: dict[RunId, Node] = field(factory=dict["RunId", "Node"])


class Tally:
    """Follows one room.

    Attributes:
        ended: how many Runs ended, by status.
        exact: False once events were missed, so that more may have ended than were seen.
        now: the time of the last event, UTC microseconds.
        progress: what any Run told last.
        held: how many holds there are.
    """

    def __init__(self) -> None:
        self.live: dict[RunId, Node] = {}
        self.roots: dict[RunId, Node] = {}
        self.ended: Counter[str] = Counter()
        self.exact = True
        self.held = 0
        self.progress: RunProgress | None = None

    def counts(self) -> dict[str, int]:
        """Give how many Runs have each status, so far."""
        counts = dict(self.ended)
        if self.live:
            counts["running"] = len(self.live)
        return counts

    def restart(self, snapshot: RoomSnapshot) -> None:
        """Begin again from a snapshot; names and progress of Runs that still live are kept."""
        before, self.live, self.roots = self.live, {}, {}
        for run in snapshot.runs:
            node = self._add(run.id, run.parent_id, run.kind, run.started_at)
            node.status = run.status.value
            if run.id in before:
                node.name, node.progress = before[run.id].name, before[run.id].progress

    def apply(self, event: RoomEvent) -> None:
        """Take an event."""
        match event:
            case RunStarted():
                self._add(event.run_id, event.parent_id, event.kind, event.at)
            case RunFinished():
                self.ended[event.status] += 1
                self._remove(event.run_id)
            case RunProgress():
                self.progress = event
                if event.run_id in self.live:
                    self.live[event.run_id].progress = event
            case RunCancelRequested():
                if event.run_id in self.live:
                    self.live[event.run_id].status = "cancelling"
            case RunHeld():
                # Held again after a failed recovery it is still one hold.
                self.held += not event.again
            case RunRecovered():
                self.held -= 1
            case _:
                pass

    def _add(self, run_id: RunId, parent_id: RunId | None, kind: str, started_at: int) -> Node:
        parent = None if parent_id is None else self.live.get(parent_id)
        node = self.live[run_id] = Node(run_id, parent, kind, started_at)
        (self.roots if parent is None else parent.children)[run_id] = node
        return node

    def _remove(self, run_id: RunId) -> None:
        node = self.live.pop(run_id, None)
        if node is not None:
            (self.roots if node.parent is None else node.parent.children).pop(run_id, None)
