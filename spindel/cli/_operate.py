"""The operators' commands: through the door of a running process, or cold from the file as far as a file tells."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import click

from spindel.cli._exit import CommandError
from spindel.cli._place import takes_place

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from uuid import UUID

__all__ = ["abandon", "dump", "held", "job", "jobs", "recover"]

F = TypeVar("F", bound="Callable[..., int]")
_STATUSES: Final = ("running", "waiting", "completed", "failed", "cancelled")


def _with_place(function: F) -> F:
    """Give a command the options that say where to look."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output."),
        click.option("--room", metavar="NAME", default="main", show_default=True, help="The room there."),
        takes_place("Without a running process: the room's file; spindel.db by default."),
        click.option("--control", metavar="PATH", help="The socket of a running process."),
    ):
        function = option(function)
    return function


def _operate(
    action: Callable[..., Awaitable[int]], control: str | None, db: str | None, room: str, as_json: bool, *args: Any
) -> int:
    if control is not None and db is not None:
        raise CommandError("--control asks a process, --db and --store read cold; give one of them.")
    import trio

    from spindel.cli._operating import Place

    return trio.run(action, Place(control, "spindel.db" if db is None else db, room, as_json), *args)


@click.command(short_help="List the Jobs of a room.")
@_with_place
@click.option("--status", type=click.Choice(_STATUSES), help="Only Jobs of this stored status.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=0), default=100, show_default=True, help="How many; 0: all."
)
def jobs(control: str | None, db: str | None, room: str, as_json: bool, status: str | None, limit: int) -> int:
    """List the Jobs of a room, the latest start first: where each is, and whether it is held."""
    from spindel.cli._operating import print_jobs

    return _operate(print_jobs, control, db, room, as_json, status, limit or None)


@click.group(short_help="Show, wait for or cancel one Job.")
def job() -> None:
    """Show, wait for or cancel one Job."""


@job.command(short_help="Show a Job and what can be proved about it.")
@click.argument("job_id", metavar="ID", type=click.UUID)
@_with_place
def show(job_id: UUID, control: str | None, db: str | None, room: str, as_json: bool) -> int:
    """Show a Job: its outcome, its stage, its three witnesses, its lease and its owner."""
    from spindel.cli._operating import print_job

    return _operate(print_job, control, db, room, as_json, job_id)


@job.command(short_help="Wait until a Job is done or held.")
@click.argument("job_id", metavar="ID", type=click.UUID)
@_with_place
def wait(job_id: UUID, control: str | None, db: str | None, room: str, as_json: bool) -> int:
    """Wait until a Job is done, or held and in need of an operator.

    Exit codes: 0 completed and settled, 1 failed or cancelled and settled, 2 no such Job, 3 held or unknown.
    """
    from spindel.cli._operating import wait_job

    return _operate(wait_job, control, db, room, as_json, job_id)


@job.command(short_help="Ask a Job to stop.")
@click.argument("job_id", metavar="ID", type=click.UUID)
@_with_place
def cancel(job_id: UUID, control: str | None, db: str | None, room: str, as_json: bool) -> int:
    """Ask a Job's work, and all below it, to stop. No stage of its cleanup is stopped."""
    from spindel.cli._operating import cancel_job

    return _operate(cancel_job, control, db, room, as_json, job_id)


@click.command(short_help="List what waits for an operator.")
@_with_place
def held(control: str | None, db: str | None, room: str, as_json: bool) -> int:
    """List what waits for an operator, each in the exact form that spindel recover takes.

    Cold, from a file, it lists the Jobs whose cleanup isn't acknowledged; whether one is held only its process knows.

    Exit codes: 0 nothing is, 3 something is.
    """
    from spindel.cli._operating import print_held

    return _operate(print_held, control, db, room, as_json)


@click.command(short_help="Take up what is held, exactly where it stands.")
@click.argument("run_id", metavar="[ID]", type=click.UUID, required=False)
@click.option("--stage", metavar="S", help="The stage, phase or launch, as spindel held names it.")
@click.option("--revision", metavar="R", type=click.UUID, help="The revision, as spindel held names it.")
@click.option(
    "--from",
    "listed",
    metavar="FILE",
    type=click.File("rb"),
    help="All that spindel held --json listed in it; -: stdin.",
)
@click.option("--retry", is_flag=True, help="Repeat the step: that is safe.")
@click.option("--acknowledge", is_flag=True, help="Attest that it has physically happened.")
@_with_place
def recover(
    run_id: UUID | None,
    stage: str | None,
    revision: UUID | None,
    listed: IO[bytes] | None,
    retry: bool,
    acknowledge: bool,
    control: str | None,
    db: str | None,
    room: str,
    as_json: bool,
) -> int:
    """Take up what is held of the Run ID, or all that was listed, in exactly the form that was read.

    Exit codes: 0 each step has passed, 2 nothing of ID is held, 3 something is held again, or was refused.
    """
    if retry == acknowledge:
        raise CommandError("say which: --retry repeats the step, --acknowledge attests that it has happened.")
    action = "retry" if retry else "acknowledge"
    from spindel.cli._operating import recover_held, recover_listed

    if listed is not None and run_id is None and stage is None and revision is None:
        return _operate(recover_listed, control, db, room, as_json, listed.read(), action)
    if listed is not None or run_id is None or stage is None or revision is None:
        raise CommandError("name one hold by its ID, --stage and --revision, or many by --from FILE.")
    return _operate(recover_held, control, db, room, as_json, run_id, stage, revision, action)


@click.command(short_help="Give up all that is held.")
@_with_place
def abandon(control: str | None, db: str | None, room: str, as_json: bool) -> int:
    """Give up all that is held at this moment, so that the process can end.

    Nothing is written: what owes it keeps its row as it is. One that is running is named as orphaned by the next
    opening of the room; an outcome that was stored before stays.
    """
    from spindel.cli._operating import abandon_held

    return _operate(abandon_held, control, db, room, as_json)


@click.command(short_help="Show where every Run, task and thread is.")
@_with_place
def dump(control: str | None, db: str | None, room: str, as_json: bool) -> int:
    """Show the live Runs with their tasks, and where every task and thread is. No values and no source are shown."""
    from spindel.cli._operating import print_dump

    return _operate(print_dump, control, db, room, as_json)
