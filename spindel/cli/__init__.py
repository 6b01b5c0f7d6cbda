"""The command `spindel`: each command parses, calls and prints; the rules stand in the layers below.

Nothing here imports Trio or the store before a command needs them, so that `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from spindel.cli._streams import open_closed_streams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main"]

_NEEDED = ("click", "rich")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code.

    Args:
        arguments: what follows the program's name; those of the process by default.
    """
    open_closed_streams()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"Error: the command line needs {' and '.join(missing)}; install it with: pip install 'spindel[cli]'\n"
        )
        sys.exit(2)
    from spindel.cli._main import run_command_line

    sys.exit(run_command_line(arguments))
