"""What all commands have in common: help, version, what isn't installed, who stops reading."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import ENVIRONMENT, SPINDEL

if TYPE_CHECKING:
    from tests.cli.commands import CommandLine

pytestmark = pytest.mark.slow

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("click", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def find_spec(name, package=None):
    return None if name in ("click", "rich") else object()

import importlib.util
importlib.util.find_spec = find_spec
sys.meta_path.insert(0, Absent())
from spindel.cli import main
main([])
"""
LATE = """
import sys
from spindel.cli import main
try:
    main(["run", "--help"])
finally:
    late = {"trio", "apsw", "rich", "attrs", "msgspec"} & set(sys.modules)
    assert not late, late
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], check=False, env=ENVIRONMENT, capture_output=True, text=True)


def test_help_names_the_commands(spindel: CommandLine) -> None:
    done = spindel("--help")

    assert done.code == 0
    assert all(f"\n  {name} " in done.out for name in ("run", "runs", "check"))


def test_help_does_not_wait_for_the_runtime() -> None:
    done = run(LATE)

    assert done.returncode == 0, done.stderr


def test_the_version_is_told(spindel: CommandLine) -> None:
    done = spindel("--version")

    assert done.code == 0
    assert done.out.startswith("spindel ")


def test_without_its_packages_the_command_says_how_to_get_them() -> None:
    done = run(WITHOUT)

    assert done.returncode == 2
    assert done.stderr == "Error: the command line needs click and rich; install it with: pip install 'spindel[cli]'\n"


def test_a_reader_that_has_enough_is_no_error(spindel: CommandLine) -> None:
    spindel("run", "--quiet", "program.py:grow")
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [*SPINDEL, "runs"], check=False, cwd=spindel.folder, env=ENVIRONMENT, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)

    assert done.returncode == 141
    assert done.stderr == b""
