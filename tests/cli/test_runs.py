"""`spindel runs` and `spindel check`: reading a file cold."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
import trio

from spindel.errors import PreparationError
from spindel.jobs import start_job
from spindel.operator import abandon_held
from spindel.runs import Acquisition, Disposal, Preparation, Run, open_room
from spindel.store import AdmitRun, FenceAdmission, SqliteStore
from spindel.testing import FaultyStore
from tests.cli.commands import CommandLine, contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spindel.ids import RunId

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A room with a tree of sixteen Runs, and two failed Runs after it; nobody changes it."""
    line = CommandLine(tmp_path_factory.mktemp("grown"))
    line("run", "--quiet", "program.py:grow")
    line("run", "--quiet", "program.py:fail_below")
    yield line
    line.close()


def test_the_list_shows_the_latest_start_first(grown: CommandLine) -> None:
    lines = grown("runs").out.splitlines()

    assert len(lines) == 18
    assert "failed    run" in lines[0]
    assert "ValueError: no \\x1b[31mluck" in lines[0]
    assert "completed grow program.py:grow" in lines[-1]


def test_a_limit_is_kept_and_said(grown: CommandLine) -> None:
    done = grown("runs", "--limit", "3")

    assert len(done.out.splitlines()) == 4
    assert done.out.splitlines()[-1] == "… and more; --limit 0 shows all"
    assert grown("runs", "--limit", "3", "--json").value["more"] is True
    assert grown("runs", "--limit", "18", "--json").value["more"] is False


def test_the_tree_shows_who_owns_whom(grown: CommandLine) -> None:
    lines = [re.sub(r"  \d.*", "", line) for line in grown("runs", "--tree").out.splitlines()]

    assert lines[:5] == [
        "failed    fail_below program.py:fail_below",
        "└── failed    run",
        "completed grow program.py:grow",
        "└── completed branch stem\\x1b[31m",
        "    ├── completed branch twig 0",
    ]
    assert lines[-2] == "            └── completed branch twig 1"
    assert lines[-1] == "16 completed, 2 failed"


def test_a_short_tree_tells_what_it_leaves_out(grown: CommandLine) -> None:
    lines = [re.sub(r"  \d.*", "", line) for line in grown("runs", "--tree", "--limit", "5").out.splitlines()]

    assert lines[2:] == [
        "completed grow program.py:grow",
        "└── completed branch stem\\x1b[31m",
        "    ├── completed branch twig 0",
        "    │   └── … 2 more, 6 with all below; --limit 0 shows all",
        "    └── … 1 more, 7 with all below; --limit 0 shows all",
        "16 completed, 2 failed",
    ]


def test_a_tree_of_one_status_shows_the_owners_too(grown: CommandLine) -> None:
    failed = grown("runs", "--tree", "--status", "failed").out.splitlines()

    assert len(failed) == 3
    assert grown("runs", "--status", "failed", "--json").value["runs"][0]["error"] == "ValueError: no \x1b[31mluck"


def test_the_tree_in_json_comes_in_its_own_order(grown: CommandLine) -> None:
    runs = grown("runs", "--tree", "--json", "--limit", "0").value["runs"]
    places = {run["run_id"]: place for place, run in enumerate(runs)}

    assert len(runs) == 18
    assert all(places[run["parent_id"]] < places[run["run_id"]] for run in runs if run["parent_id"] is not None)
    assert runs[3]["name"] == "stem\x1b[31m"


@pytest.mark.parametrize("command", ["runs", "check"])
def test_a_missing_file_is_told_and_not_made(spindel: CommandLine, command: str) -> None:
    done = spindel(command, "--db", "absent.db")

    assert done.code == 2
    assert "there is no such file" in done.err
    assert set(contents(spindel.folder)) == {"program.py"}


def test_a_room_that_is_not_there_is_told_with_those_that_are(grown: CommandLine) -> None:
    done = grown("runs", "--room", "attic")

    assert done.code == 2
    assert "spindel.db has no room attic; it has main." in done.err


def test_reading_changes_nothing(grown: CommandLine) -> None:
    before = contents(grown.folder)
    for arguments in (["runs"], ["runs", "--tree"], ["check"]):
        assert grown(*arguments).code == 0

    assert contents(grown.folder) == before


def test_a_check_of_a_file_in_order_says_what_it_read(grown: CommandLine) -> None:
    done = grown("check")

    assert done.code == 0
    assert done.out == "all invariants hold: 1 rooms, 18 Runs (0 running), 1 causes in spindel.db\n"
    value = grown("check", "--json").value
    assert (value["ok"], value["runs"], value["violations"], value["findings"]) == (True, 18, 0, [])


def test_a_check_names_what_does_not_hold(grown: CommandLine, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    shutil.copy(grown.folder / "spindel.db", damaged)
    with sqlite3.connect(damaged) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("UPDATE runs SET family_return_ack = 'nonsense' WHERE kind = 'grow'")
    connection.close()
    done = grown("check", "--db", damaged)

    assert done.code == 1
    assert "violation: " in done.out
    assert "violations: 1 rooms, 18 Runs" in done.out
    assert grown("check", "--json", "--db", damaged).value["ok"] is False


def test_the_evidence_of_each_run_is_shown_cold(tmp_path: Path) -> None:
    """R-84: witnesses, fences and disposals are in the file, so they are shown and verified without any process."""
    line = CommandLine(tmp_path)
    line("run", "--quiet", "program.py:grow")
    admit = trio.run(fence_a_child, tmp_path / "spindel.db")
    listed = {facts["run_id"]: facts for facts in line("runs", "--json", "--room", "other").value["runs"]}
    fence = listed.pop(str(admit.id))

    assert (fence["reason"], fence["disposal"], fence["witnesses"]) == ("admission-failed", "discarded", {})
    assert [facts["witnesses"] for facts in listed.values()] == [{"family-return": "valid"}]
    assert "what was prepared: discarded" in line("runs", "--room", "other").out
    assert line("check").code == 0
    line.close()


def test_an_end_says_which_evidence_it_lacks(tmp_path: Path) -> None:
    """R-84: a Job whose last cleanup nobody acknowledged, and a witness that is none, are seen at a glance."""
    line = CommandLine(tmp_path)
    path = tmp_path / "spindel.db"
    trio.run(leave_a_job_unsettled, path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TRIGGER runs_witnesses")
        db.execute("UPDATE runs SET family_return_ack = ? WHERE kind = 'planted'", (str(UUID(int=7)),))
    shown = line("runs").out.splitlines()
    line.close()

    assert {text.split()[4]: re.findall(r"\w+ [a-z-]+ witness", text) for text in shown} == {
        "settled": [],
        "plain": [],
        "planted": ["invalid family-return witness"],
        "unsettled": ["no adapter-cleanup witness"],
    }


async def leave_a_job_unsettled(path: Path) -> None:
    """Leave two Jobs, one whose last callback never came back well, and two plain Runs."""

    async def nothing(_: object) -> None:
        pass

    async def fail(_: object) -> None:
        raise OSError

    async with open_room(path, name="main") as room:
        await (await start_job(room, nothing, kind="settled", on_settled=nothing)).result()
        for kind in ("plain", "planted"):
            await (await room.start(nothing, kind=kind)).result()
        job = await start_job(room, nothing, kind="unsettled", on_settled=fail)
        await job.wait_done_or_held()
        abandon_held(room)


async def fence_a_child(path: Path) -> AdmitRun:
    """Leave a fenced admission, whose things are gone, in a room of the file."""

    class Fails(Preparation[None]):
        async def construct(self, run_id: RunId, acquisition: Acquisition) -> None:
            async def dispose() -> Disposal:
                return Disposal.DISCARDED

            acquisition.begin("thing", dispose)
            raise ValueError

    async def child(run: Run[None]) -> None:
        raise AssertionError

    async def parent(run: Run[None]) -> None:
        with pytest.raises(PreparationError):
            await run.start_child(child, prepare=Fails())

    async with FaultyStore(SqliteStore(path)) as store, open_room(store, name="other") as room:
        await (await room.start(parent)).result()
        (fence,) = store.written(FenceAdmission)
    assert isinstance(fence, FenceAdmission)
    return fence.admission
