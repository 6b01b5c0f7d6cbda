"""`spindel run`, in processes of its own: what it prints, how it exits, what it leaves on the disk."""

from __future__ import annotations

import signal
import sqlite3
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import ROOT, CommandLine, contents

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

ONLY_THE_PROGRAM = {"program.py"}


def test_a_function_runs_in_the_file_and_room_of_its_defaults(spindel: CommandLine) -> None:
    done = spindel("run", "program.py:echo", "--", "one", "--two")

    assert done.code == 0
    assert done.out.splitlines()[0] == "printed by the program"
    assert "completed: echo program.py:echo" in done.out
    assert ", settled" in done.out
    assert "runs:  1 completed" in done.out
    assert "value: {'words': ['one', '--two']}" in done.out
    assert set(contents(spindel.folder)) == {*ONLY_THE_PROGRAM, "spindel.db"}
    assert spindel("runs").out.count("echo program.py:echo") == 1


def test_a_module_on_the_path_is_a_target_too(spindel: CommandLine) -> None:
    assert spindel("run", "--quiet", "program:text").out == "a text\n"


def test_memory_leaves_nothing(spindel: CommandLine) -> None:
    done = spindel("run", "--memory", "program.py:grow")

    assert done.code == 0
    assert "runs:  16 completed" in done.out
    assert set(contents(spindel.folder)) == ONLY_THE_PROGRAM


def test_json_is_one_object_and_all_else_is_on_standard_error(spindel: CommandLine) -> None:
    done = spindel("run", "--json", "--memory", "program.py:echo", "word")

    value = done.value
    assert set(value) == {"run_id", "status", "settled", "witnesses", "runs", "value", "error", "duration_seconds"}
    assert value["status"] == "completed"
    assert value["settled"] is True
    assert value["runs"] == {"completed": 1}
    assert value["value"] == {"words": ["word"]}
    assert value["error"] is None
    assert value["duration_seconds"] > 0
    assert done.out.count("\n") == 1
    assert "printed by the program" in done.err


def test_a_value_that_is_no_data_comes_as_its_repr(spindel: CommandLine) -> None:
    value = spindel("run", "--json", "--memory", "program.py:no_data").value

    assert value["value_repr"] == "{1}"
    assert "value" not in value


@pytest.mark.parametrize(
    ("function", "printed"),
    [("text", "a text\n"), ("nothing", ""), ("no_data", "{1}\n"), ("echo", 'printed by the program\n{"words":[]}\n')],
)
def test_quiet_prints_the_value_and_nothing_else(spindel: CommandLine, function: str, printed: str) -> None:
    done = spindel("run", "--quiet", "--memory", f"program.py:{function}")

    assert (done.code, done.out, done.err) == (0, printed, "")


@pytest.mark.parametrize("function", ["fail", "fail_below"])
def test_a_failed_function_is_told_by_its_own_error_without_a_traceback(spindel: CommandLine, function: str) -> None:
    done = spindel("run", f"program.py:{function}")

    assert done.code == 1
    assert f"failed: {function}" in done.out
    assert "Error: ValueError: no \\x1b[31mluck" in done.err
    assert "Traceback" not in done.err
    assert spindel("check").code == 0


def test_the_error_in_json_is_the_text_itself(spindel: CommandLine) -> None:
    done = spindel("run", "--json", "--memory", "program.py:fail_below")

    assert done.code == 1
    assert done.value["error"] == "ValueError: no \x1b[31mluck"
    assert done.value["value"] is None
    assert done.value["runs"] == {"failed": 2}


def test_a_traceback_is_shown_on_request_and_begins_in_the_program(spindel: CommandLine) -> None:
    done = spindel("run", "--traceback", "--memory", "program.py:fail")

    lines = done.err.splitlines()
    first = lines[lines.index("Traceback (most recent call last):") + 1]
    assert "program.py" in first
    assert "\x1b" not in done.err


@pytest.mark.parametrize("function", ["leave", "interrupt"])
def test_a_function_that_raises_what_ends_programs_has_failed(spindel: CommandLine, function: str) -> None:
    done = spindel("run", "--json", f"program.py:{function}")

    assert done.code == 1
    assert done.value["status"] == "failed"
    assert "Traceback" not in done.err


def test_a_function_that_waits_for_another_run_is_neither_done_nor_failed(spindel: CommandLine) -> None:
    done = spindel("run", "--json", "program.py:wait_for_more")

    assert done.code == 3
    assert done.value["status"] == "waiting"
    assert done.value["settled"] is False


def test_a_function_that_cancels_itself_has_not_done_its_work(spindel: CommandLine) -> None:
    done = spindel("run", "program.py:stop_itself")

    assert done.code == 1
    assert "cancelled (enough)" in done.out


def test_a_second_run_in_the_same_room_counts_only_its_own(spindel: CommandLine) -> None:
    spindel("run", "program.py:grow")
    done = spindel("run", "--json", "program.py:nothing")

    assert done.value["runs"] == {"completed": 1}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["program.py:absent"], "has no function absent"),
        (["program.py:plain"], "is not async"),
        (["program.py:optional"], "takes 1 to 2 arguments after its Run (first, second); 0 given."),
        (["absent.py:main"], "there is no file absent.py"),
        (["--room", "Main Room", "program.py:nothing"], "'Main Room' is not 1 to 128 characters of [a-z0-9._/-]"),
        (["--memory", "--db", "x.db", "program.py:nothing"], "--memory keeps nothing"),
        (["--db", "absent/x.db", "program.py:nothing"], "does not exist; create it first"),
        (["--db", ".", "program.py:nothing"], "it is a folder; name a file"),
        (["--db", "program.py", "program.py:nothing"], "it is not a SQLite database"),
        (["--unknown", "program.py:nothing"], "No such option"),
        ([], "Missing argument 'TARGET'"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    spindel: CommandLine, arguments: list[str], sentence: str
) -> None:
    before = contents(spindel.folder)
    done = spindel("run", *arguments)

    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("Error: ") == 1
    assert "Traceback" not in done.err
    assert done.out == ""
    assert contents(spindel.folder) == before


def test_a_database_of_another_program_or_a_newer_version_is_left_alone(spindel: CommandLine) -> None:
    foreign, newer = spindel.folder / "foreign.db", spindel.folder / "newer.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    spindel("run", "--db", "newer.db", "program.py:nothing")
    with sqlite3.connect(newer) as connection:
        connection.execute("INSERT INTO migrations VALUES ('runs', 99, 'x', 1)")
    connection.close()
    before = contents(spindel.folder)

    for name, sentence in (("foreign.db", "database of another program"), ("newer.db", "newer version")):
        for command in (["run", "--db", name, "program.py:nothing"], ["runs", "--db", name], ["check", "--db", name]):
            done = spindel(*command)

            assert done.code == 2, command
            assert sentence in done.err
            assert "Traceback" not in done.err
    assert contents(spindel.folder) == before


def test_a_read_only_database_can_be_read_and_not_run_in(spindel_as_user: CommandLine) -> None:
    path = spindel_as_user.folder / "there.db"
    owner = CommandLine(spindel_as_user.folder)
    assert owner("run", "--db", "there.db", "program.py:nothing").code == 0
    path.chmod(0o444)
    spindel_as_user.folder.chmod(0o555)
    before = contents(spindel_as_user.folder)

    done = spindel_as_user("run", "--db", "there.db", "program.py:nothing")
    listed = spindel_as_user("runs", "--db", "there.db")
    checked = spindel_as_user("check", "--db", "there.db")

    assert done.code == 2
    assert "this user may not write to it" in done.err
    assert "Traceback" not in done.err
    assert (listed.code, checked.code) == (0, 0)
    assert contents(spindel_as_user.folder) == before


def test_of_several_errors_the_first_is_named_and_the_others_counted(spindel: CommandLine) -> None:
    done = spindel("run", "--json", "program.py:fail_often")

    assert done.value["error"] == "ValueError: one (and 2 more)"
    assert "Error: ValueError: one (and 2 more)\n" in done.err


@pytest.mark.parametrize("command", [["run", "program.py:nothing"], ["runs"], ["check"]], ids=lambda words: words[0])
def test_an_empty_path_is_refused(spindel: CommandLine, command: list[str]) -> None:
    before = contents(spindel.folder)
    done = spindel(*command, "--db", "")

    assert done.code == 2
    assert done.err == "Error: '': the path is empty; name a file\n"
    assert contents(spindel.folder) == before


def test_a_full_disk_lets_nothing_begin(spindel_on_small_disk: Callable[..., CommandLine]) -> None:
    spindel = spindel_on_small_disk("dd if=/dev/zero of=filling bs=1k 2>/dev/null", "ls")
    done = spindel("run", "--quiet", "program.py:nothing")

    assert done.code == 2
    assert "the disk is full; free some space and open it again" in done.err
    assert "Traceback" not in done.err
    assert done.out.split() == ["filling", "program.py"]


def test_a_disk_that_fills_up_leaves_held_what_nobody_can_know(
    spindel_on_small_disk: Callable[..., CommandLine],
) -> None:
    command = spindel_on_small_disk().start("run", "--json", "program.py:fill_disk")
    command.err.wait_line("error: run ")  # held: its first row may be on the disk, or not
    command.process.send_signal(signal.SIGTERM)
    command.err.wait_line("SIGTERM: ")
    command.process.send_signal(signal.SIGTERM)
    done = command.finish()

    assert done.code == 3
    assert done.value["settled"] is False
    assert "given up: run " in done.err
    assert "disk is full" in done.err
    assert "Traceback" not in done.err


def test_a_room_in_use_is_refused_with_the_pid_of_its_owner_and_can_be_read(spindel: CommandLine) -> None:
    """R-11: a second opener is told by whom the room is held; a cold read works meanwhile."""
    owner = spindel.start("run", "program.py:sleep")
    owner.out.wait_line("ready")

    refused = spindel("run", "program.py:nothing")
    listed = spindel("runs", "--json")
    other_room = spindel("run", "--room", "other", "program.py:nothing")
    owner.process.terminate()

    assert owner.finish().code == 143
    assert refused.code == 2
    assert f"room 'main' is in use by process {owner.process.pid}" in refused.err
    assert "Traceback" not in refused.err
    assert [run["status"] for run in listed.value["runs"]] == ["running"]
    assert other_room.code == 0


def test_the_example_reports_what_it_may_not_read(spindel_as_user: CommandLine) -> None:
    example = f"{ROOT / 'docs' / 'examples' / 'hash_tree.py'}:main"
    tree = spindel_as_user.folder / "tree"
    for name in ("open", "shut"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").write_text(name)
    (tree / "secret").write_text("secret")
    (tree / "secret").chmod(0)
    (tree / "shut").chmod(0)
    (spindel_as_user.folder / "out").mkdir(mode=0o777)
    (spindel_as_user.folder / "out").chmod(0o777)
    done = spindel_as_user("run", "--json", "--db", "out/runs.db", example, "tree", "out/out.txt")

    assert done.code == 0
    assert done.value["value"]["files"] == 1
    assert done.value["value"]["problem_count"] == 2
    assert sorted(done.value["value"]["problems"]) == ["tree/secret: Permission denied", "tree/shut: Permission denied"]
    assert (spindel_as_user.folder / "out" / "out.txt").read_text().split()[1:] == ["tree/open/file"]
