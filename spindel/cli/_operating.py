"""What the operators' commands do: ask the running process, or read the file and say what a file can't do."""

from __future__ import annotations

from contextlib import asynccontextmanager
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import msgspec
from attrs import frozen

from spindel.cli._exit import CommandError, ExitCode, LeftError, UnknownError, refuse
from spindel.cli._listing import check_room, local_time
from spindel.cli._streams import echo, is_lost
from spindel.cli._text import clip, printable, printable_lines
from spindel.control import Held, describe_dump, open_client
from spindel.control._answers import read_job, read_jobs
from spindel.control._wire import Cursor, JobFacts, JobList, ListJobs
from spindel.errors import (
    ControlLostError,
    ControlRefusedError,
    InvalidRecordError,
    JobNotFoundError,
    SchemaError,
)
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.jobs import Stage
from spindel.runs import open_reader
from spindel.store import RunCursor, RunQuery, RunStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from typing import Literal
    from uuid import UUID

    from spindel.control import ControlClient, HeldFacts, Recovered
    from spindel.runs import RoomReader
    from spindel.store import RunRecord

__all__ = [
    "Place",
    "abandon_held",
    "cancel_job",
    "print_dump",
    "print_held",
    "print_job",
    "print_jobs",
    "recover_held",
    "recover_listed",
    "wait_job",
]

_PAGE: Final = 100
_ERROR_CHARACTERS_MAX: Final = 100
# What was asked for isn't there, or is none: as with a wrong option, nothing was begun.
_USAGE_CODES: Final = frozenset(
    {"bad-path", "bad-request", "foreign-room", "invalid-record", "job-not-found", "not-held"}
)


@frozen
class Place:
    """Where to look: the socket of a process, or a room in a file."""

    control: str | None
    db: str
    room: str
    as_json: bool


@asynccontextmanager
async def _process(place: Place) -> AsyncGenerator[ControlClient]:
    """Reach the running process; without one, say why a file is not enough.

    Raises:
        CommandError: it can't be reached, or refused, or the user left.
    """
    if place.control is None:
        await _refuse_cold(place)
    try:
        async with open_client(place.control) as client:
            yield client
    except ControlRefusedError as problem:
        refuse(problem, CommandError if problem.code in _USAGE_CODES else UnknownError)
    except ControlLostError as problem:
        refuse(problem, UnknownError)
    except KeyboardInterrupt as interrupt:
        raise LeftError(
            f"interrupted: what {printable(place.control)} was asked for is not called back; look before you repeat it"
        ) from interrupt


@asynccontextmanager
async def _file(place: Place) -> AsyncGenerator[RoomReader]:
    """Read the room cold.

    Raises:
        CommandError: the file or the room can't be read.
    """
    try:
        async with open_reader(place.db, name=place.room) as reader:
            await check_room(reader, place.db)
            yield reader
    except (SchemaError, InvalidRecordError, JobNotFoundError) as problem:
        refuse(problem)


async def _refuse_cold(place: Place) -> NoReturn:
    """Say why nothing can be done by a file alone, and who could do it."""
    async with _file(place) as reader:
        owner = (await check_room(reader, place.db)).owner
    if owner is None:
        who = f"and no process has room {place.room} of {printable(place.db)} open, so nothing of it lives or is held"
    else:
        who = (
            f"and that of room {place.room} of {printable(place.db)} is recorded as process {owner.get('pid')} on "
            f"{printable(str(owner.get('host')))}; give the socket that it was started with as --control, or, if it "
            "has ended, open the room again, which names as orphaned what it left"
        )
    raise UnknownError(f"nothing was done: only the process that owns a room can do this, {who}.")


# -- Jobs ---------------------------------------------------------------------------------------------------------------


async def print_jobs(place: Place, status: str | None, limit: int | None) -> int:
    """List Jobs."""
    wanted = None if status is None else RunStatus(status)
    if place.control is not None:
        async with _process(place) as client:

            async def ask(before: Cursor | None, count: int) -> JobList:
                return await client.list_jobs(status=wanted, before=before, limit=count)

            await _print_pages(place, ask, _job_line, limit)
    else:
        async with _file(place) as reader:
            rows: dict[UUID, RunRecord] = {}

            async def read(before: Cursor | None, count: int) -> JobList:
                start = None if before is None else RunCursor(before.started_at, RunId(before.id))
                page = await reader.store.list_runs(
                    RunQuery(room=place.room, jobs=True, status=wanted, before=start, limit=count)
                )
                rows.clear()
                rows.update((row.id, row) for row in page.runs)
                return await read_jobs(reader, ListJobs(status=wanted, before=before, limit=count))

            await _print_pages(place, read, lambda job: _cold_line(job, rows.get(job.id)), limit)
    return _printed()


async def _print_pages(
    place: Place,
    give: Callable[[Cursor | None, int], Awaitable[JobList]],
    describe: Callable[[JobFacts], str],
    limit: int | None,
) -> None:
    found: list[JobFacts] = []
    count = 0
    before: Cursor | None = None
    room = place.room
    while True:
        page = await give(before, _PAGE if limit is None else min(_PAGE, limit - count))
        count += len(page.jobs)
        before, room = page.next, page.room
        if place.as_json:
            found.extend(page.jobs)
        else:
            for job in page.jobs:
                echo(describe(job))
        if before is None or count == limit:
            break
    if place.as_json:
        _print_json({"room": room, "jobs": found, "more": before is not None})
    elif before is not None:
        echo("… and more; --limit 0 shows all")


async def print_job(place: Place, job_id: UUID) -> int:
    """Show one Job."""
    if place.control is not None:
        async with _process(place) as client:
            details = await client.show_job(job_id)
    else:
        async with _file(place) as reader:
            details = await read_job(reader, job_id)
    if place.as_json:
        _print_json(details)
        return _printed()
    job, proof = details.job, details.settlement
    echo(_job_line(job))
    for name, value in (
        ("reason", job.reason),
        ("error", None if job.error is None else clip(job.error, _ERROR_CHARACTERS_MAX)),
        ("key", job.key),
        ("parent", None if job.parent_id is None else str(job.parent_id)),
        ("stage", None if job.stage is None else job.stage.value),
        ("blocked by", ", ".join(map(str, job.blocked_by)) or None),
        ("witnesses", f"family {proof.family}, core {proof.core}, adapter {proof.adapter}"),
        ("lease", proof.lease),
        ("owner", proof.owner),
        ("evidence", proof.evidence),
    ):
        if value is not None:
            echo(f"{name}: {printable(value)}")
    return _printed()


async def wait_job(place: Place, job_id: UUID) -> int:
    """Wait until a Job is done or held."""
    async with _process(place) as client:
        while True:
            job = await client.wait_job(job_id)
            if job.stage in (None, Stage.DONE) or job.cleanup_required:
                break
    _show(place, job)
    if not job.settled:
        return ExitCode.UNKNOWN
    return ExitCode.DONE if job.status is RunStatus.COMPLETED else ExitCode.FAILED


async def cancel_job(place: Place, job_id: UUID) -> int:
    """Ask a Job to stop."""
    async with _process(place) as client:
        _show(place, await client.cancel_job(job_id))
    return ExitCode.DONE


def _show(place: Place, job: JobFacts) -> None:
    if place.as_json:
        _print_json(job)
    else:
        echo(_job_line(job))


def _job_words(job: JobFacts) -> str:
    return f"{local_time(job.started_at)}  {job.id}  {job.status.value:<10} {printable(job.kind)}"


def _cold_line(job: JobFacts, row: RunRecord | None) -> str:
    """Write a Job for people as far as a file tells: what its row lacks. Whether it is settled its room alone knows."""
    if row is None:  # it came between two readings
        return _job_line(job)
    missing = _missing(row)
    return f"{_job_words(job)}  {'every witness is there' if missing is None else f'{missing} missing'}"


def _job_line(job: JobFacts) -> str:
    """Write a Job for people: when, which, what the row says, and how far its cleanup is."""
    text = _job_words(job)
    if job.cleanup_stage is not None:
        text = f"{text}  held at {job.cleanup_stage.value}"
        if job.blocked_by:
            text += f" by {job.blocked_by[0]}"
        return f"{text} and more" if len(job.blocked_by) > 1 else text
    if job.stage not in (None, Stage.DONE):
        return f"{text}  at {job.stage.value}"
    return f"{text}  {'settled' if job.settled else 'not known to be settled'}"


# -- what is held -------------------------------------------------------------------------------------------------------


async def print_held(place: Place) -> int:
    """List what waits for an operator; cold, the Jobs whose cleanup isn't acknowledged."""
    if place.control is None:
        return await _print_unacknowledged(place)
    async with _process(place) as client:
        held = await client.list_held()
    if place.as_json:
        _print_json(held)
    elif not held.held:
        echo("nothing is held")
    else:
        for hold in held.held:
            echo(_hold_line(hold))
            if hold.what != "finisher":
                echo(
                    f"  spindel recover {hold.run_id} --stage {hold.stage} --revision {hold.revision} "
                    f"--control {quote(printable(place.control))} --retry"
                )
        if held.omitted:
            echo(f"… and {held.omitted:,} more")
    return ExitCode.UNKNOWN if held.held else ExitCode.DONE


async def _print_unacknowledged(place: Place) -> int:
    """Say what the rows show: of a Job that has not ended, or whose witnesses are missing, nobody can know by a file."""
    found: list[dict[str, str]] = []
    async with _file(place) as reader:
        before: RunCursor | None = None
        while True:
            page = await reader.store.list_runs(RunQuery(room=place.room, jobs=True, before=before, limit=_PAGE))
            for row in page.runs:
                missing = _missing(row)
                if missing is not None:
                    found.append(
                        {"run_id": str(row.id), "kind": row.kind, "status": row.status.value, "missing": missing}
                    )
            before = page.next
            if before is None:
                break
    if place.as_json:
        _print_json({"room": place.room, "unacknowledged": found})
    else:
        for job in found:
            echo(f"job {job['run_id']} {printable(job['kind'])}: {job['status']}, {job['missing']} missing")
        if found:
            echo("whether one of them is held only its living process knows; ask it by --control")
        else:
            echo("every Job of the file has all of its witnesses")
    return ExitCode.UNKNOWN if found else ExitCode.DONE


def _missing(row: RunRecord) -> str | None:
    """Name the first thing that a Job's row lacks to be settled."""
    if not row.status.terminal:
        return "its end"
    for name, column, stage in (
        ("family witness", row.family_return_ack, WitnessStage.FAMILY_RETURN),
        ("core witness", row.job_core_cleanup_ack, WitnessStage.CORE_CLEANUP),
        ("adapter witness", row.job_adapter_cleanup_ack, WitnessStage.ADAPTER_CLEANUP),
    ):
        if column != witness_id(stage, row.id):
            return name
    return None


async def recover_held(place: Place, run_id: UUID, stage: str, revision: UUID, action: str) -> int:
    """Act on one hold."""
    async with _process(place) as client:
        done = await client.recover(run_id, stage, revision, cast("Literal['retry', 'acknowledge']", action))
    if place.as_json:
        _print_json(done)
    elif done.held is None:
        echo(f"{stage} of run {run_id} has passed")
    else:
        echo(f"held again: {_hold_line(done.held)}")
    return ExitCode.DONE if done.held is None else ExitCode.UNKNOWN


async def recover_listed(place: Place, listed: bytes, action: str) -> int:
    """Act on each hold of a list that `print_held` printed as an object, one after the other.

    The list names each by the revision that was read, so this decides nothing that its reader has not seen: what has
    changed since, or was held later, is left alone. A list and not a filter of our own, since only the operator knows
    which of the codes may be repeated.
    """
    try:
        holds = msgspec.json.decode(listed, type=Held).held
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise CommandError(
            f"that is no list of holds ({problem}); give what spindel held --json --control PATH printed, or a part of it."
        ) from problem
    recovered: list[Recovered] = []
    refused: list[dict[str, str]] = []
    async with _process(place) as client:
        for hold in holds:
            which = f"{printable(hold.stage)} of run {hold.run_id}"
            try:
                done = await client.recover(
                    hold.run_id, hold.stage, hold.revision, cast("Literal['retry', 'acknowledge']", action)
                )
            except ControlRefusedError as problem:
                refused.append(
                    {"run_id": str(hold.run_id), "stage": hold.stage, "code": problem.code, "sentence": str(problem)}
                )
                _tell(place, f"{which}: {printable(str(problem))}")
            else:
                recovered.append(done)
                _tell(place, f"{which} has passed" if done.held is None else f"held again: {_hold_line(done.held)}")
    passed = sum(done.held is None for done in recovered)
    if place.as_json:
        _print_json({"recovered": recovered, "refused": refused})
    else:
        echo(f"{passed:,} of {len(holds):,} passed")
    return ExitCode.DONE if passed == len(holds) else ExitCode.UNKNOWN


def _tell(place: Place, text: str) -> None:
    if not place.as_json:
        echo(text)


async def abandon_held(place: Place) -> int:
    """Give up all that is held."""
    async with _process(place) as client:
        given_up = await client.abandon()
    if place.as_json:
        _print_json(given_up)
    else:
        for hold in given_up.held:
            echo(f"given up: {_hold_line(hold)}")
        echo(f"{len(given_up.held) + given_up.omitted:,} given up")
    return ExitCode.DONE


def _hold_line(hold: HeldFacts) -> str:
    kind = "" if hold.kind is None else f" {printable(hold.kind)}"
    which = ""
    if hold.lease_id is not None:
        which = f" {hold.lease_id}"
    elif hold.launch_id is not None:
        which = f", launch {hold.launch_id}"
    claimed = ", being recovered" if hold.claimed else ""
    return (
        f"run {hold.run_id}{kind}: {hold.what}{which} at {printable(hold.stage)}, {printable(hold.code)}, "
        f"since {local_time(hold.since)}{claimed}"
    )


async def print_dump(place: Place) -> int:
    """Show where everything is."""
    async with _process(place) as client:
        dump = await client.dump()
    if place.as_json:
        _print_json(dump)
    else:
        echo(printable_lines(describe_dump(dump)))
    return _printed()


def _printed() -> int:
    """Give the exit code of a command for which being printed is all."""
    return ExitCode.FAILED if is_lost() else ExitCode.DONE


def _print_json(value: Any) -> None:
    echo(msgspec.json.encode(value).decode())
