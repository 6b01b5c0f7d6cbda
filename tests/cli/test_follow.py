"""`spindel runs --follow`: what other processes write is printed as it comes."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from spindel.testing.postgres import PostgresCluster

if TYPE_CHECKING:
    from tests.cli.commands import Command, CommandLine

pytestmark = pytest.mark.slow


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The options that name a room's database, which is empty."""
    if request.param == "sqlite":
        return ("--db", "runs.db")
    return ("--store", request.getfixturevalue("postgres_dsn"))


def interrupt(command: Command) -> int:
    command.process.send_signal(signal.SIGINT)
    return command.finish().code


def next_run(following: Command) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(following.out.wait_line("{"))
    return record


def test_a_run_is_followed_from_its_start_to_its_end(spindel: CommandLine, place: tuple[str, ...]) -> None:
    earlier = spindel("run", *place, "--quiet", "--json", "program.py:text").value["run_id"]
    following = spindel.start("runs", *place, "--follow", "--json")
    first = next_run(following)
    running = spindel.start("run", *place, "--quiet", "--json", "program.py:sleep")
    begun = next_run(following)
    interrupt(running)
    ended = next_run(following)
    while len(ended["witnesses"]) < 3:  # a Job's last witness comes after its outcome
        ended = next_run(following)

    assert (first["run_id"], first["status"]) == (earlier, "completed")
    assert (begun["status"], begun["name"]) == ("running", "program.py:sleep")
    assert (ended["run_id"], ended["status"], ended["reason"]) == (begun["run_id"], "cancelled", "sigint")
    assert interrupt(following) == 130
    assert following.err.text() == ""


def test_each_of_many_is_printed_once_it_ended(spindel: CommandLine, place: tuple[str, ...]) -> None:
    spindel("run", *place, "--quiet", "program.py:nothing")
    following = spindel.start("runs", *place, "--follow", "--json", "--status", "completed")
    next_run(following)
    spindel("run", *place, "--quiet", "program.py:grow")
    wanted = {run["run_id"] for run in spindel("runs", *place, "--json").value["runs"] if run["kind"] != "nothing"}
    seen: set[object] = set()
    while seen != wanted:
        seen.add(next_run(following)["run_id"])

    assert len(wanted) == 16
    assert interrupt(following) == 130


@pytest.mark.postgres
def test_a_server_that_was_away_costs_no_run(spindel: CommandLine) -> None:
    with PostgresCluster() as cluster:
        place = ("--store", cluster.create_database())
        spindel("run", *place, "--quiet", "program.py:nothing")
        following = spindel.start("runs", *place, "--follow")
        following.out.wait_line("20")
        cluster.stop()
        following.err.wait_line("postgresql://")
        cluster.start()
        following.err.wait_line("reading postgresql://")
        spindel("run", *place, "--quiet", "program.py:text")
        while "completed text" not in following.out.wait_line("20"):
            pass

        assert interrupt(following) == 130
        assert following.err.text().count("trying again") == 1


def test_a_tree_cannot_be_followed(spindel: CommandLine) -> None:
    done = spindel("runs", "--follow", "--tree")

    assert done.code == 2
    assert "give one of them" in done.err


def test_a_room_that_is_not_there_cannot_be_followed(spindel: CommandLine) -> None:
    spindel("run", "--quiet", "--db", "runs.db", "program.py:nothing")
    done = spindel("runs", "--db", "runs.db", "--room", "elsewhere", "--follow")

    assert done.code == 2
    assert "has no room elsewhere" in done.err
