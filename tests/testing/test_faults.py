"""The faulty store: what it does to a write, and what its caller sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import pytest
import trio
import trio.testing

from spindel.errors import InvalidRecordError, WriteRefusedError, WriteUncertainError
from spindel.ids import RunId
from spindel.store._contract import Confirmation
from spindel.store._memory import MemoryStore
from spindel.store._mutations import AdmitRun, FinishRun, RecordCauses, Together
from spindel.store._records import RunQuery
from spindel.testing.faults import Fault, FaultyStore, fail_each
from spindel.testing.store_contract import Commands, StoreContract, open_commands, refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from spindel.store._contract import Store
    from spindel.store._mutations import Mutation


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
async def room(store: FaultyStore) -> AsyncIterator[Commands]:
    async with open_commands(store) as commands:
        yield commands


async def stored(store: FaultyStore, run: AdmitRun) -> bool:
    return await store.store.load_run(run.room, RunId(run.id)) is not None


class TestWithoutAPlan(StoreContract):
    @pytest.fixture
    def reopen(self) -> Callable[[], Store]:
        """A faulty store without faults is a store like any other."""
        memory = MemoryStore()
        return lambda: FaultyStore(memory)


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "error", "is_stored"),
        [
            (Fault.REFUSED, WriteRefusedError, False),
            (Fault.BEFORE, WriteUncertainError, False),
            (Fault.LOST_REPLY, WriteUncertainError, True),
            (Fault.LATE, WriteUncertainError, False),
        ],
    )
    async def test_write_fails_as_its_fault_says(
        self, store: FaultyStore, room: Commands, fault: Fault, error: type[Exception], is_stored: bool
    ) -> None:
        plan = store.fail(1, fault)
        run = room.admit()
        with pytest.raises(error):
            await store.write(run)

        assert await stored(store, run) is is_stored
        assert plan.met == [run]
        await store.write(run)
        assert await stored(store, run)

    async def test_refusal_has_the_code_that_was_asked_for(self, store: FaultyStore, room: Commands) -> None:
        store.fail(1, "refused")
        store.fail(2, "refused", code="disk-full", transient=False)
        results = await store.write_each([room.admit(), room.admit()])
        refusals = [result for result in results if isinstance(result, WriteRefusedError)]

        assert [(error.code, error.transient) for error in refusals] == [("injected", True), ("disk-full", False)]

    async def test_lost_reply_of_a_refused_write_is_its_refusal(self, store: FaultyStore, room: Commands) -> None:
        """A write without effect has nothing that could be uncertain."""
        store.fail(1, Fault.LOST_REPLY)

        assert await refusal(store, room.finish(room.admit())) == "run-unknown"

    async def test_nth_write_of_a_kind_fails_and_as_many_as_planned(self, store: FaultyStore, room: Commands) -> None:
        plan = store.fail(2, Fault.BEFORE, of=AdmitRun, times=2)
        runs = [room.admit() for _ in range(4)]
        results = await store.write_each([runs[0], room.finish(runs[0]), *runs[1:]])

        assert [isinstance(result, WriteUncertainError) for result in results] == [False, False, True, True, False]
        assert plan.met == runs[1:3]

    async def test_together_counts_as_what_it_holds(self, store: FaultyStore, room: Commands) -> None:
        plan = store.fail(1, Fault.BEFORE, of=(FinishRun, RecordCauses))
        run = room.admit()
        await store.write(Together(mutations=(run,)))
        together = Together(mutations=(room.witnesses(run), room.finish(run)))
        with pytest.raises(WriteUncertainError) as caught:
            await store.write(together)

        assert caught.value.identity == together.identity
        assert plan.met == [together]

    async def test_plans_count_on_their_own(self, store: FaultyStore, room: Commands) -> None:
        store.fail(1, Fault.BEFORE)
        store.fail(2, Fault.REFUSED)
        results = await store.write_each([room.admit() for _ in range(3)])

        assert [type(result) for result in results] == [WriteUncertainError, WriteRefusedError, type(None)]

    async def test_mended_store_fails_nothing(self, store: FaultyStore, room: Commands) -> None:
        plan = store.fail()
        store.fail_confirm()
        store.mend()
        run = room.admit()
        await store.write(run)

        assert await store.confirm(run) is Confirmation.PRESENT
        assert not plan.fired

    async def test_confirm_fails_as_planned(self, store: FaultyStore, room: Commands) -> None:
        store.fail_confirm(2, of=AdmitRun)
        run = room.admit()
        await store.write(run)

        assert await store.confirm(run) is Confirmation.PRESENT
        assert await store.confirm(room.finish(run)) is Confirmation.ABSENT
        with pytest.raises(WriteUncertainError):
            await store.confirm(run)
        assert await store.confirm(run) is Confirmation.PRESENT
        assert len(store.confirms) == 4

    async def test_late_writes_arrive_in_order_when_told(self, store: FaultyStore, room: Commands) -> None:
        store.fail(1, Fault.LATE, times=3)
        run = room.admit()
        mutations: list[Mutation[Any]] = [run, room.finish(run), room.finish(room.admit())]
        await store.write_each(mutations)
        assert not await stored(store, run)
        results = await store.arrive()

        assert results[:2] == [None, None]
        assert isinstance(results[2], WriteRefusedError)
        assert await store.arrive() == []

    async def test_writes_are_recorded_in_order_with_their_faults(self, store: FaultyStore, room: Commands) -> None:
        store.fail(2, Fault.BEFORE)
        run = room.admit()
        await store.write(run)
        await store.write_each([room.finish(run), run])

        assert [(seen.mutation.identity[0], seen.fault) for seen in store.writes] == [
            ("admit-run", None),
            ("finish-run", Fault.BEFORE),
            ("admit-run", None),
        ]
        assert store.written(AdmitRun) == [run, run]

    async def test_record_that_no_store_takes_meets_no_plan(self, store: FaultyStore, room: Commands) -> None:
        plan = store.fail(1, Fault.BEFORE)
        with pytest.raises(InvalidRecordError):
            await store.write_each([room.admit(), room.finish(room.admit(), reason="No!")])

        assert not plan.fired
        assert store.writes == []

    def test_counting_begins_at_one(self, store: FaultyStore) -> None:
        for plan in (store.fail, store.fail_confirm, store.hold):
            with pytest.raises(ValueError, match="0"):
                plan(0)


class TestHolds:
    async def test_held_write_waits_and_later_ones_stay_behind_it(self, store: FaultyStore, room: Commands) -> None:
        hold = store.hold(2)
        parent = room.admit()
        children = [room.admit(parent_id=parent.id) for _ in range(10)]
        await store.write(room.admit())
        order: list[Mutation[Any]] = []

        async def write(mutation: Mutation[Any]) -> None:
            await store.write(mutation)
            order.append(mutation)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, parent)
            await hold.wait_reached()
            for child in children:
                nursery.start_soon(write, child)
                await trio.testing.wait_all_tasks_blocked()
            assert order == []
            hold.release()

        assert order == [parent, *children]

    async def test_held_write_can_not_be_cancelled(self, store: FaultyStore, room: Commands) -> None:
        hold = store.hold()
        run = room.admit()
        done: list[bool] = []

        async def write() -> None:
            await store.write(run)
            done.append(await stored(store, run))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await hold.wait_reached()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                assert done == []
                hold.release()

        assert await stored(store, run)

    async def test_released_beforehand_it_does_not_wait(self, store: FaultyStore, room: Commands) -> None:
        hold = store.hold()
        hold.release()
        await store.write(room.admit())
        await hold.wait_reached()

    async def test_held_write_can_fail_as_well(self, store: FaultyStore, room: Commands) -> None:
        hold = store.hold()
        store.fail()
        hold.release()
        with pytest.raises(WriteUncertainError):
            await store.write(room.admit())


class TestLosingARoom:
    async def test_old_owner_is_refused_and_the_next_one_is_not(self, store: FaultyStore) -> None:
        """R-12, as a test of a program provokes it: the owner is refused in the middle of its block."""
        async with open_commands(store, "other") as other:
            async with open_commands(store) as room:
                run = room.admit()
                await store.write(run)
                store.lose("main")

                assert await refusal(store, room.finish(run)) == "not-owner"
                await store.write(other.admit())
            async with open_commands(store) as again:
                assert await store.write(again.adopt()) == 1


class TestFailEach:
    @pytest.mark.parametrize("fault", list(Fault))
    async def test_each_write_fails_once(self, fault: Fault) -> None:
        met: list[type[Any]] = []

        async def scenario(store: FaultyStore) -> None:
            async with open_commands(store) as room:
                run = room.admit()
                for mutation in (run, room.witnesses(run), room.finish(run)):
                    try:
                        await store.write(mutation)
                    except (WriteRefusedError, WriteUncertainError):
                        met.append(type(mutation))
                        await store.write(mutation)
                assert (await store.list_runs(RunQuery(room="main"))).runs[0].status == "completed"

        assert await fail_each(MemoryStore, scenario, fault=fault) == 3
        assert [kind.__name__ for kind in met] == ["AdmitRun", "AppendWitnesses", "FinishRun"]
        assert await fail_each(MemoryStore, scenario, fault=fault, of=FinishRun) == 1

    async def test_scenario_without_writes_fails_none(self) -> None:
        assert await fail_each(MemoryStore, lambda store: store.list_rooms()) == 0

    async def test_what_a_scenario_finds_wrong_goes_through(self) -> None:
        async def scenario(store: FaultyStore) -> None:
            async with open_commands(store) as room:
                await store.write(room.admit())

        with pytest.raises(WriteUncertainError):
            await fail_each(MemoryStore, scenario)


async def test_wrapped_store_is_opened_and_closed() -> None:
    class Counting(MemoryStore):
        opened = closed = 0

        async def __aenter__(self) -> Self:
            Counting.opened += 1
            return self

        async def __aexit__(self, *_: object) -> None:
            Counting.closed += 1

    async with FaultyStore(Counting()) as store:
        assert (Counting.opened, Counting.closed) == (1, 0)
        assert store.durable is False

    assert (Counting.opened, Counting.closed) == (1, 1)
