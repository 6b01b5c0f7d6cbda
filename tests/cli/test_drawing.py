"""Trees in a bounded number of lines."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import pytest

from spindel.cli._drawing import Rest, draw


@attrs.define(eq=False)
class Node:
    name: str
    children: list[Node]


Shape: TypeAlias = "dict[str, Shape]"


def grow(shape: Shape) -> list[Node]:
    return [Node(name, grow(below)) for name, below in shape.items()]


def drawn(shape: Shape, lines_max: int | None = None) -> list[str]:
    lines = draw(grow(shape), lambda node: node.children, lines_max)
    return [prefix + (f"+{len(row.nodes)}" if isinstance(row, Rest) else row.name) for prefix, row in lines]


SHAPE: Shape = {"a": {"b": {"c": {}, "d": {}}, "e": {"f": {}}}, "g": {}}


def test_a_whole_forest_is_drawn_with_its_branches() -> None:
    assert drawn(SHAPE) == ["a", "├── b", "│   ├── c", "│   └── d", "└── e", "    └── f", "g"]


def test_few_lines_go_to_the_upper_levels_and_the_rest_is_counted_where_it_is() -> None:
    assert drawn(SHAPE, 4) == ["a", "├── b", "│   └── +2", "└── e", "    └── +1", "g"]
    assert drawn(SHAPE, 3) == ["a", "├── b", "│   └── +2", "└── +1", "g"]
    assert drawn(SHAPE, 1) == ["a", "└── +2", "+1"]


@pytest.mark.parametrize("lines_max", range(1, 9))
def test_no_more_nodes_than_asked_for_get_a_line(lines_max: int) -> None:
    nodes = [line for line in drawn(SHAPE, lines_max) if "+" not in line]

    assert len(nodes) == min(lines_max, 7)


def test_an_empty_forest_has_no_lines() -> None:
    assert drawn({}) == []
    assert drawn({}, 5) == []


def test_a_deep_tree_needs_no_stack() -> None:
    root = node = Node("0", [])
    for level in range(1, 5_000):
        node.children.append(Node(str(level), []))
        node = node.children[0]

    assert sum(1 for _ in draw([root], lambda node: node.children, None)) == 5_000
