"""The standard streams, which may be closed, full or broken: what a command has done must not fail for it.

A stream that was closed leads nowhere. One that can't be written to leads nowhere from then on, and that is said once,
at the end, where it can be. What the user's program prints is its own affair while it runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import click

__all__ = ["STDERR", "echo", "flush_streams", "is_lost", "lose", "open_closed_streams", "show_problem", "tell_losses"]

STDOUT: Final = 1
STDERR: Final = 2

_NAMES: Final = ("stdin", "stdout", "stderr")
_lost: Final[dict[int, OSError]] = {}


def open_closed_streams() -> None:
    """Let standard streams that were closed lead nowhere.

    To be called before anything is opened: it would get the number of a standard stream, and what is printed would go
    into it, were it the database.
    """
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            _lead_nowhere(number)
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115  a descriptor, to the end of the process
            setattr(sys, name, stream)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print as `click.echo` does, if it can be printed.

    Raises:
        BrokenPipeError: whoever read it has enough.
    """
    import click  # not before the command line knows whether it is there

    try:
        click.echo(text, err=err, nl=nl)
    except BrokenPipeError:
        raise
    except OSError as problem:
        lose(STDERR if err else STDOUT, problem)


def lose(number: int, problem: OSError) -> None:
    """Let a stream that can't be written to lead nowhere, with what is still buffered."""
    _lost.setdefault(number, problem)
    _lead_nowhere(number)


def is_lost() -> bool:
    """Tell whether something on standard output could not be printed."""
    return STDOUT in _lost


def flush_streams() -> None:
    """Print what is buffered, if it can be printed.

    Raises:
        BrokenPipeError: whoever reads standard output has enough.
    """
    for number, stream in ((STDERR, sys.stderr), (STDOUT, sys.stdout)):
        try:
            stream.flush()
        except BrokenPipeError as problem:
            if number == STDOUT:
                raise
            lose(number, problem)
        except OSError as problem:
            lose(number, problem)


def show_problem(problem: click.ClickException) -> None:
    """Say why nothing was begun: on standard error, else on standard output, on which nothing was printed then."""
    try:
        problem.show()
    except OSError as lost:
        lose(STDERR, lost)
        with suppress(OSError):
            problem.show(sys.stdout)


def tell_losses() -> None:
    """Say on standard error what standard output could not take.

    Not the other way round: standard output is read by programs, and standard error has nothing that the exit code
    and standard output don't say.
    """
    if STDOUT in _lost:
        reason = os.strerror(_lost[STDOUT].errno or 0)
        echo(f"Error: standard output can't be written to: {reason}; what was to be printed there is lost.", err=True)


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)
