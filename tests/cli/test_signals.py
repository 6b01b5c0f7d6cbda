"""SIGINT and SIGTERM: the first joins, the second gives up, the third leaves."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.commands import CommandLine

pytestmark = pytest.mark.slow

CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "code"), CODES)
def test_the_first_signal_cancels_joins_and_says_so_in_the_row(
    spindel: CommandLine, number: signal.Signals, code: int
) -> None:
    command = spindel.start("run", "--json", "program.py:sleep")
    command.err.wait_line("ready")
    command.process.send_signal(number)
    done = command.finish()

    assert done.code == code
    assert done.value["status"] == "cancelled"
    assert done.value["settled"] is True
    assert [run["reason"] for run in spindel("runs", "--json").value["runs"]] == [number.name.lower()]
    assert spindel("check").code == 0


def test_a_value_that_was_returned_before_the_signal_still_counts(spindel: CommandLine) -> None:
    command = spindel.start("run", "--json", "program.py:finish_late")
    command.err.wait_line("ready")  # the function has returned; its child hasn't
    command.process.send_signal(signal.SIGINT)
    done = command.finish()

    assert done.code == 0
    assert done.value["value"] == "done"
    assert done.value["runs"] == {"cancelled": 1, "completed": 1}


def test_the_second_signal_names_what_is_held_and_gives_it_up(spindel: CommandLine) -> None:
    """R-20: the row stays running and without a witness, and whoever waited learns that nobody knows."""
    command = spindel.start("run", "--json", "program.py:hold")
    command.err.wait_line("error: run ")
    command.process.send_signal(signal.SIGINT)
    command.err.wait_line("SIGINT: ")
    command.process.send_signal(signal.SIGINT)
    done = command.finish()
    rows = {run["kind"]: run for run in spindel("runs", "--json").value["runs"]}

    assert done.code == 3
    assert f"given up: run {rows['letter']['run_id']}" in done.err
    assert "at publishing: OSError" in done.err
    assert "nobody takes it" not in done.err
    assert (done.value["status"], done.value["settled"]) == ("running", False)
    assert done.value["error"].startswith("RunAbandonedError")
    assert (rows["letter"]["status"], rows["hold"]["status"]) == ("completed", "running")
    assert spindel("check").code == 0
    assert spindel("run", "program.py:nothing").code == 0
    assert spindel("runs", "--status", "failed", "--json").value["runs"][0]["reason"] == "orphaned"


@pytest.mark.parametrize(("number", "code"), CODES)
def test_the_third_signal_leaves_although_a_thread_is_deaf(
    spindel: CommandLine, number: signal.Signals, code: int
) -> None:
    command = spindel.start("run", "--json", "program.py:deaf")
    command.err.wait_line("ready")
    command.process.send_signal(number)
    command.err.wait_line(f"{number.name}: 1 live Run asked to stop")
    command.process.send_signal(number)
    command.err.wait_line(f"{number.name}: 0 held")
    named = command.err.wait_line("  still there: run ")
    command.process.send_signal(number)
    done = command.finish()

    assert done.code == code
    assert "deaf cancelling" in named
    assert "Left at once" in done.err
    assert done.out == ""
    assert spindel("run", "program.py:nothing").code == 0
    assert spindel("runs", "--status", "failed", "--json").value["runs"][0]["reason"] == "orphaned"


def test_the_third_signal_leaves_although_the_loop_is_blocked(spindel: CommandLine) -> None:
    command = spindel.start("run", "--memory", "program.py:block")
    command.out.wait_line("ready")
    # A handler runs between two steps of the interpreter; a signal that comes before the last was seen merges with it.
    for _ in range(100_000):
        if command.process.poll() is not None:
            break
        command.process.send_signal(signal.SIGINT)

    assert command.finish().code == 130


def test_a_signal_while_the_program_is_imported_ends_the_import(spindel: CommandLine) -> None:
    (spindel.folder / "hangs.py").write_text(
        "import threading\nprint('ready', flush=True)\nthreading.Event().wait()\nasync def main(run): ...\n"
    )
    command = spindel.start("run", "hangs.py:main")
    command.out.wait_line("ready")
    command.process.send_signal(signal.SIGTERM)
    done = command.finish()

    assert done.code == 143
    assert "SIGTERM: ended before anything was begun." in done.err
    assert "Traceback" not in done.err
    assert not (spindel.folder / "spindel.db").exists()
