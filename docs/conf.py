"""How Sphinx builds these pages: `sphinx-build -W docs OUT`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spindel.runs import _states

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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


# Made from the tables that the code walks, so a page can't disagree with it.
myst_substitutions = {
    "lease_transitions": _transitions(_states.LEASE_NEXT),
    "room_transitions": _transitions(_states.ROOM_NEXT),
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
