"""The command line in folders of its own: as whoever runs the tests, as an ordinary user, on a small disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import ENVIRONMENT, CommandLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORDINARY_USER = 65534


@pytest.fixture
def spindel(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line in an empty folder."""
    line = CommandLine(tmp_path)
    yield line
    line.close()


@pytest.fixture
def spindel_as_user() -> Iterator[CommandLine]:
    """The command line of somebody without root's powers, in a folder of root's that they may read."""
    with tempfile.TemporaryDirectory(prefix="spindel-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        line = CommandLine(folder, _become_ordinary())
        yield line
        line.close()


def _become_ordinary() -> list[str]:
    """Find what takes root's powers from a command; nothing is needed for an ordinary user."""
    if os.geteuid():
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv (util-linux) to run as an ordinary user")
    user = [setpriv, f"--reuid={ORDINARY_USER}", f"--regid={ORDINARY_USER}", "--clear-groups"]
    # Where the interpreter lies in root's own home nobody else can start it; root without its power over permissions
    # is then as ordinary as it gets.
    powerless = [setpriv, "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    for prefix in (user, powerless):
        probe = [*prefix, sys.executable, "-c", "import spindel, trio"]
        if subprocess.run(probe, check=False, env=ENVIRONMENT, capture_output=True).returncode == 0:
            return prefix
    pytest.skip("needs an interpreter that an ordinary user can start")


@pytest.fixture
def spindel_on_small_disk(tmp_path: Path) -> Iterator[Callable[..., CommandLine]]:
    """Make a command line on a disk of half a MiB, mounted anew for each command with `program.py` alone on it.

    Shell commands may come before and after; what they print is part of what the command prints.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = f'mount -t tmpfs -o size=512k tmpfs "{folder}"'
    try:
        works = subprocess.run([*unshare, "sh", "-c", mount], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("needs unshare and mount (root, or user namespaces) for a small disk")
    lines: list[CommandLine] = []

    def make(before: str = "true", after: str | None = None) -> CommandLine:
        enter = f'{mount} && cd "{folder}" && cp "{tmp_path}/program.py" . && {{ {before}; }}'
        run = 'exec "$@"' if after is None else f'"$@"; code=$?; {after}; exit $code'
        line = CommandLine(tmp_path, [*unshare, "sh", "-c", f"{enter}; {run}", "sh"])
        lines.append(line)
        return line

    yield make
    for line in lines:
        line.close()
