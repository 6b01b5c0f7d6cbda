"""Commands that are given a database instead of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.commands import CommandLine

pytestmark = pytest.mark.slow


@pytest.mark.postgres
def test_every_cold_command_reads_what_a_run_left_in_a_database(spindel: CommandLine, postgres_dsn: str) -> None:
    place = ("--store", postgres_dsn)
    ran = spindel("run", *place, "--json", "program.py:grow")
    job_id = ran.value["run_id"]
    listed = spindel("runs", *place, "--limit", "0", "--json")
    checked = spindel("check", *place, "--json")
    jobs = spindel("jobs", *place, "--json")
    shown = spindel("job", "show", job_id, *place, "--json")
    held = spindel("held", *place)

    assert (ran.code, ran.value["status"]) == (0, "completed")
    assert job_id in {run["run_id"] for run in listed.value["runs"]}
    assert (checked.code, checked.value["ok"], checked.value["runs"]) == (0, True, len(listed.value["runs"]))
    assert (jobs.code, shown.code, held.code) == (0, 0, 0)
    assert job_id in jobs.out


@pytest.mark.postgres
def test_a_room_that_is_not_there_is_named_with_its_database(spindel: CommandLine, postgres_dsn: str) -> None:
    done = spindel("runs", "--store", postgres_dsn, "--room", "elsewhere")

    assert done.code == 2
    assert "elsewhere" in done.err


@pytest.mark.parametrize("command", [("run", "program.py:text"), ("runs",), ("check",), ("jobs",), ("held",)])
@pytest.mark.parametrize(
    "address", ["postgresql://me:hunter2@h/db", "postgres://h/db?password=hunter2", "postgresql://me:hunter2@[h/db"]
)
def test_a_password_on_the_command_line_is_refused_and_not_repeated(
    spindel: CommandLine, command: tuple[str, ...], address: str
) -> None:
    done = spindel(*command, "--store", address)

    assert done.code == 2
    assert "PGPASSWORD" in done.err
    assert "hunter2" not in done.out + done.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--db", "x.db", "--store", "postgresql:///x"), "give one of them"),
        (("--db", "postgresql:///x"), "--store"),
        (("--store", "x.db"), "--db"),
        (("--store", "postgresql://127.0.0.1:1/x"), "can't be reached"),
    ],
)
def test_what_names_no_database_is_told(spindel: CommandLine, options: tuple[str, ...], problem: str) -> None:
    done = spindel("runs", *options)

    assert done.code == 2
    assert problem in done.err
    assert done.err.count("\n") == 1
