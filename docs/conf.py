"""How Sphinx builds these pages: `sphinx-build -W docs OUT`."""

from __future__ import annotations

import tomllib
from pathlib import Path

_ROOT = Path(__file__).parent.parent

project = "spindel"
author = "The spindel authors"
project_copyright = "The spindel authors"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"spindel {release}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

# A single backtick in a docstring is code, as in Markdown.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Cancellation", "Durability"]
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
