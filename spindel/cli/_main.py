"""The group of commands, and what every command has in common."""

from __future__ import annotations

import os
import signal
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import click

from spindel.cli._check import check
from spindel.cli._exit import ExitCode, code_of_signal
from spindel.cli._operate import abandon, dump, held, job, jobs, recover
from spindel.cli._run import run
from spindel.cli._runs import runs
from spindel.cli._streams import echo, flush_streams, is_lost, show_problem, tell_losses

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cli", "run_command_line"]


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    try:
        number = version("spindel")
    except PackageNotFoundError:
        number = "(not installed)"
    click.echo(f"spindel {number}")
    context.exit()


class _ReaderGoneError(Exception):
    """Whoever read standard output has enough."""


class _Commands(click.Group):
    """Commands whose reader may leave; click itself would call that a failure."""

    def invoke(self, ctx: click.Context) -> object:
        """Invoke the command."""
        try:
            result: object = super().invoke(ctx)
            flush_streams()
        except BrokenPipeError as problem:
            raise _ReaderGoneError from problem
        return result


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Durable structured concurrency for Trio.

    A room is a file that tells the truth about the Runs in it, while they live, after they ended, after a crash.
    """


for _command in (run, runs, check, jobs, job, held, recover, abandon, dump):
    cli.add_command(_command)


def run_command_line(arguments: Sequence[str] | None) -> int:
    """Run a command and give its exit code; whatever a user can do wrong ends in a sentence, without a traceback."""
    try:
        # Not click's standalone mode, which gives every interruption the code 1.
        code = cli.main(arguments, prog_name="spindel", standalone_mode=False)
    except click.ClickException as problem:
        show_problem(problem)
        code = problem.exit_code
    except (KeyboardInterrupt, click.Abort):
        echo("Interrupted; nothing was begun.", err=True)
        code = code_of_signal(signal.SIGINT)
    except OSError:
        # Click itself prints what --help gives. Whether it was that, another line tells.
        echo("")
        if not is_lost():
            raise
        code = ExitCode.FAILED
    except _ReaderGoneError:
        # What is still buffered goes nowhere, so that leaving doesn't complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return code_of_signal(signal.SIGPIPE)
    flush_streams()
    tell_losses()
    return code if isinstance(code, int) else 0
