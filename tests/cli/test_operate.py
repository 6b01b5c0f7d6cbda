"""The operators' commands, from a second process that asks a running `spindel run`, and cold from its file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.commands import Command, CommandLine

pytestmark = pytest.mark.slow

SERVICE = """
import os
import trio

async def main(run):
    return 5

async def before_finish(outcome):
    print("before", outcome.status, flush=True)

async def on_settled(outcome):
    if not os.path.exists("mended"):
        raise OSError("a secret of the adapter")
    print("retired", flush=True)
"""
CONNECT = """
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
connect(S, sockaddr_un($ARGV[0])) or do { print "connect: $!\\n"; exit 1 };
print scalar <S>;
"""


@pytest.fixture
def held(spindel: CommandLine) -> Command:
    """A `spindel run` whose adapter is held, with its door at `door`."""
    (spindel.folder / "service.py").write_text(SERVICE)
    command = spindel.start("run", "--json", "--control", "door", "service.py:main")
    command.err.wait_line("  recover it: spindel held --control door")
    return command


def the_hold(spindel: CommandLine) -> dict[str, Any]:
    (hold,) = spindel("held", "--json", "--control", "door").value["held"]
    assert isinstance(hold, dict)
    return hold


def recover(spindel: CommandLine, hold: dict[str, Any], *how: str) -> Any:
    place = ("--stage", hold["stage"], "--revision", hold["revision"], "--control", "door")
    return spindel("recover", hold["run_id"], *place, *how)


def test_a_second_process_recovers_a_held_adapter(spindel: CommandLine, held: Command) -> None:
    hold = the_hold(spindel)
    listed = spindel("held", "--control", "door")
    again = recover(spindel, hold, "--retry")
    stale = recover(spindel, hold, "--retry")
    (spindel.folder / "mended").touch()
    done = recover(spindel, the_hold(spindel), "--retry")
    ended = held.finish()

    assert (hold["what"], hold["stage"], hold["code"]) == ("stage", "adapter", "OSError")
    assert listed.code == 3
    assert f"--stage adapter --revision {hold['revision']}" in listed.out
    assert (again.code, stale.code, done.code) == (3, 3, 0)
    assert "stage adapter failed again" in again.err
    assert "has changed since it was read" in stale.err
    assert ended.code == 0
    assert ended.value["witnesses"] == ["family", "core", "adapter"]
    assert ended.value["settled"] is True
    assert ended.err.count("before completed") == 1
    assert ended.err.count("retired") == 1
    assert "secret" not in ended.err + listed.out + again.err + again.out
    assert not (spindel.folder / "door").exists()
    assert spindel("check").code == 0


def test_jobs_are_listed_shown_waited_for_and_cancelled(spindel: CommandLine, held: Command) -> None:
    job_id = the_hold(spindel)["run_id"]
    listed = spindel("jobs", "--control", "door")
    shown = spindel("job", "show", job_id, "--control", "door")
    waited = spindel("job", "wait", job_id, "--control", "door", "--json")
    cancelled = spindel("job", "cancel", job_id, "--control", "door", "--json")
    absent = spindel("job", "show", "00000000-0000-0000-0000-000000000007", "--control", "door")
    given_up = spindel("abandon", "--control", "door")
    ended = held.finish()

    assert (listed.code, shown.code, waited.code, cancelled.code, absent.code) == (0, 0, 3, 0, 2)
    assert f"{job_id}  completed  main  held at adapter" in listed.out
    assert "witnesses: family valid, core valid, adapter absent" in shown.out
    assert waited.value["cleanup_stage"] == "adapter"
    assert cancelled.value["status"] == "completed"
    assert "has no Job" in absent.err
    assert (given_up.code, given_up.out.splitlines()[-1]) == (0, "1 given up")
    assert ended.code == 3


def test_what_is_given_up_after_its_outcome_was_stored_is_told_with_it(spindel: CommandLine, held: Command) -> None:
    """J-46: the outcome of the row, and all the same nobody may say that it is done."""
    spindel("abandon", "--control", "door")
    ended = held.finish()
    (row,) = spindel("runs", "--json").value["runs"]

    assert row["status"] == "completed"
    assert (ended.code, ended.value["status"], ended.value["settled"]) == (3, "completed", False)
    assert ended.value["witnesses"] == ["family", "core"]
    assert ended.value["error"].startswith("RunAbandonedError")


def test_a_file_is_read_and_refuses_to_act(spindel: CommandLine, held: Command) -> None:
    hold = the_hold(spindel)
    job_id = hold["run_id"]
    listed = spindel("jobs")
    shown = spindel("job", "show", job_id, "--json")
    unacknowledged = spindel("held", "--json")
    acting = [
        spindel("recover", job_id, "--stage", "adapter", "--revision", hold["revision"], "--retry"),
        spindel("job", "wait", job_id),
        spindel("job", "cancel", job_id),
        spindel("abandon"),
        spindel("dump"),
    ]
    recover(spindel, hold, "--acknowledge")
    held.finish()
    afterwards = spindel("abandon")
    afterwards_listed = spindel("jobs")

    assert (listed.code, shown.code, unacknowledged.code) == (0, 0, 3)
    assert listed.out.endswith(f"{job_id}  completed  main  adapter witness missing\n")
    assert afterwards_listed.out.endswith(f"{job_id}  completed  main  every witness is there\n")
    assert (shown.value["settlement"]["adapter"], shown.value["settlement"]["owner"]) == ("absent", "unknown")
    assert [job["missing"] for job in unacknowledged.value["unacknowledged"]] == ["adapter witness"]
    for done in acting:
        assert done.code == 3
        assert f"is recorded as process {held.process.pid} on" in done.err
        assert "Traceback" not in done.err
    assert afterwards.code == 3
    assert "no process has room main" in afterwards.err
    assert spindel("held").code == 0
    assert spindel("held", "--db", "absent.db").code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["held", "--control", "absent"], 3, "absent can't be reached"),
        (["held", "--control", "x" * 200], 2, "has 200 bytes"),
        (["held", "--control", "x", "--db", "y"], 2, "give one of them"),
        (["held", "--control", ""], 2, "has 0 bytes"),
        (["recover", "x", "--stage", "core", "--revision", "y", "--retry"], 2, "'y' is not a valid UUID"),
        (["job", "wait", "x", "--control", "door"], 2, "'x' is not a valid UUID"),
    ],
)
def test_what_can_not_be_asked_is_one_sentence(
    spindel: CommandLine, arguments: list[str], code: int, sentence: str
) -> None:
    done = spindel(*arguments)

    assert done.code == code
    assert sentence in done.err
    assert "Traceback" not in done.err


FLEET = """
import os
from spindel.jobs import start_job

async def sail(run):
    pass

async def main(run):
    for number in range(3):
        async def moor(outcome, number=number):
            if not os.path.exists(f"pier-{number}"):
                raise FileNotFoundError("a secret of the adapter")
            with open(f"pier-{number}", "a") as pier:
                pier.write("moored\\n")
        await start_job(run, sail, kind=f"ship-{number}", on_settled=moor)
"""


def list_holds(spindel: CommandLine, kind: str = "") -> dict[str, Any]:
    """Give what is held as `spindel held` prints it, of Runs of one kind, and leave it in the file `list`."""
    read: dict[str, Any] = spindel("held", "--json", "--control", "door").value
    read["held"] = [hold for hold in read["held"] if kind in hold["kind"]]
    (spindel.folder / "list").write_text(json.dumps(read))
    return read


def test_many_holds_are_recovered_by_the_list_that_was_read(spindel: CommandLine) -> None:
    (spindel.folder / "fleet.py").write_text(FLEET)
    command = spindel.start("run", "--control", "door", "fleet.py:main")
    for _ in range(3):
        command.err.wait_line("error: run ")
    ids = {hold["kind"]: hold["run_id"] for hold in list_holds(spindel)["held"]}
    (spindel.folder / "pier-0").touch()
    how = ("--from", "list", "--control", "door")
    once = spindel("recover", *how, "--retry")
    stale = spindel("recover", *how, "--retry", "--json")
    list_holds(spindel, "ship-2")
    attested = spindel("recover", *how, "--acknowledge", "--json")
    list_holds(spindel)
    (spindel.folder / "pier-1").touch()
    done = spindel("recover", *how, "--retry")
    ended = command.finish()

    assert once.code == 3
    assert f"adapter of run {ids['ship-0']} has passed" in once.out
    assert f"adapter of run {ids['ship-1']}: stage adapter failed again" in once.out
    assert once.out.splitlines()[-1] == "1 of 3 passed"
    assert stale.code == 3
    assert {problem["run_id"]: problem["code"] for problem in stale.value["refused"]} == {
        ids["ship-0"]: "not-held",
        ids["ship-1"]: "stale-revision",
        ids["ship-2"]: "stale-revision",
    }
    assert (attested.code, len(attested.value["recovered"]), attested.value["refused"]) == (0, 1, [])
    assert (done.code, done.out.splitlines()[-1]) == (0, "1 of 1 passed")
    assert ended.code == 0
    # Called until it passed and no more; the one that was attested never was again.
    assert [(spindel.folder / f"pier-{number}").read_text() for number in range(2)] == ["moored\n"] * 2
    assert not (spindel.folder / "pier-2").exists()
    assert "secret" not in once.out + once.err + stale.out


def test_each_hold_is_told_once_however_many_there_are(spindel: CommandLine) -> None:
    (spindel.folder / "fleet.py").write_text(FLEET)
    command = spindel.start("run", "--control", "door", "fleet.py:main")
    for _ in range(3):
        command.err.wait_line("error: run ")
    spindel("abandon", "--control", "door")

    assert command.finish().err.count("\nheld: run ") == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--from", "absent"], "No such file"),
        (["--from", "program.py"], "is no list of holds"),
        (["--from", "program.py", "--stage", "core"], "name one hold by its ID"),
        (["--stage", "core"], "name one hold by its ID"),
    ],
)
def test_what_to_recover_must_be_named_in_one_way(spindel: CommandLine, arguments: list[str], sentence: str) -> None:
    done = spindel("recover", *arguments, "--retry", "--control", "door")

    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err


FAMILY = """
import os
import trio
from spindel.jobs import start_job

async def nothing(run):
    pass

async def retire(outcome):
    if not os.path.exists("gate"):
        raise OSError("a secret of the adapter")
    print("retiring", flush=True)
    await trio.to_thread.run_sync(open, "gate")

async def main(run):
    for number in range(2):
        await start_job(run, nothing, kind=f"child-{number}", on_settled=retire)
"""


def test_whoever_is_interrupted_while_it_asks_is_told_that_it_goes_on(spindel: CommandLine) -> None:
    """Also: a Job that waits for what is held below it names that, and a path in a command to copy is quoted."""
    (spindel.folder / "family.py").write_text(FAMILY)
    command = spindel.start("run", "--control", "the door", "family.py:main")
    command.err.wait_line("  recover it: spindel held --control 'the door'")
    command.err.wait_line("  recover it: spindel held --control 'the door'")
    listed = spindel("jobs", "--control", "the door")
    told = spindel("held", "--control", "the door")
    foreign = spindel(
        *["recover", "00000000-0000-0000-0000-000000000007", "--stage", "core"],
        *["--revision", "00000000-0000-0000-0000-000000000007", "--control", "the door", "--retry"],
    )
    first, second = spindel("held", "--json", "--control", "the door").value["held"]
    os.mkfifo(spindel.folder / "gate")
    place = ("--stage", "adapter", "--control", "the door")
    asking = spindel.start("recover", first["run_id"], "--revision", first["revision"], *place, "--retry")
    command.out.wait_line("retiring")
    asking.process.send_signal(signal.SIGINT)
    left = asking.finish()
    given_up = spindel("abandon", "--control", "the door", "--json")
    with (spindel.folder / "gate").open("w"):
        ended = command.finish()

    held_line = f"held at family-join by {first['run_id']} and more\n"
    assert held_line in listed.out
    assert "--control 'the door' --retry" in told.out
    assert foreign.code == 2
    assert "has no run 00000000-0000-0000-0000-000000000007" in foreign.err
    assert (left.code, left.out) == (130, "")
    assert "is not called back" in left.err
    assert [hold["run_id"] for hold in given_up.value["held"]] == [second["run_id"]]
    assert ended.code == 3


@pytest.mark.parametrize("how", [[], ["--retry", "--acknowledge"]])
def test_recovering_needs_to_be_told_how(spindel: CommandLine, how: list[str]) -> None:
    some = "00000000-0000-0000-0000-000000000007"
    done = spindel("recover", some, "--stage", "core", "--revision", some, "--control", "door", *how)

    assert done.code == 2
    assert "--retry repeats the step" in done.err


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("program.py", "program.py is there and is no socket"),
        ("absent/door", "its folder can't be opened"),
        ("program.py/door", "its folder can't be opened"),
        ("shared/door", "a folder that others may write to"),
        ("x" * 200, "has 200 bytes"),
        ("", "has 0 bytes"),
    ],
)
def test_a_path_where_no_door_can_be_begins_nothing(spindel: CommandLine, path: str, sentence: str) -> None:
    """The place of the door is taken before the room is opened, so that nothing has begun where it can't be."""
    (spindel.folder / "shared").mkdir()
    (spindel.folder / "shared").chmod(0o777)
    done = spindel("run", "--db", "jobs.db", "--control", path, "program.py:echo")

    assert done.code == 2
    assert sentence in done.err
    assert done.out == ""
    assert not (spindel.folder / "jobs.db").exists()


def test_the_door_of_a_living_process_is_not_taken_from_it(spindel: CommandLine) -> None:
    command = spindel.start("run", "--db", "first.db", "--control", "door", "program.py:sleep")
    command.out.wait_line("ready")
    done = spindel("run", "--db", "second.db", "--control", "door", "program.py:echo")
    still = spindel("held", "--control", "door")
    command.process.send_signal(signal.SIGTERM)
    command.finish()

    assert (done.code, done.out) == (2, "")
    assert "belongs to a living process" in done.err
    assert not (spindel.folder / "second.db").exists()
    assert still.code == 0
    assert not (spindel.folder / "door").exists()


def test_a_room_that_can_not_be_opened_leaves_no_door_behind(spindel: CommandLine) -> None:
    done = spindel("run", "--db", "absent/jobs.db", "--control", "door", "program.py:echo")

    assert done.code == 2
    assert not (spindel.folder / "door").exists()


def test_a_function_may_be_called_as_a_reserved_kind(spindel: CommandLine) -> None:
    (spindel.folder / "study.py").write_text("async def experiment(run): ...\n")
    done = spindel("run", "--db", "jobs.db", "study.py:experiment")
    listed = spindel("jobs", "--db", "jobs.db", "--json")

    assert done.code == 0
    assert [job["kind"] for job in listed.value["jobs"]] == ["job"]


def test_a_dump_and_its_signal_show_where_everything_is(spindel: CommandLine) -> None:
    command = spindel.start("run", "--control", "door", "program.py:sleep")
    command.out.wait_line("ready")
    dumped = spindel("dump", "--control", "door")
    as_json = spindel("dump", "--control", "door", "--json")
    command.process.send_signal(signal.SIGUSR1)
    command.err.wait_line("threads:")
    command.process.send_signal(signal.SIGTERM)
    ended = command.finish()

    assert dumped.code == 0
    assert "program.py:" in dumped.out
    assert "    task program.sleep" in dumped.out
    assert as_json.value["runs"][0]["stage"] == "work"
    assert "    task program.sleep" in ended.err
    assert ended.code == 143


def test_the_signal_tells_where_a_blocked_loop_is(spindel: CommandLine) -> None:
    command = spindel.start("run", "--memory", "program.py:block")
    command.out.wait_line("ready")
    command.process.send_signal(signal.SIGUSR1)
    line = command.err.wait_line("    thread MainThread")
    inside = command.err.wait_line("        /") if "program.py" not in line else line
    while "program.py" not in inside:
        inside = command.err.wait_line("        /")
    command.process.kill()

    assert " in block" in inside


def test_the_signal_during_an_import_tells_the_threads(spindel: CommandLine) -> None:
    (spindel.folder / "hangs.py").write_text(
        "import threading\nprint('ready', flush=True)\nthreading.Event().wait()\nasync def main(run): ...\n"
    )
    command = spindel.start("run", "hangs.py:main")
    command.out.wait_line("ready")
    command.process.send_signal(signal.SIGUSR1)
    command.err.wait_line("Current thread")
    command.process.send_signal(signal.SIGTERM)

    assert "hangs.py" in command.finish().err


def connect_as_nobody(path: Path) -> str:
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        [*user, "perl", "-MSocket", "-e", CONNECT, str(path)], check=False, capture_output=True, text=True
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_by_the_mode_and_by_the_door(
    spindel_as_user: CommandLine, spindel: CommandLine
) -> None:
    if shutil.which("setpriv") is None or shutil.which("perl") is None:
        pytest.skip("needs setpriv and perl to connect as another user")
    path = spindel_as_user.folder / "door"  # in a folder that others may enter
    command = spindel.start("run", "--memory", "--control", path, "program.py:sleep")
    command.out.wait_line("ready")
    by_mode = connect_as_nobody(path)
    path.chmod(0o666)
    by_door = connect_as_nobody(path)
    command.process.send_signal(signal.SIGTERM)
    command.finish()

    assert by_mode == "connect: Permission denied\n"
    assert '"code":"other-user"' in by_door


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def before_finish(outcome): ...", "has a before_finish that can't clean up"),
        ("async def on_settled(): ...", "has a on_settled that can't clean up"),
    ],
)
def test_cleanup_that_can_not_be_called_is_told_before_anything_is_opened(
    spindel: CommandLine, text: str, sentence: str
) -> None:
    (spindel.folder / "wrong.py").write_text(f"async def main(run): ...\n{text}\n")
    done = spindel("run", "wrong.py:main")

    assert done.code == 2
    assert sentence in done.err
    assert not (spindel.folder / "spindel.db").exists()
