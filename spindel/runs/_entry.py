"""The registry entry: one record that is a Run's admission lease, its execution lease and its family state.

There is no other registry. An entry is made by the reservation, before anything happens, and changes phase until
everything that the admission owed has come back. `Run` objects, nurseries and tasks may refer to it; only the code of
this package, in single turns of the loop, changes it.

One record instead of three because two of everything for each child is what a child costs: see the benchmark
`admission`. Rare things (callbacks, publication, holds) sit in slots that stay None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import trio

from spindel.runs._parking import park
from spindel.runs._states import LeasePhase, Publication
from spindel.store import FAMILY_VERSION, RunStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextvars import Context

    from spindel.ids import LeaseId, RunId
    from spindel.runs._finishing import Finisher
    from spindel.runs._frontier import Block
    from spindel.runs._hosting import FamilyHost
    from spindel.runs._outcome import Decision, Outcome
    from spindel.runs._preparation import Custody
    from spindel.runs._room import Room
    from spindel.runs._run import Run
    from spindel.store import AdmitRun

__all__ = ["Entry", "FamilyReturned", "FamilyState", "Readiness"]


@attrs.frozen
class FamilyReturned:
    """The one thing that acknowledges a family's return; only the join of that family makes it.

    Attributes:
        run_id: the parent.
        incarnation: the room's opening in which the family lived.
    """

    run_id: RunId
    incarnation: object


class FamilyState:
    """The children of a Run, or the root Runs of a room: all that is still owed for them.

    A family has returned when it is sealed and has no lease. It is then joined by whoever registered as joiner.
    """

    __slots__ = ("abandoned", "blocks", "joined", "leases", "parent", "sealed", "waiters")

    def __init__(self, parent: Entry | None = None) -> None:
        # Whose family it is, None for the room's own.
        self.parent = parent
        self.leases: dict[int, Entry] = {}
        self.sealed = False
        # Called once, in the turn in which the family returns.
        self.joined: Callable[[], None] | None = None
        # Tasks inside one of its admissions: waiting there for the parent could never end.
        self.blocks: list[Block] | None = None
        # Who waits for one lease: made by the first such wait.
        self.waiters: dict[int, trio.Event] | None = None
        # An operator gave up a hold below: the family counts as gone, but its return is unknown.
        self.abandoned = False

    @property
    def returned(self) -> bool:
        """True once it is sealed and nothing is owed."""
        return self.sealed and not self.leases

    async def wait_returned(self) -> None:
        """Wait until it has returned, for the one who joins it. Not cancellable."""
        if not self.returned:
            await park(lambda resume: setattr(self, "joined", resume))

    def seal(self) -> None:
        """Admit nobody any more; idempotent."""
        self.sealed = True
        if not self.leases:
            self._tell()

    def drop(self, key: int) -> None:
        """Take a released lease out."""
        del self.leases[key]
        if self.waiters is not None and (waiter := self.waiters.pop(key, None)) is not None:
            waiter.set()
        if self.sealed and not self.leases:
            self._tell()

    def _tell(self) -> None:
        joined, self.joined = self.joined, None
        if joined is not None:
            joined()


@attrs.define(eq=False)
class Readiness:
    """A Run's word that it is ready, with a value, and who waits for it."""

    event: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    told: bool = False


class Entry:
    """Admission lease, execution lease and family state of one Run. See the module."""

    __slots__ = (
        "_handle",
        "_lease_id",
        "admission",
        "args",
        "callback_exited",
        "callbacks",
        "cancel_reason",
        "context",
        "custody",
        "depth",
        "done",
        "end",
        "error",
        "family",
        "family_version",
        "finisher",
        "first_failure",
        "fn",
        "home",
        "host",
        "inside",
        "joined",
        "key",
        "live",
        "on_child_failure",
        "outcome",
        "outside",
        "owner",
        "parent",
        "phase",
        "publication",
        "publish",
        "reason",
        "returned",
        "room",
        "run_id",
        "scope",
        "sealed",
        "started",
        "status",
        "value",
        "verdict",
        "work",
    )

    def __init__(self, room: Room, parent: Entry | None, owner: FamilyState, run_id: RunId) -> None:
        self.room = room
        self.parent = parent
        # The family that owns this lease: the parent's or the room's.
        self.owner = owner
        self.run_id = run_id
        self.key = run_id.int
        self.depth: int = 0 if parent is None else parent.depth + 1
        self._lease_id: LeaseId | None = None
        self._handle: Run[Any] | None = None

        # The admission lease.
        self.phase = LeasePhase.RESERVED
        self.callback_exited = False
        self.returned = False
        self.publication = Publication.NONE
        self.publish: Callable[[Outcome[Any]], Awaitable[None]] | None = None
        self.admission: AdmitRun | None = None
        # What a preparation began, and what undoing a failed admission needs; None for most.
        self.custody: Custody | None = None

        # The original controls: flag, scope, callbacks.
        self.cancel_reason: str | None = None
        self.scope: trio.CancelScope | None = None
        self.callbacks: dict[str, Callable[[str], None]] | None = None

        # The execution.
        self.live = False
        self.sealed = False
        # The row's status as far as this process knows; the verdict is chosen earlier, when the work is over.
        self.status = RunStatus.RUNNING
        self.verdict: RunStatus | None = None
        self.reason: str | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        # None while it runs; then how it left: `finished`, `lost` or `abandoned`.
        self.end: str | None = None
        self.outcome: Outcome[Any] | None = None
        self.fn: Callable[..., Awaitable[Any]] | None = None
        self.args: tuple[Any, ...] = ()
        self.context: Context | None = None
        self.home: trio.Nursery | None = None
        self.done: trio.Event | None = None
        self.started: Readiness | None = None
        self.finisher: Finisher | None = None
        # How many of its native launches are out, whoever asked for them, and what tells the Run that all are back.
        self.outside = 0
        self.inside: Callable[[], None] | None = None
        # Set in the turn in which all of it has come back: from here on it launches nothing more.
        self.joined = False

        # The family.
        self.family_version: int | None = FAMILY_VERSION
        self.family: FamilyState | None = None
        self.host: FamilyHost | None = None
        self.on_child_failure = "isolate"
        # Under the policy `cancel`: what the work came to, kept until the family has returned, and the errors of
        # children if one of them failed first.
        self.work: Decision | None = None
        self.first_failure: list[BaseException] | None = None

    @property
    def lease_id(self) -> LeaseId:
        """The admission lease's id, made when somebody first looks at it."""
        if self._lease_id is None:
            self._lease_id = self.room.new_lease_id()
        return self._lease_id

    def handle(self) -> Run[Any]:
        """Give the one `Run` object of this entry."""
        if self._handle is None:
            self._handle = self.room.make_handle(self)
        return self._handle

    @property
    def work_over(self) -> bool:
        """True once body and plain tasks have ended, though the family may decide the outcome."""
        return self.verdict is not None or self.work is not None

    def seal(self) -> None:
        """Take no more children. Idempotent."""
        self.sealed = True
        if self.family is not None:
            self.family.seal()

    async def wait_lease(self, lease_id: LeaseId) -> None:
        """Wait until the family has released that lease."""
        leases = () if self.family is None else self.family.leases.values()
        found = next((entry for entry in leases if entry.lease_id == lease_id), None)
        if found is None:
            await trio.lowlevel.checkpoint()
            return
        family = found.owner
        if family.waiters is None:
            family.waiters = {}
        await family.waiters.setdefault(found.key, trio.Event()).wait()

    def release_if_over(self) -> None:
        """Drop the lease once callback exit, return and publication have all come, in whatever order."""
        if not self.returned:
            return
        if self.publication is Publication.PENDING:
            self.phase = LeasePhase.PUBLISHING
        elif self.callback_exited:
            self.drop_lease()
        else:
            self.phase = LeasePhase.RETURNED

    def finish_unadmitted(self, end: str) -> None:
        """End an admission that never became a Run; its lease follows its callback."""
        self.end = end
        self.returned = True
        self.release_if_over()

    def drop_lease(self) -> None:
        """Release the lease: first what it refers to, then the lease itself.

        Only now the id leaves the registry: an ended Run whose lease is still owed must be found, and no other
        admission may take its place in the family.
        """
        self.admission = None
        self.custody = None
        self.publish = None
        self.home = None
        # The handle may live on with its user; entry and handle holding each other would be left to the collector.
        self._handle = None
        self.parent = None
        self.phase = LeasePhase.RELEASED
        del self.room.entries[self.key]
        self.owner.drop(self.key)
