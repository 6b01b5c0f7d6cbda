"""A family in plain Python: no tasks, no time, no store. What `test_family_model` compares the real one with.

The model walks the phases of a lease as the contract tells them. What the world answers (a constructor, the store, a
dispose callback, a publication) is an operation like any other, so everything can be in flight at any moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOTS = 5

ANSWERS = {
    "construct": (
        *("owned", "declared", "unaccounted"),
        *("owned-fails", "declared-fails", "unaccounted-fails", "owned-cancelled", "refuses"),
    ),
    "row": ("stored", "reply-lost", "refused", "not-stored", "unread"),
    "fence": ("stored", "refused", "not-stored"),
    "dispose": ("discarded", "incomplete", "raises"),
    "project": ("stored", "not-stored"),
    "finish": ("stored", "refused"),
    "publish": ("returns", "raises"),
}
"""What may be in flight, and how it may be answered. `unread`: stored, but neither the reply nor the reading came."""


class Operation(NamedTuple):
    """One step of a script: what, for which slot, and how."""

    name: str
    slot: int
    how: str


@attrs.define
class Lease:
    """What one reservation owes."""

    phase: str = "reserved"
    # What is in flight: an answer of the table above, or the child's body.
    waits: str | None = None
    # Its token was used; then, whether that use is still deciding.
    used: bool = False
    admitting: bool = False
    begun: str | None = None
    publishes: bool = False
    fenced: bool = False
    cancelled: bool = False
    verdict: str = "completed"
    held: bool = False
    claimed: bool = False
    # How often it was held so far: each time is another revision.
    holds: int = 0
    retriable: bool = True
    exited: bool = False
    returned: bool = False
    publication: str = "none"
    row: str | None = None


@attrs.define
class Family:
    """A parent that stays until it is told to end, and its leases by slot."""

    durable: bool
    leases: dict[int, Lease] = attrs.Factory(dict)
    sealed: bool = False
    cancelled: bool = False
    ended: bool = False
    abandoned: bool = False
    # The rows of those that are gone, by slot: the last one's.
    rows: dict[int, str | None] = attrs.Factory(dict)

    @property
    def returned(self) -> bool:
        return self.ended and not self.leases

    # -- what can have an effect -----------------------------------------------------------------------------------

    def operations(self) -> Iterator[Operation]:
        """Give every operation that would change something now."""
        for slot in range(SLOTS):
            lease = self.leases.get(slot)
            if lease is not None:
                yield from self._operations_of(slot, lease)
            elif self.refusal_to_reserve() is None:
                yield Operation("reserve", slot, "")
        if any(lease.held and not lease.claimed for lease in self.leases.values()):
            yield Operation("abandon", 0, "")
        if not self.sealed:
            yield Operation("seal", 0, "")
        if not self.cancelled and not self.ended:
            yield Operation("cancel", 0, "")
        if not self.ended:
            yield Operation("end", 0, "")

    def _operations_of(self, slot: int, lease: Lease) -> Iterator[Operation]:
        if not lease.used and not lease.exited:
            for how in ("plain", "publish", "prepare", "prepare-publish"):
                yield Operation("admit", slot, how)
        for how in ANSWERS.get(lease.waits or "", ()):
            yield Operation("answer", slot, how)
        if lease.waits == "body":
            yield Operation("finish", slot, "")
        if not lease.exited and not lease.admitting:
            yield Operation("exit", slot, "")
        for how in ("retry", "acknowledge"):
            if lease.held and self.refusal_to_reconcile(slot, how) is None:
                yield Operation("reconcile", slot, how)

    def refusal_to_reserve(self) -> str | None:
        """Name the refusal that a reservation would meet now."""
        if self.returned:
            return "ParentNotLiveError"
        if self.sealed:
            return "FamilySealedError"
        return "FamilyCancelledError" if self.cancelled else None

    def refusal_to_reconcile(self, slot: int, how: str) -> str | None:
        """Name the first refusal that a recovery would meet now; `how` may also be a wrong phase or revision."""
        lease = self.leases.get(slot)
        if lease is None:
            return "ForeignRoomError"
        reasons = {
            "CallbackNotExitedError": not lease.exited,
            "StaleRevisionError": how == "wrong-phase" or (how == "wrong-revision" and lease.held),
            "NotHeldError": not lease.held,
            "RecoveryInProgressError": lease.claimed,
            "AcknowledgeRefusedError": how == "acknowledge" and lease.phase != "publishing",
            "ConstructionOwnerUnavailableError": not lease.retriable,
        }
        return next((name for name, holds in reasons.items() if holds), None)

    # -- what it does ------------------------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Do it."""
        name, slot, how = operation
        match name:
            case "reserve":
                self.leases[slot] = Lease()
            case "abandon":
                self._abandon()
            case "seal":
                self.sealed = True
            case "cancel":
                self._cancel()
            case "end":
                self.ended = self.sealed = True
            case _:
                self._apply_to(self.leases[slot], name, how)
        for at, owed in tuple(self.leases.items()):
            self._settle(at, owed)

    def _apply_to(self, lease: Lease, name: str, how: str) -> None:
        match name:
            case "admit":
                lease.used = lease.admitting = True
                lease.publishes = how.endswith("publish")
                if how.startswith("prepare"):
                    lease.phase, lease.waits = "preparing", "construct"
                else:
                    self._issue(lease)
            case "answer":
                self._answer(lease, how)
            case "finish":
                self._finish(lease, "completed")
            case "exit":
                lease.exited = True
                lease.returned = lease.returned or lease.phase == "reserved"
            case _:
                self._reconcile(lease, how)

    def _answer(self, lease: Lease, how: str) -> None:
        in_flight, lease.waits = lease.waits, None
        match in_flight:
            case "construct":
                self._constructed(lease, how)
            case "row":
                self._row_answered(lease, how)
            case "fence" if how == "stored":
                lease.fenced, lease.row = True, "failed"
                self._dispose(lease)
            case "dispose" if how == "discarded":
                self._project(lease)
            case "project" if how == "stored":
                self._undone(lease)
            case "finish" if how == "stored":
                lease.held = lease.claimed = False
                self._came_back(lease)
            case "publish" if how == "returns":
                lease.held = lease.claimed = False
                lease.publication = "acknowledged"
            case "finish":
                lease.phase = "terminal"
                self._hold(lease)
            case _:
                self._hold(lease)

    def _constructed(self, lease: Lease, how: str) -> None:
        if how == "refuses":
            self._undone(lease)
            return
        lease.begun, _, failure = how.partition("-")
        if not failure:
            self._issue(lease)
        elif lease.begun == "unaccounted":
            self._hold(lease)
        elif self.durable:
            lease.phase, lease.waits = "fencing", "fence"
        else:
            self._dispose(lease)

    def _issue(self, lease: Lease) -> None:
        lease.phase = "starting"
        if self.durable:
            lease.waits = "row"
        else:
            self._admitted(lease)

    def _row_answered(self, lease: Lease, how: str) -> None:
        if how in ("stored", "reply-lost"):
            self._admitted(lease)
        elif how == "refused":
            if lease.begun is None:
                self._undone(lease)
            else:
                self._dispose(lease)
        else:
            lease.row = "running" if how == "unread" else None
            self._hold(lease)

    def _admitted(self, lease: Lease) -> None:
        lease.admitting = False
        lease.phase, lease.waits = "admitted", "body"
        lease.row = "running" if self.durable else None
        lease.publication = "pending" if lease.publishes else "none"
        if lease.cancelled:
            self._finish(lease, "cancelled")

    def _dispose(self, lease: Lease) -> None:
        lease.phase = "disposing"
        if lease.begun == "owned":
            lease.waits = "dispose"
        elif lease.begun == "unaccounted":
            self._hold(lease)
        else:
            self._project(lease)

    def _project(self, lease: Lease) -> None:
        lease.phase = "projecting"
        if lease.fenced and lease.begun == "owned":
            lease.waits = "project"
        else:
            self._undone(lease)

    def _undone(self, lease: Lease) -> None:
        lease.admitting = lease.held = lease.claimed = False
        lease.returned = True

    def _finish(self, lease: Lease, verdict: str) -> None:
        lease.verdict = verdict
        if self.durable:
            lease.waits = "finish"
        else:
            self._came_back(lease)

    def _came_back(self, lease: Lease) -> None:
        lease.row = lease.verdict if self.durable else None
        lease.returned = True
        lease.waits = "publish" if lease.publication == "pending" else None

    def _hold(self, lease: Lease) -> None:
        lease.admitting = lease.claimed = False
        lease.held = True
        lease.holds += 1
        lease.retriable = not (lease.begun == "unaccounted" and lease.phase in ("preparing", "disposing"))

    def _reconcile(self, lease: Lease, how: str) -> None:
        if how == "acknowledge":
            lease.held = False
            lease.publication = "acknowledged"
            return
        lease.claimed = True
        if lease.phase == "starting":
            lease.phase = "fencing"
        lease.waits = {
            "fencing": "fence",
            "disposing": "dispose",
            "projecting": "project",
            "terminal": "finish",
            "publishing": "publish",
        }[lease.phase]

    def _abandon(self) -> None:
        for lease in self.leases.values():
            if lease.held and not lease.claimed:
                self.abandoned = True
                lease.held = False
                lease.returned = True
                lease.publication = "none"

    def _cancel(self) -> None:
        self.cancelled = True
        for lease in self.leases.values():
            lease.cancelled = True
            if lease.waits == "body":
                self._finish(lease, "cancelled")

    def _settle(self, slot: int, lease: Lease) -> None:
        """Let a lease go once callback, child or preparation, and publication are back; else say what is left."""
        if not lease.returned:
            return
        if lease.publication == "pending":
            lease.phase = "publishing"
        elif lease.exited:
            self.rows[slot] = lease.row
            del self.leases[slot]
        else:
            lease.phase = "returned"
