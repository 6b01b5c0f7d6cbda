"""How a command ends: its exit code, and the one sentence that it prints if it can't do what was asked."""

from __future__ import annotations

import signal
from enum import IntEnum
from typing import NoReturn

import click

__all__ = ["CommandError", "ExitCode", "LeftError", "UnknownError", "code_of_signal", "refuse"]


class ExitCode(IntEnum):
    """The exit codes of rooms.

    DONE: the work completed, or everything holds. FAILED: the work failed, or something doesn't hold. USAGE: nothing
    was begun, because of what was asked for or of where it was to go. UNKNOWN: something is held, or nobody can know.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNKNOWN = 3


def code_of_signal(number: int) -> int:
    """Give the exit code that shells give a program which a signal has ended."""
    return 128 + number


class CommandError(click.ClickException):
    """Nothing was begun: one sentence on standard error that says what happened, to what, and what to do next."""

    exit_code = int(ExitCode.USAGE)


class UnknownError(CommandError):
    """As `CommandError`, where nobody can know what became of it."""

    exit_code = int(ExitCode.UNKNOWN)


class LeftError(CommandError):
    """Whoever asked a process left before it had answered."""

    exit_code = code_of_signal(signal.SIGINT)


def refuse(problem: BaseException, kind: type[CommandError] = CommandError) -> NoReturn:
    """Leave with an error of the layers below, whose message says what to do."""
    raise kind(str(problem)) from problem
