"""Rooms: what is admitted when, how a block ends, who owns it, and what is told of it."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID

import apsw
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AdmissionRefusedError,
    CausalStoreRequiredError,
    InvalidRecordError,
    RoomAdmissionClosedError,
    RoomCloseInProgressError,
    RoomCloseRefusedError,
    RoomInUseError,
    RoomOwnershipLostError,
    RunAbandonedError,
    SchemaError,
    WaitRefusedError,
    WriteRefusedError,
)
from spindel.ids import RunId
from spindel.observe import RoomFenced, RoomHeld, RoomSealed
from spindel.operator import abandon_held
from spindel.runs import Child, HeldObligation, Room, RoomState, Run, open_reader, open_room
from spindel.store import AdmitRun, AdoptOrphans, FinishRun, MemoryStore, RoomClaim, RunRecord, RunStatus, SqliteStore
from spindel.testing.clocks import START_MICROS, ManualWallClock
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trio.testing import MockClock

    from spindel.observe import RoomEvent
    from spindel.store import Store


async def park(_: Run[None]) -> None:
    await trio.sleep_forever()


async def give(_: Run[int], value: int) -> int:
    return value


async def wait_for(_: Run[str], event: trio.Event) -> str:
    await event.wait()
    return "waited"


async def stay(_: Run[str], event: trio.Event) -> str:
    """Return only when the event is set, whatever is asked."""
    with trio.CancelScope(shield=True):
        await event.wait()
    return "stayed"


async def row_of(reader: Any, run: Run[Any]) -> RunRecord:
    record = await reader.load(run.id)
    assert isinstance(record, RunRecord)
    return record


async def collect(
    room: Room, events: list[RoomEvent], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with room.watch(buffer=10_000) as watch:
        task_status.started()
        async for event in watch:
            events.append(event)  # noqa: PERF401  seen as it comes, not at the end


def orphan_of(epoch: int, number: int, at: int = 1) -> AdmitRun:
    """The first row of a Run whose owner vanished."""
    return AdmitRun(
        room="r",
        epoch=epoch,
        incarnation=UUID(int=6),
        id=UUID(int=number + 10),
        kind="run",
        actor="gone",
        parent_id=None,
        trigger_id=None,
        provenance="{}",
        family_version=1,
        created_at=at,
        started_at=at,
    )


class TestEnd:
    async def test_the_block_waits_for_what_it_admitted_and_seals_the_gate(
        self, store: Store, nursery: trio.Nursery
    ) -> None:
        """R-14: after the body a live root Run still starts children, both are waited for, and no root Run starts."""
        sealed = trio.Event()
        refused: list[Exception] = []

        async def parent(run: Run[int]) -> int:
            await sealed.wait()
            try:
                await room.start(give, 1)
            except RoomAdmissionClosedError as error:
                refused.append(error)
            child = await run.start_child(give, 2)
            return await child.result()

        async def watch_seal() -> None:
            await room.wait_sealed()
            states.append(room.state)
            sealed.set()

        states: list[RoomState] = []
        async with open_room(store, name="r") as room:
            nursery.start_soon(watch_seal)
            states.append(room.state)
            run = await room.start(parent)

        assert states == [RoomState.OPEN, RoomState.SEALED]
        assert room.state is RoomState.CLOSED
        assert run.outcome_nowait().value == 2
        assert len(refused) == 1
        assert "sealed" in str(refused[0])

    async def test_a_raising_body_cancels_its_runs_and_goes_on_as_it_is(self, store: Store) -> None:
        """R-15: when the body raises, all Runs get `room-closing` and return, and the very error comes out."""
        error = ValueError("the body's own")
        runs: list[Run[Any]] = []

        async def parent(run: Run[None]) -> None:
            runs.append(await run.start_child(park))
            await trio.sleep_forever()

        with pytest.raises(ValueError, match="own") as caught:
            async with open_room(store, name="r") as room:
                runs.append(await room.start(parent))
                await wait_all_tasks_blocked()
                raise error

        assert caught.value is error
        assert error.__cause__ is None
        assert len(runs) == 2
        for run in runs:
            row = await store.load_run("r", run.id)
            assert row is not None
            assert (row.status, row.reason) == (RunStatus.CANCELLED, "room-closing")
        assert room.state is RoomState.CLOSED

    @pytest.mark.parametrize("where", ["body", "wait"])
    async def test_a_cancelled_scope_around_the_block_asks_every_run_and_is_raised_after_the_last_return(
        self, store: Store, where: str, spindel_clock: MockClock
    ) -> None:
        """R-15: cancelled in its body or in its wait, the room asks all Runs, waits for them, then is cancelled."""
        asked: list[str] = []
        order: list[str] = []

        async def stubborn(run: Run[None]) -> None:
            run.add_cancel_callback("note", asked.append)
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(100)
                order.append("returned")

        with trio.CancelScope() as scope:
            async with open_room(store, name="r") as room:
                run = await room.start(stubborn)
                await wait_all_tasks_blocked()
                if where == "body":
                    scope.cancel()
                    await trio.sleep_forever()
                scope.deadline = trio.current_time() + 10
            order.append("the block let go")
        order.append("left")

        assert scope.cancelled_caught
        assert order == ["returned", "left"]
        assert asked == ["room-closing"]
        assert run.outcome_nowait().reason == "room-closing"
        assert room.state is RoomState.CLOSED

    async def test_an_error_of_the_body_is_not_covered_by_a_cancelled_scope(self, store: Store) -> None:
        """R-15: what the body raised goes on, also if the scope around the room is cancelled as well."""
        with trio.CancelScope() as scope, pytest.raises(ValueError, match="mine"):
            async with open_room(store, name="r") as room:
                await room.start(park)
                scope.cancel()
                raise ValueError("mine")

        assert room.state is RoomState.CLOSED

    async def test_a_group_raised_by_the_body_gets_no_second_group(self, store: Store) -> None:
        """R-15: a group that the body raises comes out as itself."""
        group = ExceptionGroup("own", [ValueError(1)])

        with pytest.raises(ExceptionGroup) as caught:
            async with open_room(store, name="r") as room:
                await room.start(park)
                raise group

        assert caught.value is group

    async def test_a_start_in_a_cancelled_scope_is_cancelled_not_refused(self, store: Store) -> None:
        """R-15: the fence that a cancelled scope put up is no answer to the task that it cancelled."""
        with trio.CancelScope() as scope:
            async with open_room(store, name="r") as room:
                scope.cancel()
                await room.start(give, 1)

        assert scope.cancelled_caught
        assert (await store.load_run("r", RunId(UUID(int=1)))) is None

    async def test_a_body_may_be_cancelled_by_a_scope_of_its_own(self, store: Store) -> None:
        async with open_room(store, name="r") as room:
            run = await room.start(wait_for, trio.Event())
            with trio.move_on_after(0):
                await run.result()
            states = (room.state, run.status)
            run.cancel()

        assert states == (RoomState.OPEN, RunStatus.RUNNING)


class TestClose:
    async def test_close_cancels_what_was_admitted_and_refuses_the_rest(self, store: Store) -> None:
        """R-16: closing cancels exactly the admitted Runs and refuses others; closing a closed room does nothing."""
        refused: list[type[Exception]] = []

        async def parent(run: Run[None]) -> None:
            child = await run.start_child(park)
            try:
                await trio.sleep_forever()
            finally:
                try:
                    await run.start_child(park)
                except Exception as error:  # noqa: BLE001  its class is what the test looks at
                    refused.append(type(error))
                assert child.cancel_reason == "room-closing"

        async with open_room(store, name="r") as room:
            ended = await room.start(give, 1)
            await ended.result()
            runs = [await room.start(parent), await room.start(park)]
            await wait_all_tasks_blocked()
            await room.close()
            state = room.state
            with pytest.raises(RoomAdmissionClosedError):
                await room.start(park)
            await room.close()
            await room.close(grace_seconds=0)
            rows = (await room.list_runs()).runs

        assert state is RoomState.CLOSED
        assert len(refused) == 1
        assert [run.outcome_nowait().reason for run in runs] == ["room-closing", "room-closing"]
        assert ended.outcome_nowait().value == 1
        assert sorted(row.status for row in rows) == ["cancelled"] * 3 + ["completed"]

    async def test_a_run_that_stays_makes_close_give_up_after_the_grace(
        self, store: Store, spindel_clock: MockClock
    ) -> None:
        """R-17: after 5 seconds closing is refused and names the Run; the fence stays; later it succeeds."""
        event = trio.Event()

        async with open_room(store, name="r") as room:
            run = await room.start(stay, event)
            await room.start(park)
            start = trio.current_time()
            with pytest.raises(RoomCloseRefusedError, match=str(run.id)) as caught:
                await room.close(grace_seconds=5)
            waited = trio.current_time() - start
            state = room.state
            with pytest.raises(RoomAdmissionClosedError):
                await room.start(park)
            event.set()
            await room.close(grace_seconds=5)

        assert waited == 5
        assert caught.value.remaining == (run.id,)
        assert caught.value.held == ()
        assert state is RoomState.FENCED
        assert run.outcome_nowait().value == "stayed"

    @pytest.mark.parametrize("who", ["root", "child"])
    async def test_a_row_in_flight_when_the_room_closes_is_admitted_cancelled_and_waited_for(
        self, faulty: FaultyStore, nursery: trio.Nursery, who: str
    ) -> None:
        """R-18: a Run whose first row is being written is part of what `close` cancels and waits for."""
        held = faulty.hold(2 if who == "child" else 1, of=AdmitRun)
        started: list[Run[Any]] = []
        entered: list[str] = []

        async def body(run: Run[None]) -> None:
            entered.append("entered")
            await trio.sleep_forever()

        async def parent(run: Run[None]) -> None:
            started.append(await run.start_child(body))
            await trio.sleep_forever()

        async def start() -> None:
            started.append(await room.start(body if who == "root" else parent))

        async def close() -> None:
            await room.close(grace_seconds=1000)
            closed.append(room.state)

        closed: list[RoomState] = []
        async with open_room(faulty, name="r") as room:
            nursery.start_soon(start)
            await held.wait_reached()
            nursery.start_soon(close)
            await wait_all_tasks_blocked()
            early = list(closed)
            held.release()
            await wait_all_tasks_blocked()
            rows = (await room.list_runs()).runs

        assert early == []
        assert closed == [RoomState.CLOSED]
        assert entered == ["entered"]
        assert [run.cancel_reason for run in started] == ["room-closing"] * len(started)
        assert {(row.status, row.reason) for row in rows} == {(RunStatus.CANCELLED, "room-closing")}

    async def test_only_one_task_closes_and_never_one_of_its_runs(self, store: Store, nursery: trio.Nursery) -> None:
        """R-19: a second closer is refused, and so is a Run of the room, each at once."""
        event = trio.Event()
        refused: list[str] = []

        async def closing(run: Run[None]) -> None:
            with pytest.raises(WaitRefusedError) as caught:
                await room.close()
            refused.append(caught.value.reason)

        async with open_room(store, name="r") as room:
            await (await room.start(closing)).result()
            state = room.state
            await room.start(stay, event)
            nursery.start_soon(room.close)
            await wait_all_tasks_blocked()
            with pytest.raises(RoomCloseInProgressError):
                await room.close()
            event.set()

        assert refused == ["self"]
        assert state is RoomState.OPEN
        assert room.state is RoomState.CLOSED

    async def test_a_cancelled_closer_leaves_the_fence_and_may_be_followed(self, store: Store) -> None:
        event = trio.Event()

        async with open_room(store, name="r") as room:
            run = await room.start(stay, event)
            with trio.move_on_after(0) as scope:
                await room.close()
            first = (scope.cancelled_caught, room.state, run.cancel_requested)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(room.close)
                    await wait_all_tasks_blocked()
                    scope.cancel()
            second = (room.state, run.cancel_reason)
            event.set()
            await room.close()
            third = room.state

        assert first == (True, RoomState.OPEN, False)
        assert second == (RoomState.FENCED, "room-closing")
        assert third is RoomState.CLOSED

    async def test_who_closes_again_reminds_those_who_are_left(self, store: Store, spindel_clock: MockClock) -> None:
        """R-16, R-17: each `close` calls the cancel callbacks of what remains; the first reason stays."""
        event = trio.Event()
        called: list[str] = []

        async with open_room(store, name="r") as room:
            run = await room.start(stay, event)
            run.add_cancel_callback("note", called.append)
            for _ in range(2):
                with pytest.raises(RoomCloseRefusedError):
                    await room.close(grace_seconds=1)
            event.set()

        assert called == ["room-closing", "room-closing"]

    @pytest.mark.parametrize("grace", [-1, float("nan")])
    async def test_a_senseless_grace_is_refused_before_anything_happens(self, grace: float) -> None:
        async with open_room(name="r") as room:
            with pytest.raises(InvalidRecordError, match="grace_seconds"):
                await room.close(grace_seconds=grace)
            state = room.state

        assert state is RoomState.OPEN

    async def test_a_closer_and_the_end_of_the_block_may_both_see_the_last_return(self, nursery: trio.Nursery) -> None:
        # Which of them is resumed first is Trio's choice, a coin toss in each attempt.
        for _ in range(20):
            event = trio.Event()
            async with open_room(name="r") as room:
                await room.start(stay, event)
                nursery.start_soon(room.close)
                await wait_all_tasks_blocked()
                event.set()

            assert room.state is RoomState.CLOSED


class TestHolds:
    async def test_a_hold_keeps_the_block_is_named_each_minute_and_can_be_abandoned(
        self, faulty: FaultyStore, nursery: trio.Nursery, spindel_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """R-20: a held Run keeps the block, which names it each 60 s; abandoned, it ends, and its row says running."""
        faulty.fail(of=FinishRun, fault=Fault.REFUSED, transient=False, code="no-room-left")
        wall = ManualWallClock(follows=spindel_clock)
        events: list[RoomEvent] = []
        dropped: list[HeldObligation] = []

        async def operate() -> None:
            await trio.sleep(150)
            dropped.extend(abandon_held(room))

        async def parent(run: Run[int]) -> int:
            children.append(await run.start_child(give, 1))
            return 2

        children: list[Run[int]] = []
        async with open_room(faulty, name="r", wall_clock=wall) as room:
            await nursery.start(collect, room, events)
            run = await room.start(parent)
            nursery.start_soon(operate)
            start = trio.current_time()
        waited = trio.current_time() - start
        (child,) = children

        assert waited == 150
        assert [(hold.run_id, hold.phase, hold.code) for hold in dropped] == [(child.id, "terminal", "no-room-left")]
        named = [event for event in events if isinstance(event, RoomHeld)]
        assert [event.at for event in named] == [START_MICROS + 60_000_000, START_MICROS + 120_000_000]
        assert {(event.run_id, event.phase, event.code) for event in named} == {(child.id, "terminal", "no-room-left")}
        assert {event.lease_id for event in named} == {dropped[0].lease_id}
        lines = [record for record in caplog.records if "can't end" in record.message]
        assert len(lines) == 2
        assert all(record.levelno == logging.ERROR and str(child.id) in record.message for record in lines)
        for waiter in (child, run):
            with pytest.raises(RunAbandonedError):
                waiter.outcome_nowait()
            with pytest.raises(RunAbandonedError):
                await waiter.wait_returned()
            row = await faulty.load_run("r", waiter.id)
            assert row is not None
            assert (row.status, row.family_return_ack) == (RunStatus.RUNNING, None)
        assert room.state is RoomState.CLOSED
        assert room.held() == ()

    async def test_what_is_held_is_told_by_close(self, faulty: FaultyStore, spindel_clock: MockClock) -> None:
        """R-17, R-20: a refused close names the hold as well as the Run."""
        faulty.fail(of=FinishRun, fault=Fault.REFUSED, transient=False)

        async with open_room(faulty, name="r") as room:
            run = await room.start(give, 1)
            await wait_all_tasks_blocked()
            with pytest.raises(RoomCloseRefusedError) as caught:
                await room.close(grace_seconds=1)
            held = room.held()
            abandon_held(room)

        assert caught.value.held == held
        assert [hold.run_id for hold in held] == [run.id]

    async def test_report_seconds_is_the_pace_of_the_reports(
        self, faulty: FaultyStore, nursery: trio.Nursery, spindel_clock: MockClock
    ) -> None:
        """R-20: the pace at which holds are named is the caller's."""
        faulty.fail(of=FinishRun, fault=Fault.REFUSED, transient=False)
        events: list[RoomEvent] = []

        async def operate() -> None:
            await trio.sleep(35)
            abandon_held(room)

        async with open_room(faulty, name="r", report_seconds=10) as room:
            await nursery.start(collect, room, events)
            await room.start(give, 1)
            nursery.start_soon(operate)

        assert len([event for event in events if isinstance(event, RoomHeld)]) == 3


class TestLoss:
    async def test_a_newer_owner_ends_the_runs_of_the_old_one_without_a_claim(
        self, faulty: FaultyStore, nursery: trio.Nursery
    ) -> None:
        """R-12: the old owner's next write is `not-owner`; its Runs return, unrecorded, and block and waiters say so."""
        waited: list[type[Exception]] = []
        ended: list[str] = []

        async def stubborn(run: Run[None]) -> None:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(run.cancel_reason or "")

        async def wait(run: Run[None]) -> None:
            with pytest.raises(RoomOwnershipLostError) as caught:
                await run.result()
            waited.append(type(caught.value))

        with pytest.raises(RoomOwnershipLostError, match="taken over"):
            async with open_room(faulty, name="r") as room:
                run = await room.start(stubborn)
                nursery.start_soon(wait, run)
                await wait_all_tasks_blocked()
                faulty.lose("r")
                with pytest.raises(AdmissionRefusedError, match="not-owner"):
                    await room.start(give, 1)
                state = room.state
                await trio.sleep_forever()
        await wait_all_tasks_blocked()
        row = await faulty.load_run("r", run.id)

        assert state is RoomState.LOST
        assert room.state is RoomState.LOST
        assert ended == ["room-lost"]
        assert waited == [RoomOwnershipLostError]
        assert row is not None
        assert (row.status, row.family_return_ack) == (RunStatus.RUNNING, None)
        assert faulty.written(FinishRun) == []
        assert room.held() == ()
        with pytest.raises(RoomOwnershipLostError):
            run.outcome_nowait()
        with pytest.raises(RoomOwnershipLostError):
            await run.wait_started()

    async def test_a_finishing_that_is_refused_as_not_owner_ends_there(self, faulty: FaultyStore) -> None:
        """R-12: a Run that ends under a newer owner writes once, is not held, and takes the room with it."""
        with pytest.raises(RoomOwnershipLostError):
            async with open_room(faulty, name="r") as room:
                run = await room.start(give, 1)
                faulty.lose("r")
                with pytest.raises(RoomOwnershipLostError):
                    await run.result()

        assert len(faulty.written(FinishRun)) == 1
        assert room.held() == ()

    async def test_a_forged_newer_claim_in_the_file_loses_the_room(self, tmp_path: Path) -> None:
        """R-12: a newer epoch in the file itself, whoever wrote it, ends the old owner."""
        path = tmp_path / "rooms.db"
        with pytest.raises(RoomOwnershipLostError):
            async with SqliteStore(path, executor="inline") as store, open_room(store, name="r") as room:
                run = await room.start(park)
                other = apsw.Connection(str(path))
                other.execute("UPDATE rooms SET epoch = epoch + 1 WHERE name = 'r'")
                other.close()
                run.cancel()
                with pytest.raises(RoomOwnershipLostError):
                    await run.result()
        async with SqliteStore(path, executor="inline") as store:
            row = await store.load_run("r", run.id)

        assert row is not None
        assert (row.status, row.family_return_ack) == (RunStatus.RUNNING, None)

    async def test_children_started_together_are_all_refused_and_none_is_owed(self, faulty: FaultyStore) -> None:
        """R-12: a group of admissions that meets a newer owner leaves no lease behind."""
        answers: list[object] = []

        async def parent(run: Run[None]) -> None:
            faulty.lose("r")
            answers.extend(await run.start_children([Child.of(give, n) for n in range(3)]))

        with pytest.raises(RoomOwnershipLostError):
            async with open_room(faulty, name="r") as room:
                await room.start(parent)

        assert [type(answer) for answer in answers] == [AdmissionRefusedError] * 3
        assert room.live() == ()

    async def test_an_outcome_being_repeated_gives_up_when_the_room_is_lost(
        self, faulty: FaultyStore, spindel_clock: MockClock
    ) -> None:
        """R-12, R-31: once the room is lost, a terminal write that is being repeated is not sent again."""
        faulty.fail(of=FinishRun, fault=Fault.BEFORE, times=3)

        with pytest.raises(RoomOwnershipLostError):
            async with open_room(faulty, name="r") as room:
                run = await room.start(give, 1)
                await trio.sleep(0.01)
                faulty.lose("r")
                with pytest.raises(AdmissionRefusedError):
                    await room.start(give, 2)
                with pytest.raises(RoomOwnershipLostError):
                    await run.result()

        assert room.held() == ()
        # Somebody else had met the newer owner, so nothing was written any more.
        assert len(faulty.written(FinishRun)) == 1


class TestReopening:
    async def test_what_ran_when_the_owner_vanished_is_orphaned_and_nothing_else_changes(
        self, reopen: Callable[[], Store], wall_clock: ManualWallClock
    ) -> None:
        """R-13: the next opening fences running rows as orphaned, without witness; ended ones stay; nothing is rebuilt."""

        async def fail(_: Run[None]) -> None:
            raise ValueError("before")

        async with reopen() as store:
            async with open_room(store, name="r", wall_clock=wall_clock) as room:
                ended: list[Run[Any]] = [await room.start(give, 1), await room.start(fail)]
                for run in ended:
                    await run.wait_returned()
            before = {run.id: await row_of(room, run) for run in ended}
            # An owner that vanished: its row is there, and nobody ever ends it.
            vanished = RunId(UUID(int=10))
            async with store.claim_room(RoomClaim("r", UUID(int=6), wall_clock.now_micros())) as epoch:
                await store.write(orphan_of(epoch, 0, at=wall_clock.now_micros()))
        wall_clock.advance(60)
        async with reopen() as store, open_room(store, name="r", wall_clock=wall_clock) as room:
            row = await room.load(vanished)
            after = {run_id: await room.load(run_id) for run_id in before}
            rebuilt = (room.find(vanished), room.live(), room.held())
            run = await room.start(give, 2)
            await run.result()

        assert row is not None
        assert (row.status, row.reason, row.family_return_ack) == (RunStatus.FAILED, "orphaned", None)
        assert row.ended_at == wall_clock.now_micros()
        assert after == before
        assert rebuilt == (None, (), ())

    async def test_more_orphans_than_one_write_takes_are_all_adopted(self, wall_clock: ManualWallClock) -> None:
        """R-13: adoption goes on in writes of at most 500 rows until no orphan is left."""
        memory = MemoryStore()
        async with memory.claim_room(RoomClaim("r", UUID(int=6), 1)) as epoch:
            for number in range(1001):
                await memory.write(orphan_of(epoch, number))
        store = FaultyStore(memory)
        async with open_room(store, name="r", wall_clock=wall_clock) as room:
            page = await room.list_runs(status=RunStatus.RUNNING)

        assert page.runs == ()
        assert [write.limit for write in store.written(AdoptOrphans) if isinstance(write, AdoptOrphans)] == [
            500,
            500,
            500,
        ]

    async def test_full_batches_of_orphans_take_no_write_more_than_they_are(self) -> None:
        """R-88: n times 500 orphans are adopted by the room in n mutations, so 10,000 in 20."""
        memory = MemoryStore()
        async with memory.claim_room(RoomClaim("r", UUID(int=6), 1)) as epoch:
            for number in range(1000):
                await memory.write(orphan_of(epoch, number))
        store = FaultyStore(memory)
        async with open_room(store, name="r") as room:
            page = await room.list_runs(status=RunStatus.RUNNING)

        assert page.runs == ()
        assert [write.limit for write in store.written(AdoptOrphans) if isinstance(write, AdoptOrphans)] == [500, 500]

    async def test_a_look_at_the_orphans_that_fails_is_followed_by_a_write(self) -> None:
        """R-13: after a full batch a failed look proves nothing, so adoption goes on."""
        memory = MemoryStore()
        async with memory.claim_room(RoomClaim("r", UUID(int=6), 1)) as epoch:
            for number in range(500):
                await memory.write(orphan_of(epoch, number))
        store = FaultyStore(memory)
        store.fail_confirm()
        async with open_room(store, name="r") as room:
            page = await room.list_runs(status=RunStatus.RUNNING)

        assert page.runs == ()
        assert len(store.written(AdoptOrphans)) == 2

    @pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.BEFORE, Fault.LOST_REPLY])
    async def test_adoption_is_repeated_before_the_gate_opens(
        self, faulty: FaultyStore, fault: Fault, spindel_clock: MockClock
    ) -> None:
        """R-13: an adoption that fails is repeated; it is its own repeat."""
        faulty.fail(of=AdoptOrphans, fault=fault, times=2)

        async with open_room(faulty, name="r") as room:
            await (await room.start(give, 1)).result()

        assert len(faulty.written(AdoptOrphans)) == 3

    async def test_adoption_that_is_refused_for_good_keeps_the_room_shut(self, faulty: FaultyStore) -> None:
        faulty.fail(of=AdoptOrphans, fault=Fault.REFUSED, transient=False)

        with pytest.raises(WriteRefusedError):
            async with open_room(faulty, name="r"):
                raise AssertionError("the gate never opened")
        async with open_room(faulty, name="r") as room:
            state = room.state

        assert state is RoomState.OPEN

    async def test_a_clock_that_was_set_back_does_not_date_rows_before_the_last_opening(
        self, reopen: Callable[[], Store], wall_clock: ManualWallClock
    ) -> None:
        async with reopen() as store, open_room(store, name="r", wall_clock=wall_clock) as room:
            first = await room.start(give, 1)
            wall_clock.advance(10)
            await first.result()
        wall_clock.advance(-3600)
        async with reopen() as store, open_room(store, name="r", wall_clock=wall_clock) as room:
            second = await room.start(give, 2)
            await second.result()
            rows = (await room.list_runs()).runs

        assert [row.id for row in rows] == [second.id, first.id]
        assert rows[1].ended_at is not None
        assert rows[0].started_at >= rows[1].ended_at

    async def test_a_clock_that_jumps_back_inside_an_opening_does_not_turn_a_rows_times(
        self, store: Store, wall_clock: ManualWallClock, nursery: trio.Nursery
    ) -> None:
        events: list[RoomEvent] = []
        event = trio.Event()

        async with open_room(store, name="r", wall_clock=wall_clock) as room:
            await nursery.start(collect, room, events)
            run = await room.start(wait_for, event)
            wall_clock.advance(-100)
            event.set()
            await run.result()
            row = await row_of(room, run)

        assert row.ended_at is not None
        assert row.created_at <= row.started_at <= row.ended_at <= row.updated_at
        assert [event.at for event in events] == sorted(event.at for event in events)


class TestOpening:
    async def test_a_path_is_opened_and_closed_by_the_room(self, tmp_path: Path) -> None:
        """R-11: a room over a path owns the file for the length of its block, and only so long."""
        path = tmp_path / "rooms.db"
        async with open_room(path, name="r") as room:
            run = await room.start(give, 1)
            await run.result()
            with pytest.raises(RoomInUseError, match="'r' is in use by process"):
                async with open_room(path, name="r"):
                    pass
            async with open_room(path, name="other") as other:
                names = (room.name, other.name)
            async with open_reader(path, name="r") as reader:
                row = await row_of(reader, run)
        async with open_room(str(path), name="r") as again:
            page = await again.list_runs()

        assert names == ("r", "other")
        assert row.status is RunStatus.COMPLETED
        assert [found.id for found in page.runs] == [run.id]
        assert again.incarnation != room.incarnation
        assert room.durable

    async def test_a_room_without_arguments_keeps_its_rows_in_memory(self) -> None:
        async with open_room(name="r") as room:
            run = await room.start(give, 1)
            await run.result()
            page = await room.list_runs()

        assert room.durable
        assert [row.id for row in page.runs] == [run.id]

    async def test_a_room_without_a_store_joins_and_keeps_nothing(self) -> None:
        """R-80: with `durable=False` children run and are joined; there is no row, no witness, and no cause."""
        refused: list[type[Exception]] = []
        order: list[str] = []

        async def child(_: Run[int]) -> int:
            await trio.lowlevel.checkpoint()
            order.append("child")
            return 1

        async def parent(run: Run[int]) -> int:
            first = await run.start_child(child)
            value = await first.result()
            try:
                await run.record_cause(first.id)
            except CausalStoreRequiredError as error:
                refused.append(type(error))
            await run.start_child(child)
            order.append("parent")
            return value

        async with open_room(name="r", durable=False) as room:
            run = await room.start(parent)
            value = await run.result()
            order.append("returned")
            row = await room.load(run.id)
            with pytest.raises(InvalidRecordError, match="no store"):
                await room.list_runs()

        assert not room.durable
        assert value == 1
        assert order == ["child", "parent", "child", "returned"]
        assert row is None
        assert refused == [CausalStoreRequiredError]
        assert run.status is RunStatus.COMPLETED

    @pytest.mark.parametrize(
        ("arguments", "key"),
        [
            ({"name": ""}, "room"),
            ({"name": "Capital"}, "room"),
            ({"name": "x" * 129}, "room"),
            ({"name": 5}, "room"),
            ({"name": "r", "report_seconds": 0}, "report_seconds"),
            ({"name": "r", "report_seconds": float("nan")}, "report_seconds"),
            ({"name": "r", "threads_max": 0}, "threads_max"),
            ({"name": "r", "store": MemoryStore(), "durable": False}, "durable"),
        ],
    )
    def test_a_wrong_argument_is_named(self, arguments: dict[str, Any], key: str) -> None:
        with pytest.raises(InvalidRecordError) as caught:
            open_room(**arguments)

        assert caught.value.key == key

    async def test_a_name_may_be_a_member_of_an_enumeration(self, store: Store) -> None:
        class Name(StrEnum):
            ORDERS = "orders"

        async with open_room(store, name=Name.ORDERS) as room:
            run = await room.start(give, 1)
            await run.result()
        row = await store.load_run("orders", run.id)

        assert type(room.name) is str
        assert row is not None

    async def test_a_cold_read_of_no_database_is_refused_and_makes_none(self, tmp_path: Path) -> None:
        path = tmp_path / "missing.db"

        with pytest.raises(SchemaError):
            async with open_reader(path, name="r"):
                pass

        assert not path.exists()


class TestLists:
    async def test_pages_over_equal_start_times_are_disjoint_complete_and_ordered(self, store: Store) -> None:
        """R-22: 300 Runs that started in one microsecond page without overlap or gap, in the order of the lists."""
        wall = ManualWallClock()

        async with open_room(store, name="r", wall_clock=wall) as room:
            root = await room.start(self._family, 299)
            await root.result()
            pages = [await room.list_runs(limit=100)]
            while (cursor := pages[-1].next) is not None:
                pages.append(await room.list_runs(limit=100, before=cursor))

        ids = [row.id for page in pages for row in page.runs]
        assert len(ids) == len(set(ids)) == 300
        assert ids == sorted(ids, key=str, reverse=True)
        assert {row.started_at for page in pages for row in page.runs} == {START_MICROS}

    @pytest.mark.parametrize("limit", [0, 101, -1, True, "20"])
    async def test_a_limit_out_of_range_is_refused(self, store: Store, limit: Any) -> None:
        """R-22: limits go from 1 to 100."""
        async with open_room(store, name="r") as room:
            with pytest.raises(InvalidRecordError, match="limit"):
                await room.list_runs(limit=limit)

    async def test_under_gives_a_run_with_all_below_it(self, store: Store) -> None:
        """R-22: `under` is the structural subtree, `parent` the children, `status` what is stored."""
        async with open_room(store, name="r") as room:
            root = await room.start(self._family, 2)
            other = await room.start(self._family, 1)
            await root.result()
            await other.result()
            under = await room.list_runs(under=root.id)
            children = await room.list_runs(parent=root.id)
            running = await room.list_runs(status=RunStatus.RUNNING)
            with pytest.raises(InvalidRecordError, match="status"):
                await room.list_runs(status=RunStatus.CANCELLING)

        assert {row.id for row in under.runs} == {root.id, *(row.id for row in children.runs)}
        assert len(children.runs) == 2
        assert running.runs == ()

    async def _family(self, run: Run[None], width: int) -> None:
        for start in range(0, width, 100):
            await run.start_children([Child.of(give, n) for n in range(start, min(width, start + 100))])


class TestLooking:
    async def test_find_and_live_know_the_live_runs_only(self, store: Store) -> None:
        async def parent(run: Run[None]) -> None:
            await run.start_child(park)
            await trio.sleep_forever()

        async with open_room(store, name="r") as room:
            run = await room.start(parent, kind="job", actor="me")
            ended = await room.start(give, 1)
            await ended.result()
            await wait_all_tasks_blocked()
            live = room.live()
            found = (room.find(run.id), room.find(ended.id), room.find(RunId(UUID(int=1))))
            asked = room.cancel_all("stop-now")
            still_open = room.state
            late = await room.start(give, 2)
            await late.result()

        assert [(snapshot.kind, snapshot.actor, snapshot.parent_id) for snapshot in live] == [
            ("job", "me", None),
            ("run", "me", run.id),
        ]
        assert found == (run, None, None)
        assert asked == 2
        assert still_open is RoomState.OPEN
        assert run.outcome_nowait().reason == "stop-now"
        assert late.outcome_nowait().value == 2
        assert room.live() == ()

    async def test_a_reason_that_no_row_may_hold_cancels_nobody(self, store: Store) -> None:
        async with open_room(store, name="r") as room:
            run = await room.start(park)
            with pytest.raises(InvalidRecordError, match="reason"):
                room.cancel_all("Not a reason")
            with pytest.raises(InvalidRecordError, match="reason"):
                run.cancel("")
            untouched = run.cancel_requested
            run.cancel()

        assert not untouched

    async def test_a_room_tells_when_it_was_sealed_or_fenced(self, store: Store, nursery: trio.Nursery) -> None:
        events: list[RoomEvent] = []

        async with open_room(store, name="sealed") as room:
            await nursery.start(collect, room, events)
        async with open_room(store, name="fenced") as room:
            await nursery.start(collect, room, events)
            await room.close()

        assert [(type(event), getattr(event, "reason", None)) for event in events] == [
            (RoomSealed, None),
            (RoomFenced, "room-closing"),
        ]

    async def test_the_text_of_a_room_says_how_it_is(self) -> None:
        async with open_room(name="r") as room:
            run = await room.start(park)
            text = repr(room)
            run.cancel()

        assert text == "<Room 'r' open, 1 live>"
