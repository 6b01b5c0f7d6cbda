"""Finishers: a layer above walks its own stages over the steps that end every Run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    RoomOwnershipLostError,
    RunAbandonedError,
    RunNotFinishedError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.ids import WitnessStage, witness_id
from spindel.operator import abandon_held
from spindel.runs import Finishing, Presence, Run, WitnessFact, observe_settlement, open_room
from spindel.store import AppendWitnesses, FinishRun, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from spindel.runs import Room


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
