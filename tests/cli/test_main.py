"""What all commands have in common: help, version, what isn't installed, who stops reading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import DEADLINE_SECONDS, ENVIRONMENT, SPINDEL

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


def run_redirected(spindel: CommandLine, arguments: str, redirection: str) -> tuple[int, str, str]:
    """Run a command with redirected streams; gives its code and what came out where nothing was redirected."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {arguments} {redirection}', "sh", *SPINDEL],
        check=False,
        cwd=spindel.folder,
        # Without buffers the program itself would meet the error, and its Run fail.
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run program.py:echo", 0),
        ("run --json program.py:echo", 0),
        ("run program.py:fail", 1),
        ("check", 0),
        ("runs", 0),
        ("runs --wrong", 2),
        ("--help", 0),
    ],
)
def test_a_closed_stream_changes_nothing(spindel: CommandLine, command: str, code: int, redirection: str) -> None:
    """R-20: what was closed leads nowhere, and the work is done and told by the exit code all the same."""
    assert spindel("run", "program.py:nothing").code == 0
    before = read_statuses(spindel)
    ended, out, err = run_redirected(spindel, command, redirection)

    assert ended == code
    assert "Traceback" not in err
    assert bool(out) == (code != 2 and ">&-" not in redirection.replace("2>&-", ""))
    began = {"run program.py:fail": ["failed"]}.get(command, ["completed"] if command.startswith("run ") else [])
    assert read_statuses(spindel) == began + before


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run program.py:nothing", 0),
        ("run program.py:echo", 0),
        ("run --json program.py:echo", 0),
        ("run --quiet program.py:text", 0),
        ("run program.py:fail", 1),
        ("check", 0),
        ("check --json", 0),
        ("runs", 1),
        ("runs --json", 1),
        ("runs --tree", 1),
        ("--help", 1),
        ("--version", 1),
    ],
)
def test_a_full_standard_output_is_said_once_and_the_exit_code_kept(
    spindel: CommandLine, command: str, code: int
) -> None:
    """R-20: that a report can't be printed changes nothing of what is reported."""
    assert spindel("run", "program.py:nothing").code == 0
    ended, _, err = run_redirected(spindel, command, ">/dev/full")

    assert ended == code
    assert err.count("Error: standard output can't be written to: No space left on device") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run program.py:echo", 0),
        ("run --json program.py:echo", 0),
        ("run --json program.py:fail", 1),
        ("check", 0),
        ("runs", 0),
        ("runs --wrong", 2),
        ("runs --db nowhere.db", 2),
    ],
)
def test_a_full_standard_error_keeps_the_exit_code_and_the_report(
    spindel: CommandLine, command: str, code: int
) -> None:
    """R-20: what standard error can't take is lost, but for why nothing was begun, which the other one tells."""
    assert spindel("run", "program.py:nothing").code == 0
    ended, out, _ = run_redirected(spindel, command, "2>/dev/full")

    assert ended == code
    assert out.startswith(("Error: ", "Usage: ")) == (code == 2)
    assert "--json" not in command or json.loads(out)["status"] == ("failed" if code else "completed")


def test_both_streams_full_keep_the_exit_code(spindel: CommandLine) -> None:
    assert run_redirected(spindel, "run program.py:fail", ">/dev/full 2>&1")[0] == 1
    assert run_redirected(spindel, "run program.py:echo", ">/dev/full 2>&1")[0] == 0
    assert run_redirected(spindel, "runs --wrong", ">/dev/full 2>&1")[0] == 2


def read_statuses(spindel: CommandLine) -> list[str]:
    return [run["status"] for run in spindel("runs", "--json").value["runs"]]
