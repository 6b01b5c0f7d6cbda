"""`python -m spindel.testing.simulation`: what it prints, and what it exits with."""

from __future__ import annotations

import json

import pytest

from spindel.testing.simulation._command import main
from spindel.testing.simulation._registry import SCENARIOS

COUNTER = "tests.testing.simulation.programs:counter"


def test_schedules_that_pass_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--scenario", "runs", "--seeds", "5", "--first", "20"])

    assert code == 0
    assert capsys.readouterr().out.startswith("runs: 5 schedules passed, ")


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--scenario", "runs", "--scenario", COUNTER, "--seeds", "60", "--faults", "none", "--json"])
    told = json.loads(capsys.readouterr().out)
    well, wrong = told["scenarios"]

    assert code == 1
    assert told["name"] == "simulation"
    assert (well["scenario"], well["seeds"], well["lives"]) == ("runs", 60, 60)
    assert well["schedules_per_minute"] > 0
    assert wrong["failure"] == "AssertionError"
    assert COUNTER in wrong["command"]


def test_the_command_that_a_failure_tells_plays_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--scenario", COUNTER, "--seeds", "200"])
    told = capsys.readouterr().out
    command = next(line for line in told.splitlines() if line.startswith("play it again: "))
    words = command.removeprefix("play it again: ").split()
    code = main(words[words.index("--scenario") :])
    again = capsys.readouterr().out

    assert words[:3] == ["python", "-m", "spindel.testing.simulation"]
    assert code == 1
    # The whole trace, then what was wrong.
    assert again.splitlines()[-1].split(": ", 1)[1] == told.splitlines()[0].split(": ", 1)[1]
    assert told.splitlines()[-1] in again


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "nonesuch"], "no scenario 'nonesuch'; there are"),
        (["--scenario", "tests.testing.simulation.programs:nonesuch"], "no scenario"),
        (["--seed", "1"], "--seed needs one --scenario"),
        (["--trace", "--scenario", "runs"], "need --seed"),
        (["--seeds", "0"], "not at least 1"),
        (["--faults", "fire=1"], "NAME=NUMBER"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_help_names_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out

    assert all(f"  {known.name}" in told and known.about in told for known in SCENARIOS.values())
