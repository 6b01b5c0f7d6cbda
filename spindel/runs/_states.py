"""The states of runs, leases, launches and rooms, as tables. No I/O, no Trio.

A transition that isn't in its table is a bug: the tests walk every arrow of a lease's, and no other. The diagrams of
the documentation are made from these tables, so they can't disagree with the code.

A lease is a parent's record of one admission. It is reserved before anything happens, and goes when everything that
the admission owed has come back. `starting` is the dangerous phase: once the first row has been issued, nobody may
conclude from a missing row that it was not written. So the only ways on are an acknowledgement, a refusal, or a
hold that ends in a fence. `publishing` and `returned` are the two halves of an end: the child is back, or what was
prepared for one that never began, and either a publication or the callback that reserved is still outstanding.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = [
    "LEASE_NEXT",
    "ROOM_NEXT",
    "TICKET_NEXT",
    "HoldKind",
    "LaunchKind",
    "LaunchState",
    "LeasePhase",
    "Publication",
    "RoomState",
    "TicketState",
]


class LeasePhase(StrEnum):
    """How far an admission is."""

    RESERVED = "reserved"
    PREPARING = "preparing"
    STARTING = "starting"
    FENCING = "fencing"
    DISPOSING = "disposing"
    PROJECTING = "projecting"
    ADMITTED = "admitted"
    TERMINAL = "terminal"
    PUBLISHING = "publishing"
    RETURNED = "returned"
    RELEASED = "released"


_P = LeasePhase
LEASE_NEXT: Final[dict[LeasePhase, frozenset[LeasePhase]]] = {
    _P.RESERVED: frozenset({_P.PREPARING, _P.STARTING, _P.RELEASED}),
    _P.PREPARING: frozenset({_P.STARTING, _P.FENCING, _P.DISPOSING, _P.RETURNED, _P.RELEASED}),
    _P.STARTING: frozenset({_P.ADMITTED, _P.FENCING, _P.DISPOSING, _P.RETURNED, _P.RELEASED}),
    _P.FENCING: frozenset({_P.DISPOSING, _P.RETURNED, _P.RELEASED}),
    _P.DISPOSING: frozenset({_P.PROJECTING, _P.RETURNED, _P.RELEASED}),
    _P.PROJECTING: frozenset({_P.RETURNED, _P.RELEASED}),
    _P.ADMITTED: frozenset({_P.TERMINAL, _P.PUBLISHING, _P.RETURNED, _P.RELEASED}),
    _P.TERMINAL: frozenset({_P.ADMITTED}),
    _P.PUBLISHING: frozenset({_P.RETURNED, _P.RELEASED}),
    _P.RETURNED: frozenset({_P.RELEASED}),
    _P.RELEASED: frozenset(),
}


class Publication(StrEnum):
    """Whether a child's outcome is to be published, and was."""

    NONE = "none"
    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"


class RoomState(StrEnum):
    """What a room admits.

    OPEN: everything. SEALED: children of live Runs. FENCED: only what was reserved before. CLOSED and LOST: nothing.
    """

    OPEN = "open"
    SEALED = "sealed"
    FENCED = "fenced"
    CLOSED = "closed"
    LOST = "lost"


_R = RoomState
ROOM_NEXT: Final[dict[RoomState, frozenset[RoomState]]] = {
    _R.OPEN: frozenset({_R.SEALED, _R.FENCED, _R.LOST}),
    _R.SEALED: frozenset({_R.FENCED, _R.CLOSED, _R.LOST}),
    _R.FENCED: frozenset({_R.CLOSED, _R.LOST}),
    _R.CLOSED: frozenset(),
    _R.LOST: frozenset(),
}


class HoldKind(StrEnum):
    """What is held: an admission lease, a launch of the pool, or a stage that a finisher walks."""

    LEASE = "lease"
    LAUNCH = "launch"
    STAGE = "stage"


class LaunchKind(StrEnum):
    """What the pool runs. All are tasks but `native`, which is a thread.

    A `wait` is for layers above, which wait for a Run on behalf of a program that must not take a step meanwhile; it
    ends with whoever waits for it.
    """

    JOIN = "join"
    PUBLICATION = "publication"
    CLEANUP = "cleanup"
    RECOVERY = "recovery"
    WAIT = "wait"
    NATIVE = "native"


class LaunchState(StrEnum):
    """How far a launch is.

    RETAINED: callback and id are kept, nothing is constructed. REGISTERED: its ticket is known. SUBMITTING: the
    ticket was offered to the executor, the answer is unknown. RUNNING: claimed. RETURNED, FAILED: it came back.
    """

    RETAINED = "retained"
    REGISTERED = "registered"
    SUBMITTING = "submitting"
    RUNNING = "running"
    RETURNED = "returned"
    FAILED = "failed"


class TicketState(StrEnum):
    """A run-once ticket."""

    NEW = "new"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


_T = TicketState
TICKET_NEXT: Final[dict[TicketState, frozenset[TicketState]]] = {
    _T.NEW: frozenset({_T.RUNNING, _T.CANCELLED}),
    _T.RUNNING: frozenset({_T.DONE}),
    _T.DONE: frozenset(),
    _T.CANCELLED: frozenset(),
}
