"""The page of the command line names every command, option and exit code."""

from __future__ import annotations

import re

import click
import pytest

from spindel.cli._exit import ExitCode
from spindel.cli._main import cli
from tests.cli.commands import ROOT

PAGE = (ROOT / "docs" / "reference" / "command-line.md").read_text()


def commands_of(command: click.Command) -> list[click.Command]:
    """Give a command, or a group's own ones: they share its section."""
    return list(command.commands.values()) if isinstance(command, click.Group) else [command]


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_option_stands_in_the_section_of_its_command(name: str) -> None:
    section = PAGE.partition(f"\n## spindel {name}\n")[2].partition("\n## ")[0]
    options = {
        option
        for command in commands_of(cli.commands[name])
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    described = {
        word for cell in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE) for word in re.findall(r"--?\w+", cell)
    }

    assert described == options


def test_every_exit_code_has_a_row() -> None:
    rows = re.findall(r"^\| (\d)\b", PAGE.partition("\n## Exit codes\n")[2], re.MULTILINE)

    assert {int(row) for row in rows} >= {int(code) for code in ExitCode}
