"""A program with three levels of families under every fault of its store, and cancelled at every step.

Whatever fails, it ends clean, or held with an exact name and after an operator's retries clean. No constructor ran
twice, nothing was disposed before its fence, and no witness is there without its family's return.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import AdmissionError
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.operator import reconcile_settlement
from spindel.runs import (
    Acquisition,
    Child,
    Disposal,
    Outcome,
    Preparation,
    Room,
    Run,
    current_run,
    observe_settlement,
    open_room,
)
from spindel.store import AdmitRun, FenceAdmission, FinishRun, RecordDisposal
from spindel.testing.faults import Fault, FaultyStore
from spindel.testing.sweep import sweep_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.store import RunRecord, Store


WRITES = (AdmitRun, FenceAdmission, FinishRun, RecordDisposal)


class Ledger:
    """Everything that happened outside the store, in order, and how many writes had been made by then."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.lines: list[tuple[str, RunId]] = []
        self.times: dict[RunId, int] = {}

    def note(self, what: str, run_id: RunId) -> None:
        self.lines.append((what, run_id))
        self.times[run_id] = len(self.store.writes)

    def count(self, what: str) -> Counter[RunId]:
        return Counter(run_id for line, run_id in self.lines if line == what)


@attrs.frozen
class Place(Preparation[str]):
    """A place outside that a Run gets, noted in the ledger."""

    ledger: Ledger
    store: FaultyStore
    fails: bool = False

    async def construct(self, run_id: RunId, acquisition: Acquisition) -> str:
        self.ledger.note("construct", run_id)

        async def dispose() -> Disposal:
            row = await self.store.load_run("main", run_id)
            # A refused first row needs no fence; any other admission has one before its things go.
            fenced = row is not None and row.reason == "admission-failed"
            refused = any(
                seen.fault is Fault.REFUSED and isinstance(seen.mutation, AdmitRun) and seen.mutation.id == run_id
                for seen in self.store.writes
            )
            assert fenced or refused, "disposed before the fence"
            self.ledger.note("dispose", run_id)
            return Disposal.DISCARDED

        acquisition.begin("place", dispose)
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise ConnectionError("no place is free")
        return "place"


async def leaf(run: Run[Any], ledger: Ledger) -> None:
    ledger.note("body", run.id)
    await trio.lowlevel.checkpoint()


async def branch(run: Run[Any], ledger: Ledger, store: FaultyStore, depth: int) -> None:
    ledger.note("body", run.id)
    published = []

    async def publish(outcome: Outcome[Any]) -> None:
        published.append(outcome)
        ledger.note("publish", outcome.run_id)
        await trio.lowlevel.checkpoint()

    run.start_soon(trio.lowlevel.checkpoint)
    # Refused, failed or uncertain: the family answers for it, and the parent goes on.
    with suppress(AdmissionError):
        await run.start_child(leaf, ledger, prepare=Place(ledger, store, fails=True))
    with suppress(AdmissionError):
        if depth:
            await run.start_child(branch, ledger, store, depth - 1, prepare=Place(ledger, store), publish=publish)
        children: list[Child[Any]] = [Child.of(leaf, ledger, prepare=Place(ledger, store)), Child.of(leaf, ledger)]
        await run.start_children(children)
    assert current_run() is run


async def operate(room: Room) -> int:
    """Retry whatever is held, until nothing is. Gives how often."""
    retries = 0
    while held := room.held():
        for hold in held:
            facts = (await observe_settlement(room, hold.run_id)).admission
            assert facts is not None
            assert facts.held, "a hold has an exact name"
            assert facts.revision is not None
            assert (hold.phase, hold.lease_id) == (facts.phase, facts.lease_id)
            await reconcile_settlement(
                room, hold.run_id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision
            )
            retries += 1
        assert retries < 100, "the operator gets nowhere"
    return retries


async def settle(room: Room, root: Run[Any]) -> int:
    """Wait for the end as an operator would: retry what is held whenever everything waits for it."""
    retries = 0
    while True:
        with trio.move_on_after(20):
            await root.wait_returned()
        retries += await operate(room)
        if room.find(root.id) is None and not room.held() and not room.live():
            return retries


async def rows_of(store: FaultyStore) -> dict[RunId, RunRecord]:
    found = {}
    for mutation in store.written((AdmitRun, FenceAdmission)):
        assert isinstance(mutation, AdmitRun | FenceAdmission)
        admission = mutation.admission if isinstance(mutation, FenceAdmission) else mutation
        run_id = RunId(admission.id)
        row = await store.load_run("main", run_id)
        if row is not None:
            found[run_id] = row
    return found


async def check_all(store: FaultyStore, ledger: Ledger) -> None:
    rows = await rows_of(store)
    assert all(row.status.terminal for row in rows.values()), "an admitted Run has no outcome"
    assert all(times == 1 for times in ledger.count("construct").values()), "a constructor ran twice"
    assert all(times == 1 for times in ledger.count("body").values()), "a body ran twice"
    assert all(times == 1 for times in ledger.count("publish").values()), "a publication was repeated unasked"
    for run_id, row in rows.items():
        fenced = row.reason == "admission-failed"
        if fenced:
            assert row.family_return_ack is None
            assert run_id not in ledger.count("body"), "a fenced Run had begun"
            constructed, disposed = ledger.count("construct")[run_id], ledger.count("dispose")[run_id]
            assert constructed == disposed, "what was constructed was not disposed"
            assert row.admission_disposal == ("discarded" if constructed else None)
        else:
            assert row.family_return_ack == witness_id(WitnessStage.FAMILY_RETURN, run_id)
            assert ledger.count("dispose")[run_id] == 0, "the family disposed what a child owns"
    check_witnesses(store, ledger, rows)
    ended = {run_id: row.ended_at or 0 for run_id, row in rows.items()}
    for run_id, row in rows.items():
        if row.parent_id is not None and row.family_return_ack is not None:
            assert ended[run_id] <= ended[row.parent_id], "a parent ended before its child"


def check_witnesses(store: FaultyStore, ledger: Ledger, rows: dict[RunId, RunRecord]) -> None:
    """Check that a parent wrote its end, which carries its witness, after all that was ever done for its children."""
    ends: dict[RunId, int] = {}
    last: dict[RunId, int] = dict(ledger.times)
    for position, seen in enumerate(store.writes):
        mutation: Any = seen.mutation
        if isinstance(mutation, FinishRun):
            ends.setdefault(RunId(mutation.id), position)
        if isinstance(mutation, WRITES):
            run_id = RunId(mutation.admission.id if isinstance(mutation, FenceAdmission) else mutation.id)
            last[run_id] = max(last.get(run_id, 0), position)
    for run_id, row in rows.items():
        if row.parent_id is not None and row.parent_id in ends:
            assert last[run_id] <= ends[RunId(row.parent_id)], "a witness without its family's return"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "transient"),
    [
        (Fault.REFUSED, True),
        (Fault.REFUSED, False),
        (Fault.BEFORE, True),
        (Fault.LOST_REPLY, True),
        (Fault.LATE, True),
    ],
)
async def test_every_write_may_fail(
    fresh: Callable[[], Store], fault: Fault, transient: bool, spindel_clock: trio.testing.MockClock
) -> None:
    """R-51, R-58, R-59, R-61, R-78: each write failed in turn, in each way: the program ends clean, or held by name.

    What was late arrives when all is over, and changes nothing: it meets what has been stored since.
    """
    retries = attempts = 0
    met: Counter[str] = Counter()
    number = 0
    while True:
        number += 1
        async with FaultyStore(fresh()) as store:
            ledger = Ledger(store)
            # Opening the room is another matter: the fault falls on what the program itself writes.
            async with open_room(store, name="main") as room:
                plan = store.fail(number, fault, of=WRITES, transient=transient)
                try:
                    root = await room.start(branch, ledger, store, 2)
                except AdmissionError:
                    assert room.held() == ()
                else:
                    retries += await settle(room, root)
                assert room.held() == ()
                before = await rows_of(store)
                late = await store.arrive()
                assert await rows_of(store) == before
            await check_all(store, ledger)
        assert len(late) == (plan.fired and fault is Fault.LATE)
        met.update(type(mutation).__name__ for mutation in plan.met)
        if not plan.fired:
            break
        attempts += 1

    assert attempts >= 24, "nine Runs and three failed admissions make two writes each"
    assert set(met) == {kind.__name__ for kind in WRITES}
    assert retries > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY])
async def test_every_pair_of_neighbouring_writes_may_fail(
    fresh: Callable[[], Store], fault: Fault, spindel_clock: trio.testing.MockClock
) -> None:
    """R-59: two faults in a row, and readings that fail, too: still clean after the operator's retries."""
    number = 0
    while True:
        number += 1
        async with FaultyStore(fresh()) as store:
            ledger = Ledger(store)
            async with open_room(store, name="main") as room:
                plan = store.fail(number, fault, of=WRITES, times=2)
                store.fail_confirm(1, times=2)
                try:
                    root = await room.start(branch, ledger, store, 2)
                except AdmissionError:
                    await operate(room)
                else:
                    await settle(room, root)
            await check_all(store, ledger)
        if not plan.fired:
            break


@pytest.mark.slow
@pytest.mark.parametrize("target", ["root", "room", "close"])
async def test_the_program_may_be_cancelled_at_every_step(
    target: str, fresh: Callable[[], Store], request: pytest.FixtureRequest, spindel_clock: trio.testing.MockClock
) -> None:
    """R-51, R-64: cancelled at every step, with a fault on the way, the same holds."""

    async def scenario(steps: Any) -> None:
        async with FaultyStore(fresh()) as store:
            ledger = Ledger(store)
            store.fail(4, Fault.BEFORE, of=AdmitRun)
            await run_cancelled(store, ledger, steps)
            await check_all(store, ledger)

    async def run_cancelled(store: FaultyStore, ledger: Ledger, steps: Any) -> None:
        with trio.CancelScope() as scope:
            async with open_room(store, name="main") as room:
                root = await room.start(branch, ledger, store, 2)

                def act() -> None:
                    if target == "root":
                        root.cancel()
                    elif target == "room":
                        scope.cancel()
                    else:
                        nursery.start_soon(close)

                async def close() -> None:
                    with trio.CancelScope(shield=True):
                        await room.close(grace_seconds=1000)

                async with trio.open_nursery() as nursery:
                    steps.arm(act)
                    with trio.CancelScope(shield=True):
                        await settle(room, root)
                        await wait_all_tasks_blocked()
                    steps.arm(lambda: None)

    # A step of the loop is the same over every store; each attempt on a server connects three times.
    every = 3 if request.node.get_closest_marker("postgres") else 1

    assert await sweep_steps(scenario, every=every) * every > 50
