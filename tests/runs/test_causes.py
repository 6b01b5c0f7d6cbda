"""Causes: whose outcome a Run used. They are observed, and give nobody ownership."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    CausalStoreRequiredError,
    CauseNotDurableError,
    RunCancelledError,
    RunFailedError,
    RunWaiting,
    RunWaitingError,
    WriteRefusedError,
)
from spindel.ids import RunId
from spindel.runs import Room, Run, observe_settlement, open_room
from spindel.store import RecordCauses, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from spindel.store import Store


async def give(_: Run[int], value: int) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


async def causes_of(room: Room, run_id: RunId) -> tuple[RunId, ...]:
    record = await room.load(run_id)
    assert record is not None
    return record.caused_by


async def test_awaiting_a_result_stores_the_cause_before_the_value_is_seen(faulty: FaultyStore) -> None:
    """R-34: a parent that awaits its child's result has the child as a stored cause before it sees the value."""
    held = faulty.hold(of=RecordCauses)
    values: list[int] = []
    seen: list[tuple[RunId, ...]] = []

    async def parent(run: Run[None]) -> None:
        child = await run.start_child(give, 7)
        values.append(await child.result())
        seen.append(await causes_of(room, run.id))
        assert seen[-1] == (child.id,)

    async with open_room(faulty, name="r") as room:
        run = await room.start(parent)
        await held.wait_reached()
        await wait_all_tasks_blocked()
        before = list(values)
        held.release()
        await run.result()

    assert before == []
    assert values == [7]
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_an_outcome_that_is_no_value_is_a_cause_as_well(store: Store, how: str) -> None:
    """R-34: a failed or cancelled child whose outcome was awaited is a cause, too."""

    async def fail(_: Run[None]) -> None:
        raise ValueError("no")

    async def parent(run: Run[RunId]) -> RunId:
        child = await run.start_child(fail) if how == "failed" else await run.start_child(wait_for, trio.Event())
        if how == "cancelled":
            child.cancel()
        with pytest.raises((RunFailedError, RunCancelledError)):
            await child.result()
        return child.id

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        child_id = await run.result()

        assert await causes_of(room, run.id) == (child_id,)


async def test_several_causes_are_a_set(store: Store) -> None:
    """R-34: awaiting twice records once; every consumed child stands in the row, sorted."""

    async def parent(run: Run[list[RunId]]) -> list[RunId]:
        children = [await run.start_child(give, number) for number in range(3)]
        for child in (*children, *children):
            await child.outcome()
        return [child.id for child in children]

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        children = await run.result()

        assert await causes_of(room, run.id) == tuple(sorted(children))


async def test_nothing_but_outcome_and_result_records_a_cause(store: Store) -> None:
    """R-34: waiting for the return, looking at the outcome, a waiting child, an outsider: none of these is a cause."""

    async def pause(_: Run[None]) -> None:
        raise RunWaiting("approval")

    async def parent(run: Run[None]) -> None:
        child = await run.start_child(give, 1)
        await child.wait_returned()
        child.outcome_nowait()
        waiting = await run.start_child(pause)
        with pytest.raises(RunWaitingError):
            await waiting.result()

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        await run.result()
        consumed_outside = await room.start(give, 2)
        await consumed_outside.result()

        assert await causes_of(room, run.id) == ()
        assert await causes_of(room, consumed_outside.id) == ()


async def test_a_run_of_another_room_is_awaited_without_a_cause(store: Store) -> None:
    """R-34: a consumer in another room records nothing, since a cause is of the same room."""

    async def consume(_: Run[int], other: Run[int]) -> int:
        return await other.result()

    async with open_room(store, name="a") as a, open_room(store, name="b") as b:
        other = await b.start(give, 5)
        run = await a.start(consume, other)

        assert await run.result() == 5
        assert await causes_of(a, run.id) == ()


async def test_impossible_causes_are_refused(store: Store) -> None:
    """R-34: a Run itself, a live Run, one of another room and an invented one are refused as causes."""
    codes: list[str] = []
    stop = trio.Event()

    async def consumer(run: Run[None], live: Run[None], foreign: Run[int]) -> None:
        for cause in (run.id, live.id, foreign.id, RunId(room.incarnation)):
            with pytest.raises(WriteRefusedError) as caught:
                await run.record_cause(cause)
            codes.append(caught.value.code)

    async with open_room(store, name="a") as room, open_room(store, name="b") as other:
        foreign = await other.start(give, 1)
        await foreign.wait_returned()
        live = await room.start(wait_for, stop)
        run = await room.start(consumer, live, foreign)
        await run.result()
        stop.set()

        assert codes == ["cause"] * 4
        assert await causes_of(room, run.id) == ()


async def test_a_run_that_has_ended_records_no_cause(store: Store) -> None:
    """R-34: the consumer must be live."""
    async with open_room(store, name="r") as room:
        first, second = await room.start(give, 1), await room.start(give, 2)
        await first.wait_returned()
        await second.wait_returned()
        with pytest.raises(WriteRefusedError) as caught:
            await second.record_cause(first.id)

        assert caught.value.code == "cause"


async def test_a_cause_owns_nothing(store: Store) -> None:
    """R-34: a consumer owns neither lease nor life of what it awaits: cancelling it leaves the other alone."""
    stop = trio.Event()

    async def consume(_: Run[None], other: Run[None]) -> None:
        await other.result()

    async with open_room(store, name="r") as room:
        other = await room.start(wait_for, stop)
        cancelled = await room.start(consume, other)
        patient = await room.start(consume, other)
        await wait_all_tasks_blocked()
        family = (await observe_settlement(room, patient.id)).leases
        cancelled.cancel()
        await cancelled.wait_returned()
        untouched = not other.cancel_requested and other.status is RunStatus.RUNNING
        stop.set()
        await patient.result()

        assert family == ()
        assert untouched
        assert await causes_of(room, patient.id) == (other.id,)
        assert await causes_of(room, cancelled.id) == ()


@pytest.mark.parametrize(("fault", "transient"), [(Fault.BEFORE, False), (Fault.REFUSED, True), (Fault.REFUSED, False)])
async def test_a_value_is_not_given_without_its_cause(faulty: FaultyStore, fault: Fault, transient: bool) -> None:
    """R-34: if the cause can't be shown to be stored, the consumer gets an error instead of the value."""
    faulty.fail(fault=fault, of=RecordCauses, transient=transient)

    async def parent(run: Run[None]) -> None:
        child = await run.start_child(give, 7)
        with pytest.raises(CauseNotDurableError) as caught:
            await child.result()
        assert (caught.value.run_id, caught.value.cause_id) == (run.id, child.id)

    async with open_room(faulty, name="r") as room:
        run = await room.start(parent)
        await run.result()

        assert await causes_of(room, run.id) == ()


@pytest.mark.parametrize(("transient", "error"), [(True, CauseNotDurableError), (False, WriteRefusedError)])
async def test_a_refused_cause_tells_whether_it_could_still_be_stored(
    faulty: FaultyStore, transient: bool, error: type[Exception]
) -> None:
    """R-34: refused for now, a recorded cause is not durable; refused for good, the store's own reason is told."""

    async def consumer(run: Run[None], other: Run[int]) -> None:
        faulty.fail(fault=Fault.REFUSED, of=RecordCauses, transient=transient)
        with pytest.raises(error):
            await run.record_cause(other.id)
        await run.record_cause(other.id)

    async with open_room(faulty, name="r") as room:
        other = await room.start(give, 1)
        await other.wait_returned()
        run = await room.start(consumer, other)
        await run.result()

        assert await causes_of(room, run.id) == (other.id,)


async def test_a_cause_whose_reply_was_lost_is_confirmed(faulty: FaultyStore) -> None:
    """R-34: a stored cause whose reply was lost is read back, and the value is given."""
    faulty.fail(fault=Fault.LOST_REPLY, of=RecordCauses)

    async def parent(run: Run[int]) -> int:
        return await (await run.start_child(give, 7)).result()

    async with open_room(faulty, name="r") as room:
        run = await room.start(parent)

        assert await run.result() == 7
        assert len(await causes_of(room, run.id)) == 1
        assert len(faulty.written(RecordCauses)) == 1


async def test_a_cause_that_can_be_neither_written_nor_read_is_not_durable(faulty: FaultyStore) -> None:
    """R-34: a lost reply whose reading fails, too, stays unknown, and is told so."""
    faulty.fail(fault=Fault.LOST_REPLY, of=RecordCauses)
    faulty.fail_confirm(of=RecordCauses)

    async def parent(run: Run[None]) -> None:
        child = await run.start_child(give, 7)
        with pytest.raises(CauseNotDurableError):
            await child.result()

    async with open_room(faulty, name="r") as room:
        await (await room.start(parent)).result()


async def test_causes_need_a_store() -> None:
    """R-34: without a store a result is given, and recording a cause is refused."""

    async def parent(run: Run[int]) -> int:
        child = await run.start_child(give, 7)
        with pytest.raises(CausalStoreRequiredError):
            await run.record_cause(child.id)
        return await child.result()

    async with open_room(name="r", durable=False) as room:
        assert await (await room.start(parent)).result() == 7
