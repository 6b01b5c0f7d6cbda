"""Every Python block of the README and of `docs/` is a program that works and prints what the page says.

The blocks of one page are one program: they run in order, in one namespace, in an empty folder. A `text` block right
after a `python` block is what that block prints. A failing line shows in the traceback with its place on the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A Python block of a page.

    Attributes:
        line: how many lines of the page come before its first one.
        printed: what the page says that it prints, or None if the page says nothing.
    """

    line: int
    code: str
    printed: str | None


def blocks_of(text: str) -> Iterator[Block]:
    fences = list(FENCE.finditer(text))
    for index, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        printed = None
        if index + 1 < len(fences):
            following = fences[index + 1]
            if following[1] == "text" and not text[fence.end() : following.start()].strip():
                printed = following[2]
        yield Block(text.count("\n", 0, fence.start(2)), fence[2], printed)


def run_page(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(path.read_text()):
        exec(compile("\n" * block.line + block.code, path, "exec"), namespace)
        printed = capsys.readouterr().out
        if block.printed is not None:
            assert printed == block.printed, f"the block at {path.name}:{block.line} prints something else"


def marks_of(text: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.postgres] if "PostgresCluster" in text else []


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=str(path.relative_to(ROOT)), marks=marks_of(text))
        for path in PAGES
        if "```python" in (text := path.read_text())
    ],
)
def test_blocks_of_the_page_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    run_page(path, capsys)


def test_a_failing_block_tells_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nprint(x)\nraise KeyError(x)\n```\n")

    with pytest.raises(KeyError) as caught:
        run_page(page, capsys)

    assert caught.traceback[-1].path == page
    assert caught.traceback[-1].lineno == 8


def test_a_block_that_prints_something_else_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")

    with pytest.raises(AssertionError, match="prints something else"):
        run_page(page, capsys)
