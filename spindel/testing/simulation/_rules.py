"""The rules of Runs, families and Jobs, over a history, and two that look at a live room.

| rule | what no history shows |
|---|---|
| `OneOutcome` | two outcomes of a Run, one that was rewritten, one that nobody stored |
| `WitnessesInOrder` | a witness before what it vouches for, out of order, changed or without a writer |
| `NothingOutlivesItsLease` | a child, a callback or an acknowledgement after its Run or its parent has ended |
| `CallbacksOnce` | a function entered again after it returned, or after it raised without an operator's `retry` |
| `SettledWithEvidence` | a Run called settled without every piece of evidence, or not for ever |
| `EveryAdmissionEnds` | an admitted Run without an end, unless it was given up by name |
| `GivenUpIsUnknown` | an end, or a witness of a return, above what was given up |
| `NoEndBreaksDown` | an end held at `finisher`: whoever walked it broke its promise not to raise |
| `RequestsReachAll` | a body that goes on unasked when its parent was asked to stop, or its room fenced |
| `AcknowledgedIsKept` | an acknowledged write that isn't in the rows, or a row that nobody wrote |
| `EventsAreGapless` | an event missing, or told of a Run that hasn't started or has finished |
| `OutcomesTellTheWork` | an outcome that says something else than what body and plain tasks came to |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spindel.runs._states import LeasePhase
from spindel.store import RunStatus
from spindel.testing.simulation._durable_rules import (
    AcknowledgedIsKept,
    OneOutcome,
    SettledWithEvidence,
    WitnessesInOrder,
)
from spindel.testing.simulation._invariants import Invariant, InvariantError
from spindel.testing.simulation._lifecycle_rules import (
    CallbacksOnce,
    EventsAreGapless,
    EveryAdmissionEnds,
    GivenUpIsUnknown,
    NoEndBreaksDown,
    NothingOutlivesItsLease,
    OutcomesTellTheWork,
    RequestsReachAll,
)

if TYPE_CHECKING:
    from spindel.runs import Room

__all__ = [
    "INVARIANTS",
    "check_left",
    "check_live",
]

INVARIANTS: Final[tuple[type[Invariant], ...]] = (
    OneOutcome,
    WitnessesInOrder,
    NothingOutlivesItsLease,
    CallbacksOnce,
    SettledWithEvidence,
    EveryAdmissionEnds,
    GivenUpIsUnknown,
    NoEndBreaksDown,
    RequestsReachAll,
    AcknowledgedIsKept,
    EventsAreGapless,
    OutcomesTellTheWork,
)
"""All rules over a history."""


def check_live(room: Room) -> None:
    """Check, between two turns, that no lease of a room was released with anything of it open.

    Raises:
        InvariantError: a lease isn't in the family that owns it, or outlives its parent's.
    """
    rule = "NoLeaseIsEarly"
    for key, entry in room.entries.items():
        if entry.owner.leases.get(key) is not entry or entry.phase is LeasePhase.RELEASED:
            raise InvariantError(rule, f"run {entry.run_id} is in the registry at {entry.phase}, but in no family")
        parent = entry.parent
        if parent is None or parent.end == "abandoned":
            continue
        if room.entries.get(parent.key) is not parent or not parent.live:
            raise InvariantError(rule, f"run {entry.run_id} is at {entry.phase}, but its parent's lease is gone")
        if parent.status is not RunStatus.RUNNING:
            raise InvariantError(rule, f"run {entry.run_id} is at {entry.phase}, but its parent is {parent.status}")


def check_left(room: Room) -> None:
    """Check that nothing of a room is left after its block.

    Raises:
        InvariantError: a Run, a lease, a launch or a hold is.
    """
    left = [*room.entries.values(), *room.pool.launches.values(), *room.holds.present()]
    if left:
        raise InvariantError(
            "NothingIsLeft", f"room {room.name} is {room.state.value}, and {len(left)} things are left"
        )
