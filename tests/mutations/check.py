"""Break the source on purpose, one fault at a time, and see that what must catch it does.

    python -m tests.mutations.check             every fault: half an hour
    python -m tests.mutations.check --handful   the quick ones, as each run of the checks does
    python -m tests.mutations.check --only NAME faults whose name has that text

The faults are put into a copy of the tree. Each selection is first run without a fault, and has to pass. A fault that
makes its selection hang is caught, too: tests have a limit of time here as everywhere.

Exits with 0 if every fault was caught, 1 if one survived, 2 if a fault no longer fits the source or a selection can't
be run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

from tests.mutations.faults import FAULTS

if TYPE_CHECKING:
    from tests.mutations.faults import Fault

ROOT: Final = Path(__file__).parents[2]
SECONDS_MAX: Final = 75
FOLDERS: Final = ("spindel", "tests", "docs", "typings")
FILES: Final = ("pyproject.toml", "README.md")


class DriftError(Exception):
    """A fault doesn't fit the source, or a selection can't be run."""


def copy_tree(folder: Path) -> None:
    """Copy what the selections need, as it stands here."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)


def break_source(source: str, fault: Fault) -> str:
    """Put a fault into a source.

    Raises:
        DriftError: its place is there never, or more than once.
    """
    found = source.count(fault.before)
    if found != 1:
        raise DriftError(f"{fault.name}: its place is there {found} times in {fault.path}, not once")
    return source.replace(fault.before, fault.after)


def selection_of(by: tuple[str, int] | str) -> list[str]:
    """Give the arguments for Python that run a selection."""
    if isinstance(by, str):
        return ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "15", *by.split()]
    scenario, seeds = by
    return ["-m", "spindel.testing.simulation", "--json", "--scenario", scenario, "--seeds", str(seeds)]


def run(folder: Path, by: tuple[str, int] | str) -> str | None:
    """Run a selection in a tree. Gives what caught something, or None if all is well.

    Raises:
        DriftError: it could not be run.
    """
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *selection_of(by)],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
            text=True,
            timeout=SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"{by} hangs"
    if done.returncode == 0:
        return None
    if isinstance(by, str):
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
        if done.returncode == 1 and failed:
            return failed[0].partition(" - ")[0]
    elif done.returncode == 1 and done.stdout.startswith("{"):
        (told,) = json.loads(done.stdout)["scenarios"]
        return f"{told['scenario']}, seed {told['seed']}: {told['failure']}"
    raise DriftError(f"{by} can't be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def check(faults: list[Fault]) -> int:
    """Put one fault after the other into a copy; gives the exit code."""
    survived: list[str] = []
    with tempfile.TemporaryDirectory(prefix="spindel-mutations-") as name:
        folder = Path(name)
        copy_tree(folder)
        sources = {fault.path: (folder / fault.path).read_text() for fault in faults}
        # All are tried first, so that half an hour isn't spent before drift is noticed.
        broken = {fault.name: break_source(sources[fault.path], fault) for fault in faults}
        for by in dict.fromkeys(fault.by for fault in faults):
            caught = run(folder, by)
            if caught is not None:
                raise DriftError(f"without any fault, {by} fails: {caught}")
        for fault in faults:
            began = perf_counter()
            path = folder / fault.path
            path.write_text(broken[fault.name])
            try:
                caught = run(folder, fault.by)
            finally:
                path.write_text(sources[fault.path])
            if caught is None:
                survived.append(fault.name)
            verdict = "SURVIVED" if caught is None else f"caught by {caught}"
            sys.stdout.write(f"{perf_counter() - began:5.1f} s  {fault.name}: {verdict}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(faults) - len(survived)} of {len(faults)} faults were caught\n")
    return 1 if survived else 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.check")
    parser.add_argument("--only", default="", metavar="NAME", help="faults whose name has this text")
    parser.add_argument("--handful", action="store_true", help="the quick ones")
    asked = parser.parse_args()
    faults = [fault for fault in FAULTS if asked.only in fault.name and (fault.quick or not asked.handful)]
    if not faults:
        parser.error(f"no fault's name has {asked.only!r}")
    try:
        return check(faults)
    except DriftError as problem:
        sys.stderr.write(f"{problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
