"""The end of a Run: join, one write, release, publish; whatever fails, whoever is cancelled."""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AcknowledgeRefusedError,
    AdmissionRefusedError,
    RoomOwnershipLostError,
    RunAbandonedError,
    RunNotFinishedError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.ids import WitnessStage, witness_id
from spindel.observe import RunFinished, RunHeld, RunRecovered
from spindel.operator import abandon_held, reconcile_settlement
from spindel.runs import Finishing, LeasePhase, Room, RoomState, Run, observe_settlement, open_room
from spindel.store import FinishRun, RecordCauses, RunRecord, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from spindel.observe import RoomEvent
    from spindel.store import Store


async def park(_: Run[None]) -> None:
    await trio.sleep_forever()


async def give(_: Run[int], value: int) -> int:
    return value


async def row_of(store: Store, run: Run[Any]) -> RunRecord:
    record = await store.load_run(run.room_name, run.id)
    assert record is not None
    return record


async def collect(
    room: Room, events: list[RoomEvent], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with room.watch(buffer=10_000) as watch:
        task_status.started()
        async for event in watch:
            events.append(event)  # noqa: PERF401  seen as it comes, not at the end


class TestWrite:
    async def test_an_unacknowledged_outcome_is_written_again_the_same_after_25_50_100_ms(
        self, faulty: FaultyStore, nursery: trio.Nursery, spindel_clock: MockClock
    ) -> None:
        """R-31: failing b, b, a: identical writes after 25, 50 and 100 ms; one row, one event, one wake-up."""
        faulty.fail(1, Fault.BEFORE, of=FinishRun, times=2)
        faulty.fail(3, Fault.LOST_REPLY, of=FinishRun)
        times: list[float] = []
        events: list[RoomEvent] = []
        woken: list[float] = []
        write = faulty.write_each

        async def timed(mutations: Any) -> Any:
            times.append(trio.current_time())
            return await write(mutations)

        async def wait(run: Run[int]) -> None:
            await run.wait_returned()
            woken.append(trio.current_time())

        async with open_room(faulty, name="r") as room:
            await nursery.start(collect, room, events)
            event = trio.Event()
            run = await room.start(wait_for, event)
            for _ in range(2):
                nursery.start_soon(wait, run)
            await wait_all_tasks_blocked()
            faulty.write_each = timed  # type: ignore[method-assign]
            event.set()
            value = await run.result()
        row = await row_of(faulty, run)

        writes = faulty.written(FinishRun)
        assert len(writes) == 4
        assert all(write is writes[0] for write in writes)
        assert [round(after - before, 6) for before, after in pairwise(times[:4])] == [0.025, 0.05, 0.1]
        assert value == 1
        assert (row.status, row.family_return_ack) == ("completed", witness_id(WitnessStage.FAMILY_RETURN, run.id))
        assert [event.run_id for event in events if isinstance(event, RunFinished)] == [run.id]
        assert woken == [times[3]] * 2

    async def test_the_repeats_slow_down_to_five_seconds_and_are_logged_at_once_and_each_minute(
        self, faulty: FaultyStore, spindel_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """R-31: a transient refusal is repeated for as long as it takes; the log isn't flooded by it."""
        faulty.fail(1, Fault.REFUSED, of=FinishRun, times=40, transient=True)

        async with open_room(faulty, name="r") as room:
            start = trio.current_time()
            run = await room.start(give, 1)
            await run.result()
            took = trio.current_time() - start

        doubling = [0.025 * 2**n for n in range(8)]
        assert took == pytest.approx(sum(doubling) + 32 * 5)
        lines = [record for record in caplog.records if "not stored yet" in record.message]
        assert len(lines) == 3
        assert all(record.levelno == logging.WARNING for record in lines)
        assert (await row_of(faulty, run)).status is RunStatus.COMPLETED

    async def test_a_write_refused_for_good_is_held_and_the_same_write_ends_the_run(
        self, faulty: FaultyStore, nursery: trio.Nursery
    ) -> None:
        """R-32: refused for good: held at `terminal`; reconciled, the same write ends the Run."""
        faulty.fail(1, Fault.REFUSED, of=FinishRun, transient=False, code="no-room-left", times=2)
        events: list[RoomEvent] = []

        async def parent(run: Run[int]) -> int:
            children.append(await run.start_child(give, 7))
            return 1

        children: list[Run[int]] = []
        async with open_room(faulty, name="r") as room:
            await nursery.start(collect, room, events)
            run = await room.start(parent)
            await wait_all_tasks_blocked()
            (child,) = children
            before = (child.status, run.status, room.find(child.id))
            (held,) = room.held()
            report = await observe_settlement(room, child.id)
            facts = report.admission
            assert facts is not None
            assert facts.revision is not None
            with pytest.raises(AcknowledgeRefusedError):
                await reconcile_settlement(
                    room, child.id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision,
                    action="acknowledge",
                )  # fmt: skip
            again = await reconcile_settlement(
                room, child.id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision
            )
            assert again.revision is not None
            await reconcile_settlement(
                room, child.id, lease_id=again.lease_id, phase=again.phase, revision=again.revision
            )
            values = (await child.result(), await run.result())
        row = await row_of(faulty, child)

        assert before == (RunStatus.RUNNING, RunStatus.RUNNING, child)
        assert (held.run_id, held.phase, held.code) == (child.id, "terminal", "no-room-left")
        assert facts.phase is LeasePhase.TERMINAL
        assert again.held
        assert again.revision != facts.revision
        assert values == (7, 1)
        writes = [write for write in faulty.written(FinishRun) if isinstance(write, FinishRun) and write.id == child.id]
        assert len(writes) == 3
        assert all(write is writes[0] for write in writes)
        assert (row.status, row.family_return_ack) == ("completed", witness_id(WitnessStage.FAMILY_RETURN, child.id))
        kinds = [type(event) for event in events if getattr(event, "run_id", None) == child.id]
        assert kinds[-4:] == [RunHeld, RunHeld, RunRecovered, RunFinished]

    async def test_whatever_else_a_store_raises_is_repeated_not_raised_into_the_family(
        self, faulty: FaultyStore, spindel_clock: MockClock
    ) -> None:
        """R-31: an error that no store owes leaves the write uncertain, so the same write is sent again."""
        write = faulty.write_shielded
        problems = [RuntimeError("a bug of the store"), OSError("its disk")]

        async def broken(mutation: Any) -> Any:
            if isinstance(mutation, FinishRun) and problems:
                raise problems.pop()
            return await write(mutation)

        async with open_room(faulty, name="r") as room:
            other = await room.start(park)
            faulty.write_shielded = broken  # type: ignore[method-assign]
            run = await room.start(give, 1)
            value = await run.result()
            status = other.status
            other.cancel()

        assert value == 1
        assert problems == []
        assert status is RunStatus.RUNNING

    async def test_no_cancellation_stops_a_finishing(self, faulty: FaultyStore, nursery: trio.Nursery) -> None:
        """R-30: the parent, the room and the scope around it are cancelled in each stage; every step happens."""
        published: list[str] = []
        child_written = faulty.hold(1, of=FinishRun)

        async def publish(outcome: Any) -> None:
            publishing.set()
            await release.wait()
            published.append(outcome.status)

        async def parent(run: Run[None]) -> None:
            children.append(await run.start_child(give, 7, publish=publish))
            await trio.sleep_forever()

        publishing, release = trio.Event(), trio.Event()
        children: list[Run[int]] = []

        async def trouble(scope: trio.CancelScope) -> None:
            await child_written.wait_reached()
            run.cancel()
            scope.cancel()
            await wait_all_tasks_blocked()
            child_written.release()
            await publishing.wait()
            await wait_all_tasks_blocked()
            seen.append((children[0].status, run.status))
            release.set()

        seen: list[tuple[RunStatus, RunStatus]] = []
        with trio.CancelScope() as scope:
            async with open_room(faulty, name="r") as room:
                run = await room.start(parent)
                nursery.start_soon(trouble, scope)

        assert scope.cancelled_caught
        # The publication holds the join, hence the parent's end, not the child's result.
        assert seen == [(RunStatus.COMPLETED, RunStatus.CANCELLING)]
        assert published == ["completed"]
        assert children[0].outcome_nowait().value == 7
        assert (await row_of(faulty, run)).status is RunStatus.CANCELLED

    async def test_no_cancellation_stops_a_write_that_is_repeated(
        self, faulty: FaultyStore, spindel_clock: MockClock
    ) -> None:
        """R-30: between two attempts to store an outcome the Run's task can't be cancelled, and writes again."""
        faulty.fail(of=FinishRun, fault=Fault.REFUSED, times=2)
        children: list[Run[int]] = []

        async def parent(run: Run[None]) -> None:
            children.append(await run.start_child(give, 7))
            await trio.sleep_forever()

        with trio.CancelScope() as scope:
            async with open_room(faulty, name="r") as room:
                run = await room.start(parent)
                # Nothing but the clock could go on then, and that stands still while somebody waits for this.
                await wait_all_tasks_blocked()
                attempts = len(faulty.written(FinishRun))
                run.cancel()
                room.cancel_all()
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                seen = (children[0].status, run.status, len(faulty.written(FinishRun)))

        assert attempts == 1
        assert seen == (RunStatus.RUNNING, RunStatus.CANCELLING, 1)
        assert children[0].outcome_nowait().value == 7
        assert [(await row_of(faulty, ended)).status for ended in (children[0], run)] == [
            RunStatus.COMPLETED,
            RunStatus.CANCELLED,
        ]
        assert room.held() == ()

    async def test_cancelling_a_waiter_ends_its_wait_only(self, store: Store) -> None:
        """R-30: a wait that is cancelled leaves the Run alone."""
        event = trio.Event()

        async with open_room(store, name="r") as room:
            run = await room.start(wait_for, event)
            for wait in (run.wait_returned, run.outcome, run.result, run.wait_started):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await wait()
                assert scope.cancelled_caught
            untouched = (run.status, run.cancel_requested)
            event.set()
            value = await run.result()

        assert untouched == (RunStatus.RUNNING, False)
        assert value == 1

    async def test_a_result_is_there_once_the_row_is_and_not_before(
        self, faulty: FaultyStore, nursery: trio.Nursery
    ) -> None:
        async with open_room(faulty, name="r") as room:
            held = faulty.hold(of=FinishRun)
            run = await room.start(give, 1)
            await held.wait_reached()
            with pytest.raises(trio.WouldBlock):
                run.outcome_nowait()
            status = run.status
            held.release()
            value = await run.result()

        assert status is RunStatus.RUNNING
        assert value == 1
        assert run.outcome_nowait().value == 1


async def wait_for(_: Run[int], event: trio.Event) -> int:
    await event.wait()
    return 1


@attrs.frozen
class Scripted:
    """A finisher that does what a test says."""

    script: Callable[[Finishing], Awaitable[None]]

    async def finish(self, finishing: Finishing) -> None:
        await self.script(finishing)


class TestFinisher:
    async def test_one_call_stores_the_outcome_and_the_lease_is_kept_until_released(
        self, faulty: FaultyStore, nursery: trio.Nursery
    ) -> None:
        """R-33: the winner gets the record, the other None; meanwhile close and parent wait; early release is refused."""
        records: list[RunRecord | None] = []
        between, go_on = trio.Event(), trio.Event()

        async def script(finishing: Finishing) -> None:
            with pytest.raises(RunNotFinishedError, match=str(finishing.run_id)):
                finishing.release_lease()
            await finishing.join()
            assert finishing.outcome.value == 7
            records.append(await finishing.persist_outcome())
            records.append(await finishing.persist_outcome())
            between.set()
            with trio.CancelScope(shield=True):
                await go_on.wait()
            finishing.release_lease()
            finishing.release_lease()

        async def parent(run: Run[str]) -> str:
            children.append(await run.start_child(give, 7, finisher=Scripted(script)))
            return "parent"

        children: list[Run[int]] = []
        closed: list[RoomState] = []

        async def close() -> None:
            await room.close(grace_seconds=1000)
            closed.append(room.state)

        async with open_room(faulty, name="r") as room:
            run = await room.start(parent)
            await between.wait()
            (child,) = children
            nursery.start_soon(close)
            await wait_all_tasks_blocked()
            meanwhile = (child.status, run.status, room.find(child.id), list(closed))
            with pytest.raises(trio.WouldBlock):
                child.outcome_nowait()
            go_on.set()
            value = await child.result()

        assert meanwhile == (RunStatus.COMPLETED, RunStatus.RUNNING, child, [])
        assert value == 7
        assert run.outcome_nowait().value == "parent"
        assert closed == [RoomState.CLOSED]
        record, nothing = records
        assert record == await row_of(faulty, child)
        assert nothing is None

    async def test_two_calls_at_once_have_one_winner(self, faulty: FaultyStore) -> None:
        """R-33: of two concurrent calls one writes; there is one write."""
        records: list[RunRecord | None] = []

        async def persist(finishing: Finishing) -> None:
            records.append(await finishing.persist_outcome())

        async def script(finishing: Finishing) -> None:
            await finishing.join()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(persist, finishing)
                nursery.start_soon(persist, finishing)
            finishing.release_lease()

        async with open_room(faulty, name="r") as room:
            run = await room.start(give, 7, finisher=Scripted(script))
            await run.result()

        assert sorted(record is None for record in records) == [False, True]
        assert len(faulty.written(FinishRun)) == 1

    @pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY, Fault.REFUSED])
    async def test_a_failed_attempt_may_be_made_again_with_the_identical_write(
        self, faulty: FaultyStore, fault: Fault
    ) -> None:
        """R-33: `persist_outcome` makes one attempt; a later call sends the identical write."""
        faulty.fail(1, fault, of=FinishRun)
        errors: list[Exception] = []

        async def script(finishing: Finishing) -> None:
            await finishing.join()
            try:
                await finishing.persist_outcome()
            except (WriteRefusedError, WriteUncertainError) as error:
                errors.append(error)
            with pytest.raises(RunNotFinishedError):
                finishing.release_lease()
            assert await finishing.persist_outcome() is not None
            finishing.release_lease()

        async with open_room(faulty, name="r") as room:
            run = await room.start(give, 7, finisher=Scripted(script))
            value = await run.result()

        assert value == 7
        assert len(errors) == 1
        first, second = faulty.written(FinishRun)
        assert first is second

    async def test_a_run_whose_outcome_is_stored_consumes_nothing_any_more(self, faulty: FaultyStore) -> None:
        """R-34: between the stored outcome and the release a result may be looked at, and is no cause."""
        values: list[int] = []

        async def script(finishing: Finishing) -> None:
            await finishing.join()
            await finishing.persist_outcome()
            values.append(await other.result())
            finishing.release_lease()

        async with open_room(faulty, name="r") as room:
            other = await room.start(give, 3)
            run = await room.start(give, 7, finisher=Scripted(script))
            await run.result()
            row = await row_of(faulty, run)

        assert values == [3]
        assert row.caused_by == ()
        assert faulty.written(RecordCauses) == []

    async def test_without_a_store_the_steps_are_the_same(self) -> None:
        """R-33: without a store nothing is written, and the lease goes as ever."""

        async def script(finishing: Finishing) -> None:
            await finishing.join()
            assert await finishing.persist_outcome() is None
            finishing.release_lease()

        async with open_room(name="r", durable=False) as room:
            run = await room.start(give, 7, finisher=Scripted(script))
            value = await run.result()

        assert value == 7

    async def test_a_family_that_was_abandoned_ends_a_finisher_and_its_run_so(self, faulty: FaultyStore) -> None:
        """R-20: the join of a finisher tells that the return is unknown; passed on, the Run ends abandoned."""
        faulty.fail(1, Fault.REFUSED, of=FinishRun, transient=False)
        later: list[str] = []

        async def script(finishing: Finishing) -> None:
            await finishing.join()
            later.append("went on")

        async def parent(run: Run[None]) -> None:
            await run.start_child(give, 1)

        async with open_room(faulty, name="r") as room:
            run = await room.start(parent, finisher=Scripted(script))
            await wait_all_tasks_blocked()
            abandon_held(room)
            with pytest.raises(RunAbandonedError):
                await run.result()

        assert later == []
        assert (await row_of(faulty, run)).status is RunStatus.RUNNING

    async def test_a_room_that_was_lost_ends_a_finisher_and_its_run_so(self, faulty: FaultyStore) -> None:
        """R-12: a finisher whose write meets a newer owner passes that on, and its Run ends unrecorded."""

        async def script(finishing: Finishing) -> None:
            await finishing.join()
            await finishing.persist_outcome()
            raise AssertionError("nothing was stored")

        with pytest.raises(RoomOwnershipLostError):
            async with open_room(faulty, name="r") as room:
                run = await room.start(wait_for, event := trio.Event(), finisher=Scripted(script))
                faulty.lose("r")
                event.set()
                with pytest.raises(RoomOwnershipLostError):
                    await run.result()

        assert (await row_of(faulty, run)).status is RunStatus.RUNNING


@pytest.mark.parametrize("end", ["abandoned", "lost"])
async def test_an_outcome_that_is_not_stored_is_not_published(faulty: FaultyStore, end: str) -> None:
    """R-12, R-20, R-43: given up or taken over, a Run has no outcome that anybody may publish, and its lease goes."""
    faulty.fail(1, Fault.REFUSED, of=FinishRun, transient=False)
    problem = RunAbandonedError if end == "abandoned" else RoomOwnershipLostError
    published: list[object] = []
    ended: list[type[BaseException]] = []

    async def publish(outcome: object) -> None:
        published.append(outcome)

    async def scenario() -> None:
        async with open_room(faulty, name="r") as room:
            run = await room.start(give, 1, publish=publish)
            await wait_all_tasks_blocked()
            phases = [hold.phase for hold in room.held()]
            if end == "abandoned":
                abandon_held(room)
            else:
                faulty.lose("r")
                with suppress(AdmissionRefusedError, RoomOwnershipLostError):
                    await room.start(give, 2)
            with suppress(trio.Cancelled), trio.CancelScope(shield=True):
                try:
                    await run.result()
                except (RunAbandonedError, RoomOwnershipLostError) as error:
                    ended.append(type(error))
                await wait_all_tasks_blocked()
            assert phases == ["terminal"]
            assert room.entries == {}

    if end == "lost":
        with pytest.raises(RoomOwnershipLostError):
            await scenario()
    else:
        await scenario()

    assert ended == [problem]
    assert published == []
