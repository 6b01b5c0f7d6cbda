"""Finishers: a layer above walks its own stages over the steps that end every Run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AdmissionUncertainError,
    FamilyUnsupportedError,
    InvalidRecordError,
    RoomOwnershipLostError,
    RunAbandonedError,
    RunNotFinishedError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.ids import WitnessStage, witness_id
from spindel.operator import abandon_held
from spindel.runs import (
    Executor,
    Finishing,
    Presence,
    RoomState,
    Run,
    Ticket,
    WitnessFact,
    observe_settlement,
    open_room,
)
from spindel.store import AdmitRun, AppendWitnesses, FinishRun, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.ids import RunId
    from spindel.runs import Launch, Room


@attrs.define
class Stages:
    """Walks the stages of staged cleanup: join, clean, core witness, outcome, retire, adapter witness, release."""

    room: Room
    order: list[str] = attrs.Factory(list)
    early: list[str] = attrs.Factory(list)

    async def finish(self, finishing: Finishing) -> None:
        await self._refuse_early(finishing)
        await finishing.join()
        self.order.append("joined")
        self.order.append("core cleanup")
        await self._write(finishing, core=True)
        self.order.append("core acknowledged")
        with pytest.raises(RunNotFinishedError):
            finishing.release_lease()
        record = await finishing.persist_outcome(family_returned=False)
        assert record is not None
        self.order.append(f"stored {record.status}")
        assert await finishing.persist_outcome(family_returned=False) is None
        self.order.append("adapter retired")
        await self._write(finishing, core=False)
        self.order.append("adapter acknowledged")
        finishing.release_lease()
        finishing.release_lease()
        self.order.append("released")

    async def _refuse_early(self, finishing: Finishing) -> None:
        try:
            await self._write(finishing, core=False)
        except WriteRefusedError as error:
            self.early.append(error.code)

    async def _write(self, finishing: Finishing, *, core: bool) -> None:
        run_id = finishing.run_id
        mutation = AppendWitnesses(
            room=self.room.name,
            epoch=self.room.epoch,
            id=run_id,
            at=self.room.now_micros(),
            family=witness_id(WitnessStage.FAMILY_RETURN, run_id) if core else None,
            core=witness_id(WitnessStage.CORE_CLEANUP, run_id) if core else None,
            adapter=None if core else witness_id(WitnessStage.ADAPTER_CLEANUP, run_id),
        )
        await finishing.append_witnesses(mutation)


async def child(run: Run[Any], seen: list[str]) -> None:
    await trio.lowlevel.checkpoint()
    seen.append("child returned")


async def test_a_finisher_walks_its_stages_in_order(faulty: FaultyStore) -> None:
    """R-82: cleanup stages run in their order over the family's join; out of order they are refused."""
    async with open_room(faulty, name="main") as room:
        stages = Stages(room)

        async def body(run: Run[str]) -> str:
            await run.start_child(child, stages.order)
            return "value"

        run = await room.start(body, finisher=stages)
        assert await run.result() == "value"
        report = await observe_settlement(room, run.id)
        row = await room.load(run.id)

    assert stages.order == [
        "child returned",
        "joined",
        "core cleanup",
        "core acknowledged",
        "stored completed",
        "adapter retired",
        "adapter acknowledged",
        "released",
    ]
    assert stages.early == ["adapter-order"]
    assert row is not None
    assert row.job_core_cleanup_ack == witness_id(WitnessStage.CORE_CLEANUP, run.id)
    assert row.job_adapter_cleanup_ack == witness_id(WitnessStage.ADAPTER_CLEANUP, run.id)
    assert (report.family, report.settled) == (WitnessFact.VALID, True)


async def test_the_lease_is_kept_between_outcome_and_release(faulty: FaultyStore) -> None:
    """R-33: with the outcome stored and the lease kept the Run is terminal, live, and holds its room and waiters."""
    at_stored = trio.Event()
    go_on = trio.Event()

    class Pauses(Stages):
        async def finish(self, finishing: Finishing) -> None:
            await finishing.join()
            await finishing.persist_outcome()
            at_stored.set()
            await go_on.wait()
            finishing.release_lease()

    async def body(run: Run[None]) -> None:
        await trio.lowlevel.checkpoint()

    async with open_room(faulty, name="main") as room:
        run = await room.start(body, finisher=Pauses(room))
        await at_stored.wait()
        report = await observe_settlement(room, run.id)
        live = room.find(run.id)
        with pytest.raises(trio.WouldBlock):
            run.outcome_nowait()
        go_on.set()
        await run.wait_returned()
        after = await observe_settlement(room, run.id)

    assert live is run
    assert run.status is RunStatus.COMPLETED
    assert (report.lease, report.settled) == (Presence.PRESENT, False)
    assert (after.lease, after.settled) == (Presence.ABSENT, True)


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY])
async def test_an_uncertain_outcome_is_sent_again_as_it_was(faulty: FaultyStore, fault: Fault) -> None:
    """R-81: a frozen write that failed before or after its commit is repeated identically by the next call."""
    faulty.fail(1, fault, of=FinishRun)

    class Repeats(Stages):
        async def finish(self, finishing: Finishing) -> None:
            await finishing.join()
            while True:
                try:
                    await finishing.persist_outcome()
                except WriteUncertainError as error:
                    self.order.append(type(error).__name__)
                else:
                    break
            finishing.release_lease()

    async def body(run: Run[None]) -> None:
        await trio.lowlevel.checkpoint()

    async with open_room(faulty, name="main") as room:
        stages = Repeats(room)
        await (await room.start(body, finisher=stages)).result()

    one, two = faulty.written(FinishRun)
    assert one == two
    assert stages.order == ["WriteUncertainError"]


@pytest.mark.parametrize("problem", [ValueError("a bug above"), None])
async def test_a_finisher_that_breaks_its_promise_is_held(faulty: FaultyStore, problem: Exception | None) -> None:
    """A finisher that raises, or returns without releasing, is held by name; abandoning it ends the Run as unknown."""

    class Breaks(Stages):
        async def finish(self, finishing: Finishing) -> None:
            await finishing.join()
            if problem is not None:
                raise problem

    async def body(run: Run[None]) -> None:
        await trio.lowlevel.checkpoint()

    async with open_room(faulty, name="main") as room:
        run = await room.start(body, finisher=Breaks(room))
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        abandon_held(room)
        with pytest.raises(RunAbandonedError):
            await run.result()
        row = await room.load(run.id)

    assert hold.phase == "finisher"
    assert hold.code == ("RunNotFinishedError" if problem is None else "ValueError")
    assert row is not None
    assert row.status is RunStatus.RUNNING


async def test_a_finisher_of_a_lost_room_ends_unheld(faulty: FaultyStore) -> None:
    """R-12: a finishing that is refused because a newer owner has the room ends there, unheld."""

    async def body(run: Run[None]) -> None:
        faulty.lose("main")

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            run = await room.start(body, finisher=Stages(room))
            with trio.CancelScope(shield=True), pytest.raises(RoomOwnershipLostError):
                await run.result()
            assert room.held() == ()

    with pytest.raises(RoomOwnershipLostError):
        await scenario()


@attrs.define
class Walks:
    """Walks what a test says."""

    fn: Callable[[Finishing], Awaitable[None]]

    async def finish(self, finishing: Finishing) -> None:
        await self.fn(finishing)


def vouching(room: Room, run_id: RunId) -> AppendWitnesses:
    return AppendWitnesses(
        room=room.name,
        epoch=room.epoch,
        id=run_id,
        at=room.now_micros(),
        family=witness_id(WitnessStage.FAMILY_RETURN, run_id),
        core=None,
        adapter=None,
    )


async def leaf(run: Run[Any]) -> None:
    await trio.lowlevel.checkpoint()


async def test_nothing_is_claimed_or_released_before_the_join(faulty: FaultyStore) -> None:
    """R-49, R-78: a finisher that skips the join can store no outcome, claim no return and release no lease."""
    children: list[Run[Any]] = []
    refused: list[str] = []
    go_on = trio.Event()

    async def child_that_stays(run: Run[Any]) -> None:
        await go_on.wait()

    async def walk(finishing: Finishing) -> None:
        with pytest.raises(RunNotFinishedError, match="join it first"):
            await finishing.persist_outcome()
        refused.append("outcome")
        with pytest.raises(RunNotFinishedError, match="join it first"):
            await finishing.append_witnesses(vouching(room, finishing.run_id))
        refused.append("witness")
        with pytest.raises(RunNotFinishedError, match="no stored outcome"):
            finishing.release_lease()
        refused.append("lease")
        go_on.set()
        await finishing.join()
        await finishing.join()
        await finishing.persist_outcome()
        finishing.release_lease()

    async def body(run: Run[Any]) -> None:
        children.append(await run.start_child(child_that_stays))

    async with open_room(faulty, name="main") as room:
        run = await room.start(body, finisher=Walks(walk))
        await run.result()
        report = await observe_settlement(room, run.id)

    assert refused == ["outcome", "witness", "lease"]
    assert [write.id for write in faulty.written(FinishRun) if isinstance(write, FinishRun)] == [children[0].id, run.id]
    assert (report.family, report.settled) == (WitnessFact.VALID, True)


async def test_a_join_that_was_given_up_vouches_for_nothing_ever(faulty: FaultyStore) -> None:
    """R-20, R-49: once its worker was given up, neither another join nor a stubborn finisher gets a witness stored."""
    refused: list[str] = []
    go_on = trio.Event()

    async def child_that_stays(run: Run[Any]) -> None:
        await go_on.wait()

    async def walk(finishing: Finishing) -> None:
        for _ in range(2):
            with pytest.raises(RunAbandonedError):
                await finishing.join()
            refused.append("join")
        with pytest.raises(RunAbandonedError):
            await finishing.append_witnesses(vouching(room, finishing.run_id))
        await finishing.persist_outcome()

    async def body(run: Run[Any]) -> None:
        await run.start_child(child_that_stays)

    async with open_room(faulty, name="main") as room:
        room.pool.tasks = RefusesAll(room.pool.tasks)
        run = await room.start(body, finisher=Walks(walk))
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        abandon_held(room)
        go_on.set()
        with pytest.raises(RunAbandonedError):
            await run.result()
        held = room.held()
        row = await room.load(run.id)

    assert (hold.phase, held) == ("join", ())
    assert refused == ["join", "join"]
    assert row is not None
    assert (row.status, row.family_return_ack) == (RunStatus.RUNNING, None)


@attrs.frozen
class RefusesAll:
    """Takes no ticket."""

    inner: Executor

    def construct(self, launch: Launch) -> Ticket:
        return self.inner.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        raise OSError("no worker is left")


async def test_one_task_joins(faulty: FaultyStore) -> None:
    """R-49: a second task that joins the same family at once is refused, so the first one's wake-up isn't lost."""
    refused: list[str] = []
    go_on = trio.Event()

    async def child_that_stays(run: Run[Any]) -> None:
        await go_on.wait()

    async def walk(finishing: Finishing) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(finishing.join)
            await wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="another task"):
                await finishing.join()
            refused.append("second")
            go_on.set()
        await finishing.persist_outcome()
        finishing.release_lease()

    async def body(run: Run[Any]) -> None:
        await run.start_child(child_that_stays)

    async with open_room(faulty, name="main") as room:
        run = await room.start(body, finisher=Walks(walk))
        await run.result()

    assert refused == ["second"]


async def test_a_finisher_witnesses_for_its_own_run_only(faulty: FaultyStore) -> None:
    """R-07: the witness of another Run, or of a family that nothing can vouch for, doesn't reach the store."""
    refused: list[str] = []

    async def walk(finishing: Finishing) -> None:
        await finishing.join()
        with pytest.raises(InvalidRecordError, match="another"):
            await finishing.append_witnesses(vouching(room, other.id))
        refused.append("foreign")
        run._entry.family_version = 0
        with pytest.raises(FamilyUnsupportedError):
            await finishing.append_witnesses(vouching(room, finishing.run_id))
        refused.append("unsupported")
        await finishing.persist_outcome()
        finishing.release_lease()

    async with open_room(faulty, name="main") as room:
        other = await room.start(sleep_until_cancelled)
        run = await room.start(leaf, finisher=Walks(walk))
        await run.result()
        row = await room.load(run.id)
        other.cancel()

    assert refused == ["foreign", "unsupported"]
    assert faulty.written(AppendWitnesses) == []
    assert row is not None
    assert (row.status, row.family_return_ack) == (RunStatus.COMPLETED, None)


async def sleep_until_cancelled(run: Run[Any]) -> None:
    await trio.sleep_forever()


async def test_a_finisher_whose_wait_is_cancelled_is_held_and_stops_nobody_else(faulty: FaultyStore) -> None:
    """A finisher that doesn't shield its own waits meets the scope of a cancelled family: it alone is held."""
    go_on = trio.Event()

    async def walk(finishing: Finishing) -> None:
        await finishing.join()
        await trio.sleep_forever()

    async def parent(run: Run[Any]) -> None:
        children.append(await run.start_child(leaf, finisher=Walks(walk)))
        await trio.sleep_forever()

    async def bystander(run: Run[str]) -> str:
        await go_on.wait()
        return "untouched"

    children: list[Run[Any]] = []
    async with open_room(faulty, name="main") as room:
        other = await room.start(bystander)
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        run.cancel()
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        state = room.state
        go_on.set()
        value = await other.result()
        abandon_held(room)
        with pytest.raises(RunAbandonedError):
            await run.wait_returned()

    assert (hold.run_id, hold.phase, hold.code) == (children[0].id, "finisher", "Cancelled")
    assert (state, value) == (RoomState.OPEN, "untouched")


async def test_a_room_that_is_lost_over_a_hold_says_lost(faulty: FaultyStore) -> None:
    """R-12: whoever waits above a hold of a lost room learns of the loss; no operator gave anything up."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    learned: list[Exception] = []

    async def parent(run: Run[Any]) -> None:
        with pytest.raises(AdmissionUncertainError):
            await run.start_child(leaf)

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            run = await room.start(parent)
            await wait_all_tasks_blocked()
            (hold,) = room.held()
            assert hold.phase == "starting"
            with trio.CancelScope(shield=True):
                faulty.lose("main")
                room.lose()
                try:
                    await run.wait_returned()
                except (RunAbandonedError, RoomOwnershipLostError) as error:
                    learned.append(error)

    with pytest.raises(RoomOwnershipLostError):
        await scenario()

    assert [type(error) for error in learned] == [RoomOwnershipLostError]
