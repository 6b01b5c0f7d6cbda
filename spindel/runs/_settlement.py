"""What can be proved about a Run: each fact apart, and whether together they settle it. Reads only.

| fact | who knows it |
|---|---|
| outcome, witnesses | the row |
| execution lease, owner, leases, launches | the process that owns the room, and nobody else |
| evidence | the store: whether rows outlive the process |

A reader that doesn't own the room can't see leases, so it reports them as unknown and never as settled. A missing row
and an absent owner prove nothing.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

import attrs
import trio

from spindel.ids import WitnessStage, witness_id
from spindel.runs._room import Room
from spindel.runs._states import HoldKind, LaunchKind, LaunchState, LeasePhase, Publication, RoomState
from spindel.store import RunStatus

if TYPE_CHECKING:
    from uuid import UUID

    from spindel.ids import LaunchId, LeaseId, Revision, RunId
    from spindel.runs._entry import Entry
    from spindel.runs._holds import Hold
    from spindel.runs._pool import Launch
    from spindel.runs._reader import RoomReader
    from spindel.store import RunRecord, Store

__all__ = [
    "LaunchFacts",
    "LeaseFacts",
    "Presence",
    "SettlementReport",
    "TerminalOutcome",
    "WitnessFact",
    "is_settled",
    "launch_facts",
    "lease_facts",
    "observe_settlement",
    "read_settlement",
]

Evidence = Literal["durable", "memory", "none"]
_FACTS_MAX: Final = 100
_READINGS_MAX: Final = 10
_NOT_OWNED: Final = frozenset({RoomState.CLOSED, RoomState.LOST})


class WitnessFact(StrEnum):
    """What a witness column says. INVALID: it holds another value than the one of this Run and stage."""

    VALID = "valid"
    ABSENT = "absent"
    INVALID = "invalid"
    NOT_APPLICABLE = "not-applicable"


class Presence(StrEnum):
    """Whether a live thing exists. UNKNOWN: this observer can't see it."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@attrs.frozen
class TerminalOutcome:
    """A stored end. `ended_at` is None for `waiting`, which ends no Job or Run for good."""

    status: RunStatus
    reason: str | None
    ended_at: int | None


@attrs.frozen(kw_only=True)
class LeaseFacts:
    """An admission lease, as facts.

    Attributes:
        revision: of the present hold, None while it isn't held. It coordinates and permits nothing.
        claimed: True while somebody recovers it.
        error: code or class of what went wrong, at most 120 characters; never a message.
    """

    lease_id: LeaseId
    run_id: RunId
    phase: LeasePhase
    revision: Revision | None
    held: bool
    claimed: bool
    callback_exited: bool
    child_returned: bool
    publication: Publication
    error: str | None


@attrs.frozen(kw_only=True)
class LaunchFacts:
    """A launch of the pool, as facts; `revision` and `error` as in `LeaseFacts`."""

    launch_id: LaunchId
    run_id: RunId
    kind: LaunchKind
    state: LaunchState
    revision: Revision | None
    held: bool
    error: str | None


@attrs.frozen(kw_only=True)
class SettlementReport:
    """What can be proved about a Run.

    Attributes:
        outcome: the stored end, None while there is none or the id is unknown.
        family, core, adapter: the witnesses.
        lease: its execution lease.
        owner: its process-local owner, which only a Job has.
        evidence: what the store's word is worth.
        admission: its own admission lease.
        leases: those of its family, at most 100.
        launches: those that it waits for, at most 100.
        omitted: how many leases and launches are left out.
        settled: terminal, every witness valid, lease and owner absent, and some evidence.
    """

    run_id: RunId
    room: str
    outcome: TerminalOutcome | None
    family: WitnessFact
    core: WitnessFact
    adapter: WitnessFact
    lease: Presence
    owner: Presence
    evidence: Evidence
    admission: LeaseFacts | None
    leases: tuple[LeaseFacts, ...]
    launches: tuple[LaunchFacts, ...]
    omitted: int
    settled: bool


@attrs.frozen
class _Live:
    """What the owning process sees in one turn."""

    lease: Presence
    owner: Presence
    admission: LeaseFacts | None = None
    leases: tuple[LeaseFacts, ...] = ()
    launches: tuple[LaunchFacts, ...] = ()
    omitted: int = 0


async def observe_settlement(room: Room | RoomReader, run_id: RunId) -> SettlementReport:
    """Observe what can be proved about a Run; writes nothing.

    Live facts are read before and after the row, and all again if they differ, so the report is of one moment. A family
    that never rests can't keep it from ending: after ten readings only the Run's own lease and owner must agree, from
    which `settled` follows; they come and go once.

    Cancellation: a checkpoint.
    """
    return (await read_settlement(room, run_id))[1]


async def read_settlement(room: Room | RoomReader, run_id: RunId) -> tuple[RunRecord | None, SettlementReport]:
    """As `observe_settlement`, with the row that it was observed from."""
    if room.store is None:
        await trio.lowlevel.checkpoint()
        return None, _report(room.name, None, run_id, None, _live(room, run_id))
    readings = 0
    before = _live(room, run_id)
    while True:
        row = await room.store.load_run(room.name, run_id)
        after = _live(room, run_id)
        readings += 1
        if after == before or (
            readings >= _READINGS_MAX and (after.lease, after.owner) == (before.lease, before.owner)
        ):
            return row, _report(room.name, room.store, run_id, row, after)
        before = after


def is_settled(room: Room | RoomReader, row: RunRecord) -> bool:
    """Tell whether a Run is settled, by a row that was just read.

    Nothing more is read: evidence in a row stays, and a lease or owner that is absent afterwards stays so.
    """
    return _report(room.name, room.store, row.id, row, _live(room, row.id)).settled


def _report(room: str, store: Store | None, run_id: RunId, row: RunRecord | None, live: _Live) -> SettlementReport:
    evidence: Evidence = "none" if store is None else "durable" if store.durable else "memory"
    family = core = adapter = WitnessFact.NOT_APPLICABLE if row is None else WitnessFact.ABSENT
    outcome = None
    if row is not None:
        if row.family_version is not None:
            family = _witness(row.family_return_ack, WitnessStage.FAMILY_RETURN, run_id)
        if row.job_version is None:
            core = adapter = WitnessFact.NOT_APPLICABLE
        else:
            core = _witness(row.job_core_cleanup_ack, WitnessStage.CORE_CLEANUP, run_id)
            adapter = _witness(row.job_adapter_cleanup_ack, WitnessStage.ADAPTER_CLEANUP, run_id)
        if row.status is not RunStatus.RUNNING:
            outcome = TerminalOutcome(row.status, row.reason, row.ended_at)
    settled = (
        row is not None
        and row.status.terminal
        and family is WitnessFact.VALID
        and (row.job_version is None or (core is WitnessFact.VALID and adapter is WitnessFact.VALID))
        and live.lease is Presence.ABSENT
        and live.owner is Presence.ABSENT
        and evidence != "none"
    )
    return SettlementReport(
        run_id=run_id,
        room=room,
        outcome=outcome,
        family=family,
        core=core,
        adapter=adapter,
        lease=live.lease,
        owner=live.owner,
        evidence=evidence,
        admission=live.admission,
        leases=live.leases,
        launches=live.launches,
        omitted=live.omitted,
        settled=settled,
    )


def _witness(value: UUID | None, stage: WitnessStage, run_id: RunId) -> WitnessFact:
    if value is None:
        return WitnessFact.ABSENT
    return WitnessFact.VALID if value == witness_id(stage, run_id) else WitnessFact.INVALID


def _live(room: Room | RoomReader, run_id: RunId) -> _Live:
    if not isinstance(room, Room) or room.state in _NOT_OWNED:
        return _Live(Presence.UNKNOWN, Presence.UNKNOWN)
    entry = room.find_entry(run_id)
    if entry is None:
        return _Live(Presence.ABSENT, Presence.ABSENT)
    family = () if entry.family is None else entry.family.leases.values()
    launches = [launch for launch in room.pool.launches.values() if launch.entry is entry]
    leases = tuple(lease_facts(room, child) for child in islice(family, _FACTS_MAX))
    shown = tuple(launch_facts(launch) for launch in launches[:_FACTS_MAX])
    return _Live(
        Presence.PRESENT if entry.live else Presence.ABSENT,
        # A Run of a layer above has an owner for as long as it has its finisher.
        Presence.PRESENT if entry.finisher is not None else Presence.ABSENT,
        lease_facts(room, entry),
        leases,
        shown,
        len(family) - len(leases) + len(launches) - len(shown),
    )


def lease_facts(room: Room, entry: Entry) -> LeaseFacts:
    """Tell an admission lease as facts."""
    hold = room.holds.of(entry, HoldKind.LEASE)
    return LeaseFacts(
        lease_id=entry.lease_id,
        run_id=entry.run_id,
        phase=entry.phase,
        revision=None if hold is None else hold.revision,
        held=hold is not None,
        claimed=hold is not None and hold.claimed,
        callback_exited=entry.callback_exited,
        child_returned=entry.returned,
        publication=entry.publication,
        error=None if hold is None else hold.code,
    )


def launch_facts(launch: Launch) -> LaunchFacts:
    """Tell a launch as facts."""
    hold: Hold | None = launch.hold
    return LaunchFacts(
        launch_id=launch.id,
        run_id=launch.entry.run_id,
        kind=launch.kind,
        state=launch.state,
        revision=None if hold is None else hold.revision,
        held=hold is not None,
        error=None if hold is None else hold.code,
    )
