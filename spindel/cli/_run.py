"""`spindel run`: run an async function as the root Run of a room."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

import click

from spindel.cli._exit import CommandError, UnknownError, code_of_signal, refuse
from spindel.cli._place import takes_place
from spindel.cli._signals import Signals
from spindel.cli._streams import STDERR, echo, flush_streams, lose
from spindel.cli._target import check_arguments, load_target
from spindel.cli._text import printable

if TYPE_CHECKING:
    from collections.abc import Generator

    from spindel.cli._report import Report

__all__ = ["run"]

_DEFAULT_DB = "spindel.db"


@click.command(short_help="Run an async function in a durable room.")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@takes_place(f"The room's file; {_DEFAULT_DB} here by default. It is made if needed.")
@click.option("--memory", is_flag=True, help="Keep nothing after the process.")
@click.option("--room", metavar="NAME", default="main", show_default=True, help="The room there.")
@click.option("--control", metavar="PATH", help="Serve the operators' door there, a socket; see spindel held.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output, all else on the other."
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but the value, and errors.")
@click.option("--traceback", is_flag=True, help="If the function fails, show where.")
def run(
    target: str,
    arguments: tuple[str, ...],
    db: str | None,
    memory: bool,
    room: str,
    control: str | None,
    as_json: bool,
    quiet: bool,
    traceback: bool,
) -> int:
    """Run TARGET with ARGUMENTS as the root Run of a room.

    TARGET is package.module:function or path/file.py:function, an `async def main(run, *args: str)`. Write -- before
    arguments that begin with a dash.

    The first SIGINT or SIGTERM asks every Run to stop and waits for it. A second one gives up what is held, on record;
    a third leaves at once. SIGUSR1 prints where every task and thread is.

    It runs as a Job: async functions before_finish(outcome) and on_settled(outcome) beside TARGET are its cleanup.

    Exit codes: 0 completed, 1 failed, 2 nothing was begun, 3 held or unknown, 130 and 143 cancelled by a signal.
    """
    if memory and db is not None:
        raise CommandError("--memory keeps nothing, so it goes without --db and --store.")
    signals = Signals()
    signals.install()
    store = None if memory else _DEFAULT_DB if db is None else db
    report: Report | None = None
    problem: BaseException | None = None
    try:
        with _stdout_for_one_object() if as_json else nullcontext():
            report, problem = _run_target(target, arguments, store, room, control, quiet, signals)
    except KeyboardInterrupt:
        if signals.first is None:  # the import raised it, not a signal
            raise
    if report is None:
        if problem is not None:
            _explain(problem, begun=False)
        assert signals.first is not None, "without a signal and without a problem the function has begun"
        echo(f"{signal.Signals(signals.first).name}: ended before anything was begun.", err=True)
        return code_of_signal(signals.first)
    _print(report, as_json, quiet, traceback)
    if problem is not None and not isinstance(problem, KeyboardInterrupt | SystemExit):
        _explain(problem, begun=True)
    return report.exit_code(signals.first)


def _run_target(
    target: str,
    arguments: tuple[str, ...],
    store: str | None,
    room: str,
    control: str | None,
    quiet: bool,
    signals: Signals,
) -> tuple[Report | None, BaseException | None]:
    try:
        loaded = load_target(target)
        check_arguments(loaded.function, target, arguments)
        import trio

        from spindel.cli._session import Request, Session
    finally:
        signals.loaded()
    request = Request(
        target=loaded, name=target, arguments=arguments, store=store, room=room, quiet=quiet, control=control
    )
    return trio.run(Session(request, signals).run)


def _print(report: Report, as_json: bool, quiet: bool, traceback: bool) -> None:
    from spindel.cli._report import describe_error, describe_held, describe_traceback

    for held in report.held:
        echo(f"held: {describe_held(held)}", err=True)
    if report.error is not None:
        if traceback:
            echo(describe_traceback(report.error), err=True)
        echo(f"Error: {printable(describe_error(report.error))}", err=True)
    if as_json:
        echo(report.as_json())
    elif not quiet:
        echo(report.as_text())
    elif (value := report.value_text()) is not None:
        echo(value)


def _explain(problem: BaseException, *, begun: bool) -> NoReturn:
    """Say what kept the room from opening, or what makes its end unknown."""
    from spindel.errors import OutcomeError, SpindelError, UnknownOutcomeError

    if not isinstance(problem, SpindelError):
        raise problem
    unknown = begun or isinstance(problem, UnknownOutcomeError | OutcomeError)
    refuse(problem, UnknownError if unknown else CommandError)


@contextmanager
def _stdout_for_one_object() -> Generator[None]:
    """Send to standard error whatever the program and its processes print meanwhile."""
    flush_streams()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError as problem:  # what is buffered must not follow to where the object goes
            lose(STDERR, problem)
            os.dup2(STDERR, 1)
            sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
