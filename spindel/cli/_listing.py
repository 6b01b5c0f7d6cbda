"""Reading a room's rows and printing them, as a list or as a tree."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from attrs import define, field, frozen

from spindel.cli._drawing import Rest, draw
from spindel.cli._exit import CommandError, ExitCode, refuse
from spindel.cli._streams import echo, is_lost
from spindel.cli._text import clip, describe_counts, describe_name, printable, seconds
from spindel.errors import InvalidRecordError, SchemaError
from spindel.ids import WitnessStage, witness_id
from spindel.runs import open_reader
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.ids import RunId
    from spindel.runs import RoomReader
    from spindel.store import RoomRecord, RunRecord

__all__ = ["Listing", "check_room", "local_time", "owes_witnesses", "print_runs", "run_facts", "run_line"]

_PAGE: Final = 100
# Fences were never executed, and nobody knows whether an orphan's family returned.
_NEVER_WITNESSED: Final = frozenset({"admission-failed", "orphaned"})
_ERROR_CHARACTERS_MAX: Final = 100
_COLORS: Final = {"running": "green", "waiting": "yellow", "failed": "red", "cancelled": "yellow"}


@frozen
class Listing:
    """What to show. A limit of None is none."""

    db: str
    room: str
    tree: bool
    status: str | None
    limit: int | None
    as_json: bool


@define(eq=False)
class _Branch:
    """A Run in the tree: what its line needs, since all rows of the room may have to be kept.

    Attributes:
        size: how many Runs it is with its descendants.
    """

    id: RunId
    parent_id: RunId | None
    line: str
    status: str
    facts: dict[str, Any] | None
    wanted: bool
    children: list[_Branch] = field(factory=list["_Branch"])
    size: int = 1


async def print_runs(listing: Listing) -> int:
    """Read and print.

    Raises:
        CommandError: the file or the room can't be read.
    """
    status = None if listing.status is None else RunStatus(listing.status)
    try:
        async with open_reader(listing.db, name=listing.room) as reader:
            await check_room(reader, listing.db)
            if listing.tree:
                await _print_tree(reader, listing)
            else:
                await _print_list(reader, listing, status)
    except (SchemaError, InvalidRecordError) as problem:
        refuse(problem)
    # To be printed is all that it is for.
    return ExitCode.FAILED if is_lost() else ExitCode.DONE


async def check_room(reader: RoomReader, db: str) -> RoomRecord:
    """Give the room's own row.

    Raises:
        CommandError: the file has no such room.
    """
    rooms = {record.name: record for record in await reader.store.list_rooms()}
    if reader.name not in rooms:
        there = f"it has {', '.join(rooms)}" if rooms else "it has none"
        raise CommandError(f"{db} has no room {reader.name}; {there}.")
    return rooms[reader.name]


async def _read_rows(reader: RoomReader, status: RunStatus | None, take: Callable[[RunRecord], bool]) -> None:
    """Give rows to `take`, the latest start first, until it wants no more."""
    page = await reader.list_runs(status=status, limit=_PAGE)
    while all(map(take, page.runs)) and page.next is not None:
        page = await reader.list_runs(status=status, before=page.next, limit=_PAGE)


async def _print_list(reader: RoomReader, listing: Listing, status: RunStatus | None) -> None:
    facts: list[dict[str, Any]] = []
    count = 0
    more = False

    def take(record: RunRecord) -> bool:
        nonlocal count, more
        if count == listing.limit:
            more = True
            return False
        count += 1
        if listing.as_json:
            facts.append(run_facts(record))
        else:
            echo(f"{local_time(record.started_at)}  {record.id}  {run_line(record)}")
        return True

    await _read_rows(reader, status, take)
    if listing.as_json:
        _print_json(listing, facts, more=more)
    elif more:
        echo("… and more; --limit 0 shows all")


async def _print_tree(reader: RoomReader, listing: Listing) -> None:
    """Draw the structural tree. It needs every row: what owns the latest start may be the oldest."""
    branches: dict[RunId, _Branch] = {}

    def take(record: RunRecord) -> bool:
        line = "" if listing.as_json else run_line(record)
        facts = run_facts(record) if listing.as_json else None
        wanted = listing.status is None or record.status.value == listing.status
        branches[record.id] = _Branch(record.id, record.parent_id, line, record.status.value, facts, wanted)
        return True

    await _read_rows(reader, None, take)
    roots = _grow(branches)
    lines = draw(roots, lambda branch: branch.children, listing.limit)
    if listing.as_json:
        shown = [row.facts for _, row in lines if not isinstance(row, Rest) and row.facts is not None]
        _print_json(listing, shown, more=len(shown) < sum(root.size for root in roots))
        return
    for prefix, row in lines:
        if isinstance(row, Rest):
            below = sum(branch.size for branch in row.nodes)
            inside = f", {below:,} with all below" if below > len(row.nodes) else ""
            echo(f"{prefix}… {len(row.nodes):,} more{inside}; --limit 0 shows all")
        else:
            echo(prefix + row.line)
    echo(describe_counts(Counter(branch.status for branch in branches.values())))


def _grow(branches: dict[RunId, _Branch]) -> list[_Branch]:
    """Link what is wanted with its owners, in the order of the starts; gives the roots, the latest first."""
    roots: list[_Branch] = []
    for branch in branches.values():
        parent = None if branch.parent_id is None else branches.get(branch.parent_id)
        (roots if parent is None else parent.children).append(branch)
    order = list(roots)
    for branch in order:  # grows while it is walked: owners come before what they own
        branch.children.reverse()
        order.extend(branch.children)
    for branch in reversed(order):
        branch.children = [child for child in branch.children if child.wanted]
        branch.size += sum(child.size for child in branch.children)
        branch.wanted = branch.wanted or bool(branch.children)
    return [root for root in roots if root.wanted]


def run_line(record: RunRecord) -> str:
    """Write a Run for people: status, what it is, how long it took, why it ended so."""
    text = click.style(f"{record.status.value:<9}", fg=_COLORS.get(record.status.value))
    text += f" {describe_name(record.kind, record.provenance)}"
    if record.ended_at is not None:
        text += f"  {seconds((record.ended_at - record.started_at) / 1e6)}"
    if record.reason is not None:
        text += f"  {record.reason}"
    if record.error is not None:
        text += f"  {clip(printable(record.error), _ERROR_CHARACTERS_MAX)}"
    if record.admission_disposal is not None:
        text += f"  what was prepared: {record.admission_disposal}"
    witnesses = _witnesses(record)
    for stage in _owed_witnesses(record):
        if witnesses.get(stage.value) != "valid":
            text += f"  {'no' if stage.value not in witnesses else 'invalid'} {stage.value} witness"
    return text


def _witnesses(record: RunRecord) -> dict[str, str]:
    """Tell which witnesses a row has, and whether each is the one of that Run and stage."""
    found = {
        WitnessStage.FAMILY_RETURN: record.family_return_ack,
        WitnessStage.CORE_CLEANUP: record.job_core_cleanup_ack,
        WitnessStage.ADAPTER_CLEANUP: record.job_adapter_cleanup_ack,
    }
    return {
        stage.value: "valid" if value == witness_id(stage, record.id) else "invalid"
        for stage, value in found.items()
        if value is not None
    }


def _owed_witnesses(record: RunRecord) -> tuple[WitnessStage, ...]:
    """Give the witnesses that an end in this row should have: one of a plain Run, three of a Job."""
    if not record.status.terminal or record.reason in _NEVER_WITNESSED:
        return ()
    return tuple(WitnessStage) if record.job_version is not None else (WitnessStage.FAMILY_RETURN,)


def owes_witnesses(record: RunRecord) -> bool:
    """Tell whether an end lacks a witness that it should have, and may still get."""
    there = _witnesses(record)
    return any(stage.value not in there for stage in _owed_witnesses(record))


def run_facts(record: RunRecord) -> dict[str, Any]:
    """Give what `--json` tells of a Run."""
    name = record.provenance.get("name")
    return {
        "run_id": str(record.id),
        "parent_id": None if record.parent_id is None else str(record.parent_id),
        "kind": record.kind,
        "name": name if isinstance(name, str) else None,
        "actor": record.actor,
        "status": record.status.value,
        "reason": record.reason,
        "error": record.error,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "witnesses": _witnesses(record),
        "disposal": record.admission_disposal,
    }


def _print_json(listing: Listing, facts: list[dict[str, Any]], *, more: bool) -> None:
    echo(msgspec.json.encode({"room": listing.room, "runs": facts, "more": more}).decode())


def local_time(micros: int) -> str:
    """Write a stored time for people, in their own zone."""
    return datetime.fromtimestamp(micros // 1_000_000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
