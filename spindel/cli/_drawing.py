"""Drawing a tree in a bounded number of lines, so that its shape shows.

The lines go to the upper levels first: of ten thousand directories the first hundred of a depth-first walk would be
one deep corner. What is left out is said where it is left out. Nothing here recurses; trees may be deep.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Rest", "draw"]

N = TypeVar("N")


@frozen
class Rest(Generic[N]):
    """Children of one node, or roots, that got no line."""

    nodes: Sequence[N]


def draw(
    roots: Sequence[N], children: Callable[[N], Sequence[N]], lines_max: int | None
) -> Iterator[tuple[str, N | Rest[N]]]:
    """Give the lines of a forest from the top: what to print in front, and the node or what was left out.

    Args:
        roots: from the top.
        children: of a node, from the top.
        lines_max: how many nodes get a line, None for all.
    """
    shown = _share_lines(roots, children, lines_max)
    # Each level: what stands before its lines, the nodes still to come, how many of them there are, what follows them.
    stack = [_Level("", iter(roots[: shown.get(None, len(roots))]), roots[shown.get(None, len(roots)) :], root=True)]
    while stack:
        level = stack[-1]
        node = level.take()
        if node is None:
            stack.pop()
            if level.rest:
                yield level.front(last=True), Rest(level.rest)
            continue
        last = level.following is None and not level.rest
        yield level.front(last=last), node
        below = children(node)
        if below:
            count = len(below) if lines_max is None else shown.get(id(node), 0)
            stack.append(_Level(level.indent(last=last), iter(islice(below, count)), below[count:]))


class _Level(Generic[N]):
    """The lines of one node's children that are still to be drawn."""

    def __init__(self, prefix: str, nodes: Iterator[N], rest: Sequence[N], *, root: bool = False) -> None:
        self._prefix = prefix
        self._nodes = nodes
        self._root = root
        self.rest = rest
        self.following = next(nodes, None)

    def take(self) -> N | None:
        node = self.following
        self.following = next(self._nodes, None)
        return node

    def front(self, *, last: bool) -> str:
        return "" if self._root else self._prefix + ("└── " if last else "├── ")

    def indent(self, *, last: bool) -> str:
        return "" if self._root else self._prefix + ("    " if last else "│   ")


def _share_lines(
    roots: Sequence[N], children: Callable[[N], Sequence[N]], lines_max: int | None
) -> dict[int | None, int]:
    """Give for each node how many of its children get a line; under None, how many roots do."""
    if lines_max is None:
        return {}
    shown: dict[int | None, int] = {None: min(len(roots), lines_max)}
    left = lines_max - shown[None]
    queue = deque(roots[: shown[None]])
    while queue and left:
        node = queue.popleft()
        below = children(node)
        count = shown[id(node)] = min(len(below), left)
        left -= count
        queue.extend(below[:count])
    return shown
