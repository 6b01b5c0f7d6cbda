"""Checking a file and printing what was found."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spindel.cli._exit import ExitCode, refuse
from spindel.cli._streams import echo
from spindel.cli._text import printable
from spindel.errors import SchemaError
from spindel.store import open_place

if TYPE_CHECKING:
    from spindel.store import CheckReport, Finding

__all__ = ["print_check"]


async def print_check(db: str, as_json: bool) -> int:
    """Check a file, print the findings, give the exit code.

    Raises:
        CommandError: the file can't be read.
    """
    progress = _Progress()
    try:
        async with open_place(db, read_only=True) as store:
            report = await store.check(progress.show)
    except SchemaError as problem:
        refuse(problem)
    finally:
        progress.clear()
    if as_json:
        echo(msgspec.json.encode(_facts(report)).decode())
    else:
        _print(report, db)
    return ExitCode.DONE if report.ok else ExitCode.FAILED


class _Progress:
    """One line on a terminal, written over and over; nothing elsewhere, and nothing for a check that is over at once."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def show(self, done: int, total: int) -> None:
        if self._terminal:
            self._shown = True
            echo(f"\r{done:,} of {total:,} Runs read", err=True, nl=False)

    def clear(self) -> None:
        if self._shown:
            echo("\r\x1b[2K", err=True, nl=False)


def _print(report: CheckReport, db: str) -> None:
    for finding in report.findings:
        mark = click.style("violation", fg="red") if finding.violation else "note"
        echo(f"{mark}: {printable(finding.sentence)} ({finding.code})")
    if report.omitted:
        echo(f"… and {report.omitted:,} more findings")
    verdict = "all invariants hold" if report.ok else f"{report.violations:,} violations"
    counts = f"{report.rooms:,} rooms, {report.runs:,} Runs ({report.running:,} running), {report.causes:,} causes"
    echo(f"{verdict}: {counts} in {printable(db)}")


def _facts(report: CheckReport) -> dict[str, Any]:
    return {
        "path": report.path.encode("utf-8", "backslashreplace").decode(),
        "ok": report.ok,
        "rooms": report.rooms,
        "runs": report.runs,
        "running": report.running,
        "orphans": report.orphans,
        "causes": report.causes,
        "violations": report.violations,
        "findings": [_finding(finding) for finding in report.findings],
        "omitted": report.omitted,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "run_id": None if finding.run_id is None else str(finding.run_id),
        "sentence": finding.sentence,
        "violation": finding.violation,
    }
