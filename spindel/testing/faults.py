"""Failure as an input: a store whose n-th write fails the way that a test wants.

What a fault does to a write:

| fault | stored | the caller sees |
|---|---|---|
| REFUSED | never | `WriteRefusedError`, transient unless told otherwise |
| BEFORE | never, but nobody may know | `WriteUncertainError` |
| LOST_REPLY | yes | `WriteUncertainError` |
| LATE | when the test calls `arrive` | `WriteUncertainError` |

Loop over n = 1, 2, ... until the fault meets nothing any more, and every write of a program has failed once:
`fail_each` does.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import attrs
import trio

from spindel.errors import WriteRefusedError, WriteUncertainError
from spindel.store._mutations import Together
from spindel.store._rules import check_mutation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from spindel.ids import RunId
    from spindel.store._contract import Confirmation, RoomClaim, Store
    from spindel.store._mutations import Mutation
    from spindel.store._records import RoomRecord, RunPage, RunQuery, RunRecord

__all__ = ["Fault", "FaultyStore", "Hold", "PlannedFault", "SeenWrite", "fail_each"]

A = TypeVar("A")
Kinds = type[Any] | tuple[type[Any], ...] | None

WRITES_MAX: Final = 10_000
"""`fail_each` gives up there: a program that retries for ever never runs out of writes."""


class Fault(StrEnum):
    """How a write fails. See the table of the module."""

    REFUSED = "refused"
    BEFORE = "before"
    LOST_REPLY = "lost-reply"
    LATE = "late"


@attrs.define(eq=False)
class PlannedFault:
    """A fault that waits for its write.

    Attributes:
        fault: how the write fails.
        of: the mutation types that count, or None for all; a `Together` counts as what it holds, too.
        countdown: how many matching writes pass until the first one fails, that one included.
        times: how many more writes in a row fail.
        code: of a refusal.
        transient: of a refusal.
        met: the mutations that failed, in order.
    """

    fault: Fault
    of: Kinds
    countdown: int
    times: int
    code: str
    transient: bool
    met: list[Mutation[Any]] = attrs.Factory(list["Mutation[Any]"])

    @property
    def fired(self) -> bool:
        """True once a write has failed by it."""
        return bool(self.met)

    def takes(self, mutation: Mutation[Any]) -> bool:
        """Count a write; True if it is to fail."""
        if self.times == 0 or not _is_of(mutation, self.of):
            return False
        if self.countdown > 1:
            self.countdown -= 1
            return False
        self.times -= 1
        self.met.append(mutation)
        return True


class Hold:
    """A write that is slow: it waits until the test releases it, and later writes wait behind it."""

    __slots__ = ("_countdown", "_of", "_reached", "_released")

    def __init__(self, n: int, of: Kinds) -> None:
        self._countdown = n
        self._of = of
        self._reached = trio.Event()
        self._released = trio.Event()

    async def wait_reached(self) -> None:
        """Wait until the write has come and is held."""
        await self._reached.wait()

    def release(self) -> None:
        """Let it go on."""
        self._released.set()

    def _takes(self, mutation: Mutation[Any]) -> bool:
        if self._countdown == 0 or not _is_of(mutation, self._of):
            return False
        self._countdown -= 1
        return self._countdown == 0

    async def _wait_released(self) -> None:
        self._reached.set()
        await self._released.wait()


@attrs.frozen
class SeenWrite:
    """A write as it came: the mutation and the fault that it met, or None."""

    mutation: Mutation[Any]
    fault: Fault | None


class FaultyStore:
    """Wraps any store and fails, delays and records its writes.

    Args:
        store: what really keeps the facts.

    Attributes:
        writes: every write in the order in which it came, repeats included.
        confirms: every mutation that was read back, in order.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.durable = store.durable
        self.writes: list[SeenWrite] = []
        self.confirms: list[Mutation[Any]] = []
        self._plans: list[PlannedFault] = []
        self._holds: list[Hold] = []
        self._late: list[Mutation[Any]] = []
        self._lost_epochs: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._confirm_faults: list[PlannedFault] = []
        self._order = trio.Lock()

    # -- plans -------------------------------------------------------------------------------------------------------

    def fail(
        self,
        n: int = 1,
        fault: Fault | str = Fault.BEFORE,
        *,
        of: Kinds = None,
        times: int = 1,
        code: str = "injected",
        transient: bool = True,
    ) -> PlannedFault:
        """Plan that the n-th matching write from now fails, and the ones after it, `times` in all.

        Several plans count on their own; the first one that takes a write decides.
        """
        plan = PlannedFault(Fault(fault), of, _positive(n), times, code, transient)
        self._plans.append(plan)
        return plan

    def fail_confirm(self, n: int = 1, *, of: Kinds = None, times: int = 1) -> PlannedFault:
        """Plan that the n-th matching `confirm` from now can't be read, and the ones after it, `times` in all."""
        plan = PlannedFault(Fault.BEFORE, of, _positive(n), times, "", transient=False)
        self._confirm_faults.append(plan)
        return plan

    def hold(self, n: int = 1, *, of: Kinds = None) -> Hold:
        """Plan that the n-th matching write from now waits for its release."""
        hold = Hold(_positive(n), of)
        self._holds.append(hold)
        return hold

    def lose(self, room: str) -> None:
        """Behave as if a newer owner had claimed the room: its present owner's writes are `not-owner` from now on."""
        self._lost_epochs[room] = self._epochs[room]

    def mend(self) -> None:
        """Drop every plan that has not been used up; what is held or late stays."""
        self._plans.clear()
        self._confirm_faults.clear()

    async def arrive(self) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Let the late writes arrive now, in order; their results, refusals included, are given as values."""
        late, self._late = self._late, []
        return await self.store.write_each(late)

    def written(self, of: Kinds = None) -> list[Mutation[Any]]:
        """Give the mutations that came so far, repeats included."""
        return [seen.mutation for seen in self.writes if _is_of(seen.mutation, of)]

    # -- the store ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Open the wrapped store."""
        await self.store.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        """Close the wrapped store."""
        await self.store.__aexit__(exc_type, exc, tb)  # noqa: ASYNC102  the wrapped one decides

    def claim_room(self, claim: RoomClaim) -> AbstractAsyncContextManager[int]:
        """Own a room of the wrapped store."""
        return _NotedClaim(self.store.claim_room(claim), claim.name, self._epochs)

    async def write(self, mutation: Mutation[A]) -> A:
        """Apply one mutation, unless a plan says otherwise."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.write_shielded(mutation)

    async def write_shielded(self, mutation: Mutation[A]) -> A:
        """As `write`, without looking at cancellation at all."""
        (result,) = await self.write_each([mutation])
        if isinstance(result, WriteRefusedError | WriteUncertainError):
            raise result
        return result  # type: ignore[no-any-return]

    async def write_each(
        self, mutations: Sequence[Mutation[Any]]
    ) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Apply several independent mutations, in order, each as its plan says."""
        for mutation in mutations:
            check_mutation(mutation)
        verdicts = [(mutation, self._judge(mutation), self._held_by(mutation)) for mutation in mutations]
        if self._order.locked() or any(hold is not None for _, _, hold in verdicts):
            # Trio's lock is fair, so whoever comes while a write is slow stays behind it, in order.
            with trio.CancelScope(shield=True):
                async with self._order:
                    return await self._write_in_order(verdicts)
        return await self._write_in_order(verdicts)

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Read a mutation's identity back, unless a plan says otherwise."""
        self.confirms.append(mutation)
        taken = [plan for plan in self._confirm_faults if plan.takes(mutation)]
        if taken:
            raise WriteUncertainError(mutation.identity, "the reading failed, as planned")
        return await self.store.confirm(mutation)

    async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run of the wrapped store."""
        return await self.store.load_run(room, run_id)

    async def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page of Runs of the wrapped store."""
        return await self.store.list_runs(query)

    async def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read the rooms of the wrapped store."""
        return await self.store.list_rooms()

    # -- how a write goes --------------------------------------------------------------------------------------------

    def _judge(self, mutation: Mutation[Any]) -> PlannedFault | None:
        taken = [plan for plan in self._plans if plan.takes(mutation)]
        decisive = taken[0] if taken else None
        self.writes.append(SeenWrite(mutation, None if decisive is None else decisive.fault))
        return decisive

    def _held_by(self, mutation: Mutation[Any]) -> Hold | None:
        return next((hold for hold in self._holds if hold._takes(mutation)), None)

    async def _write_in_order(
        self, verdicts: Iterable[tuple[Mutation[Any], PlannedFault | None, Hold | None]]
    ) -> list[Any]:
        """Pass neighbours without a fault on together, so that they still share one wait and one commit."""
        results: list[Any] = []
        passing: list[Mutation[Any]] = []

        async def flush() -> None:
            if passing:
                results.extend(await self.store.write_each(passing))
                passing.clear()

        for mutation, plan, hold in verdicts:
            lost = self._lost_epochs.get(mutation.room)
            if hold is None and plan is None and lost is None:
                passing.append(mutation)
                continue
            await flush()
            if hold is not None:
                await hold._wait_released()
            if lost is not None and mutation.epoch <= lost:
                results.append(WriteRefusedError("not-owner", detail="a newer owner has the room, as planned"))
            elif plan is None:
                results.extend(await self.store.write_each([mutation]))
            else:
                results.append(await self._write_faulty(mutation, plan))
        await flush()
        return results

    async def _write_faulty(self, mutation: Mutation[Any], plan: PlannedFault) -> Any:
        if plan.fault is Fault.REFUSED:
            return WriteRefusedError(plan.code, transient=plan.transient, detail="as planned")
        if plan.fault is Fault.LATE:
            self._late.append(mutation)
        elif plan.fault is Fault.LOST_REPLY:
            (result,) = await self.store.write_each([mutation])
            if isinstance(result, WriteRefusedError):
                # It had no effect, and a caller that can't know would only ask again.
                return result
        return WriteUncertainError(mutation.identity, "as planned")


class _NotedClaim:
    """A claim of the wrapped store that notes the epoch on its way out."""

    def __init__(self, claim: AbstractAsyncContextManager[int], room: str, epochs: dict[str, int]) -> None:
        self._claim = claim
        self._room = room
        self._epochs = epochs

    async def __aenter__(self) -> int:
        epoch = self._epochs[self._room] = await self._claim.__aenter__()
        return epoch

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> bool | None:
        return await self._claim.__aexit__(exc_type, exc, tb)  # noqa: ASYNC102  the wrapped one decides


def _is_of(mutation: Mutation[Any], of: Kinds) -> bool:
    if of is None or isinstance(mutation, of):
        return True
    return isinstance(mutation, Together) and any(_is_of(inner, of) for inner in mutation.mutations)


def _positive(n: int) -> int:
    if n < 1:
        raise ValueError(f"writes are counted from 1, not {n}")
    return n


async def fail_each(
    open_store: Callable[[], Store],
    scenario: Callable[[FaultyStore], Awaitable[object]],
    *,
    fault: Fault | str = Fault.BEFORE,
    of: Kinds = None,
) -> int:
    """Run a scenario again and again, failing its first matching write, then its second, until none is left to fail.

    Args:
        open_store: makes a fresh store for each attempt; it is entered here.
        scenario: gets the faulty store, and checks what must hold whichever write failed.
        fault: how the writes fail.
        of: which mutation types count.

    Returns:
        How many writes failed, one in each attempt.

    Raises:
        AssertionError: the scenario still wrote after 10,000 attempts.
    """
    for n in count(1):
        async with FaultyStore(open_store()) as store:
            plan = store.fail(n, fault, of=of)
            await scenario(store)
        if not plan.fired:
            return n - 1
        assert n < WRITES_MAX, f"the scenario made more than {WRITES_MAX} writes"
    raise AssertionError  # pragma: no cover  count() has no end
