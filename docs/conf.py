"""How Sphinx builds these pages: `sphinx-build -W docs OUT`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from spindel.jobs import _stages
from spindel.runs import _states

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from sphinx.application import Sphinx

_ROOT = Path(__file__).parent.parent

project = "spindel"
author = "The spindel authors"
project_copyright = "The spindel authors"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"spindel {release}"

myst_enable_extensions = ["deflist", "substitution"]
myst_heading_anchors = 3


def _transitions(table: Mapping[Any, Collection[Any]]) -> str:
    """Render a table of states as a table of the page, in the order in which the states are declared."""
    rows = [
        f"| `{state}` | {', '.join(f'`{item}`' for item in type(state) if item in following) or 'the end'} |"
        for state, following in table.items()
    ]
    return "\n".join(["| From | To |", "|---|---|", *rows])


_FACTS = {
    _stages.Stage.FAMILY_JOIN: "the family, seen to have returned",
    _stages.Stage.RELEASE: "the lease, seen to be gone",
}


def _attest(stage: _stages.Stage) -> str:
    """Tell what an acknowledgement of a held stage needs."""
    needs = _stages.ACKNOWLEDGED_BY.get(stage)
    match needs:
        case None:
            return "never held"
        case _stages.AcknowledgedBy.WORD:
            return "your word"
        case _stages.AcknowledgedBy.ROW:
            return "its exact write, found in the row"
        case _stages.AcknowledgedBy.FACT:
            return _FACTS[stage]
        case _:
            assert_never(needs)


def _stage_table() -> str:
    """Render the stages as they follow each other: what their module says of each, and what attests it if it is held."""
    told = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", _stages.__doc__ or "", re.MULTILINE))
    told[_stages.Stage.WORK] = "`fn(run, ...)`; its end decides the outcome | running"
    rows = [f"| `{stage}` | {told[stage]} | {_attest(stage)} |" for stage in _stages.STAGE_NEXT]
    return "\n".join(["| Stage | Effect | Row afterwards | If held, acknowledged by |", "|---|---|---|---|", *rows])


# Made from the tables that the code walks, so a page can't disagree with it.
myst_substitutions = {
    "lease_transitions": _transitions(_states.LEASE_NEXT),
    "room_transitions": _transitions(_states.ROOM_NEXT),
    "stage_table": _stage_table(),
    "ticket_transitions": _transitions(_states.TICKET_NEXT),
}

# A single backtick in a docstring is code, as in Markdown.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Cancellation", "Durability"]
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"


def _convert_tables(lines: list[str]) -> Iterator[str]:
    """Turn the Markdown tables of a docstring, which read well in the source, into what Sphinx understands."""
    previous = ""
    for number, line in enumerate(lines):
        is_row = line.startswith("|")
        if is_row and not previous.startswith("|"):
            yield from (
                ".. list-table::",
                "   :header-rows: 1" if "|--" in "".join(lines[number + 1 :][:1]) else "",
                "",
            )
        if is_row and not line.startswith("|--"):
            for column, cell in enumerate(line.strip("|").split("|")):
                yield f"   {'  ' if column else '* '}- {cell.strip()}"
        if not is_row:
            yield line
        previous = line


def _process_docstring(*arguments: object) -> None:
    lines = arguments[-1]
    assert isinstance(lines, list)
    lines[:] = _convert_tables(lines)


def setup(app: Sphinx) -> None:
    """Let Sphinx call this page's own hook."""
    app.connect("autodoc-process-docstring", _process_docstring)
