"""Admission: who may be a parent, what a refusal leaves behind, and who gets a cancel that comes meanwhile."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AdmissionError,
    AdmissionRefusedError,
    DuplicateRunError,
    FamilyCancelledError,
    FamilySealedError,
    InvalidRecordError,
    ParentNotLiveError,
    RoomAdmissionClosedError,
    RoomOwnershipLostError,
)
from spindel.ids import RunId
from spindel.runs import Child, Finishing, LeasePhase, Outcome, Room, RoomState, Run, observe_settlement, open_room
from spindel.runs._entry import Entry
from spindel.store import AdmitRun, FenceAdmission, FinishRun, JobIdentity, MemoryStore, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.observe import RoomEvent
    from spindel.store import Store
    from spindel.testing.sweep import Steps
    from tests.conftest import Sweep


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def never(_: Run[None]) -> None:
    raise AssertionError("a refused child has no body")


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


@attrs.frozen
class Trace:
    """All that an admission could leave behind."""

    entries: int
    rows: int
    leases: int
    sequence: int


def is_open(run: Run[Any]) -> bool:
    try:
        run.outcome_nowait()
    except trio.WouldBlock:
        return True
    return False


async def trace(room: Room, parent: Run[Any] | None = None) -> Trace:
    rows = 0
    page = await room.list_runs(limit=100)
    rows += len(page.runs)
    leases = len(room.family.leases) if parent is None else len((await observe_settlement(room, parent.id)).leases)
    return Trace(len(room.entries), rows, leases, room.events.sequence)


# -- who may be a parent ---------------------------------------------------------------------------------------------


async def refuse_all_ways(parent: Run[Any], error: type[AdmissionError]) -> None:
    """Reserve under a parent in every way there is; each must be refused."""
    with pytest.raises(error):
        await parent.start_child(never)
    with pytest.raises(error), parent.reserve():
        pass
    (answer,) = await parent.start_children([Child(never, (), {})])
    assert type(answer) is error


async def test_a_parent_that_has_ended_admits_nobody(store: Store) -> None:
    """R-36: the retained object of an ended Run is no parent, and the attempt leaves no trace."""
    async with open_room(store, name="r") as room:
        parent = await room.start(give)
        await parent.wait_returned()
        before = await trace(room)
        await refuse_all_ways(parent, ParentNotLiveError)

        assert await trace(room) == before


async def test_a_parent_that_is_terminal_but_keeps_its_lease_admits_nobody(store: Store) -> None:
    """R-36: between its outcome and the release of its lease a Run is live, and sealed."""
    tried: list[Trace] = []

    class Patient:
        async def finish(self, finishing: Finishing) -> None:
            await finishing.join()
            record = await finishing.persist_outcome()
            assert record is not None
            assert record.status is RunStatus.COMPLETED
            parent = room.find(finishing.run_id)
            assert parent is not None
            before = await trace(room, parent)
            await refuse_all_ways(parent, FamilySealedError)
            tried.append(before)
            tried.append(await trace(room, parent))
            finishing.release_lease()

    async with open_room(store, name="r") as room:
        await (await room.start(give, finisher=Patient())).wait_returned()

    assert len(tried) == 2
    assert tried[0] == tried[1]


async def test_a_parent_that_is_being_published_admits_nobody(store: Store) -> None:
    """R-36: ended, a Run is no parent any more, though its own lease is still owed and found."""
    published = trio.Event()

    async def publish(_: Outcome[Any]) -> None:
        await published.wait()

    async with open_room(store, name="r") as room:
        parent = await room.start(give, publish=publish)
        await parent.wait_returned()
        before = await trace(room)
        await refuse_all_ways(parent, ParentNotLiveError)
        after = await trace(room)
        published.set()

    assert before.leases == 1
    assert after == before


async def test_a_parent_of_an_earlier_incarnation_admits_nobody(store: Store) -> None:
    """R-36: a handle from an earlier opening of the room is no parent in the present one."""
    async with open_room(store, name="r") as earlier:
        parent = await earlier.start(give)
    async with open_room(store, name="r") as room:
        before = await trace(room)
        await refuse_all_ways(parent, ParentNotLiveError)

        assert await trace(room) == before


@pytest.mark.parametrize("kind", ["invented", "stored", "of another room"])
async def test_a_forged_parent_admits_nobody(store: Store, kind: str) -> None:
    """R-36: only the very registry entry of a live Run is a parent, whatever id a forged one carries."""
    stop = trio.Event()
    async with open_room(store, name="a") as room, open_room(store, name="b") as other:
        live = await (other if kind == "of another room" else room).start(wait_for, stop)
        run_id = RunId(room.next_uuid()) if kind == "invented" else live.id
        forged = Entry(room, None, room.family, run_id)
        forged.live = True
        forged.admission = live._entry.admission
        before = await trace(room)
        await refuse_all_ways(Run(forged), ParentNotLiveError)
        after = await trace(room)
        stop.set()

    assert after == before


async def test_a_parent_that_the_store_does_not_know_admits_nobody(faulty: FaultyStore) -> None:
    """R-36: the parent is checked again inside the mutation, and refused in the same words."""
    stop = trio.Event()
    async with open_room(faulty, name="r") as room:
        parent = await room.start(wait_for, stop)
        before = await trace(room, parent)
        faulty.fail(fault=Fault.REFUSED, of=AdmitRun, code="parent-not-live", transient=False, times=2)
        with pytest.raises(ParentNotLiveError) as caught:
            await parent.start_child(never)
        (answer,) = await parent.start_children([Child(never, (), {})])
        after = await trace(room, parent)
        stop.set()

    assert caught.value.parent_id == parent.id
    assert isinstance(answer, ParentNotLiveError)
    assert after == before


# -- refusals leave nothing ------------------------------------------------------------------------------------------


async def seal(room: Room, parent: Run[None]) -> None:
    parent.seal()


async def cancel(room: Room, parent: Run[None]) -> None:
    parent.cancel()


async def fence(room: Room, parent: Run[None]) -> None:
    room.fence("room-closing")
    # The fence asks all to stop, too, and that would be the reason told: the gate alone is meant here.
    parent._entry.cancel_reason = None


@pytest.mark.parametrize(
    ("shut", "error"), [(seal, FamilySealedError), (cancel, FamilyCancelledError), (fence, RoomAdmissionClosedError)]
)
async def test_a_shut_family_refuses_without_a_trace(
    store: Store, shut: Callable[[Room, Run[None]], Awaitable[None]], error: type[AdmissionError]
) -> None:
    """R-39: sealed, cancelled, behind a fence: refused, no trace, and the family returns."""
    stop = trio.Event()

    async def stay(_: Run[None]) -> None:
        with trio.CancelScope(shield=True):
            await stop.wait()

    async with open_room(store, name="r") as room:
        parent = await room.start(stay)
        await shut(room, parent)
        before = await trace(room, parent)
        await refuse_all_ways(parent, error)
        after = await trace(room, parent)
        stop.set()
        await parent.wait_returned()
        record = await room.load(parent.id)

    assert after == before
    assert record is not None
    assert record.family_return_ack is not None


@pytest.mark.parametrize("state", [RoomState.SEALED, RoomState.FENCED, RoomState.CLOSED])
async def test_a_room_that_is_not_open_starts_no_root_run(store: Store, state: RoomState) -> None:
    """R-39: a refused root start leaves no lease, row or event."""
    async with open_room(store, name="r") as room:
        if state is RoomState.SEALED:
            room.body_ended(None)
        elif state is RoomState.FENCED:
            room.fence("room-closing")
        else:
            await room.close()
        before = await trace(room)
        with pytest.raises(RoomAdmissionClosedError) as caught:
            await room.start(never)

        assert caught.value.state == state.value
        assert await trace(room) == before


@pytest.mark.parametrize("whose", ["a live child", "an ended child", "a child being published", "the parent"])
async def test_an_id_that_is_taken_is_refused_without_a_trace(store: Store, whose: str) -> None:
    """R-39: whoever has the id keeps everything, in whatever stage it is; the other admission never was."""
    stop, published = trio.Event(), trio.Event()

    async def publish(_: Outcome[Any]) -> None:
        await published.wait()

    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        if whose == "a child being published":
            child: Run[Any] = await parent.start_child(give, publish=publish)
        else:
            child = await parent.start_child(wait_for, published if whose == "an ended child" else stop)
        if whose == "an ended child":
            published.set()
        if whose in ("an ended child", "a child being published"):
            await child.wait_returned()
        taken = parent.id if whose == "the parent" else child.id
        before = await trace(room, parent)
        with pytest.raises(DuplicateRunError) as caught:
            await parent.start_child(never, run_id=taken)
        with pytest.raises(DuplicateRunError):
            await room.start(never, run_id=taken)
        (answer,) = await parent.start_children([Child(never, (), {"run_id": taken})])
        after = await trace(room, parent)
        stop.set()
        await wait_all_tasks_blocked()
        waits_for_the_publication = is_open(parent)
        published.set()

    assert caught.value.run_id == taken
    assert isinstance(answer, DuplicateRunError)
    assert after == before
    assert waits_for_the_publication == (whose == "a child being published")


async def test_the_same_id_twice_in_one_group_admits_the_first(store: Store) -> None:
    """R-39: of two children of a group with one id, the second is refused without a trace."""
    async with open_room(store, name="r") as room:
        stop = trio.Event()
        parent = await room.start(wait_for, stop)
        run_id = RunId(room.next_uuid())
        first, second, third = await parent.start_children(
            [Child(give, (n,), {"run_id": run_id} if n < 2 else {}) for n in range(3)]
        )
        stop.set()

        assert isinstance(first, Run)
        assert first.id == run_id
        assert isinstance(second, DuplicateRunError)
        assert isinstance(third, Run)
        assert await third.result() == 2


@pytest.mark.parametrize("transient", [True, False])
async def test_a_refused_row_leaves_no_trace(faulty: FaultyStore, transient: bool) -> None:
    """R-39: what the store refused was never admitted; the id may be tried again."""
    stop = trio.Event()
    async with open_room(faulty, name="r") as room:
        parent = await room.start(wait_for, stop)
        before = await trace(room, parent)
        faulty.fail(fault=Fault.REFUSED, of=AdmitRun, code="full", transient=transient)
        run_id = RunId(room.next_uuid())
        with pytest.raises(AdmissionRefusedError) as caught:
            await parent.start_child(never, run_id=run_id)
        after = await trace(room, parent)
        again = await parent.start_child(give, run_id=run_id)
        stop.set()

        assert after == before
        assert (caught.value.code, caught.value.transient) == ("full", transient)
        assert await again.result() == 1
        assert faulty.written(FenceAdmission) == []


async def test_an_option_that_no_record_may_hold_leaves_no_trace(store: Store) -> None:
    """R-39: a wrong option is refused before anything is registered or written."""
    stop = trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        before = await trace(room, parent)
        with pytest.raises(InvalidRecordError, match="kind"):
            await parent.start_child(never, kind="")
        with pytest.raises(InvalidRecordError, match="colour"):
            await parent.start_child(never, colour="red")  # type: ignore[call-arg]
        with pytest.raises(InvalidRecordError, match="kind"):
            await parent.start_children([Child(never, (), {}), Child(never, (), {"kind": ""})])
        after = await trace(room, parent)
        stop.set()

    assert after == before


async def test_a_caller_that_is_cancelled_before_the_row_leaves_no_trace(store: Store) -> None:
    """R-39: cancelled before anything was issued, an admission never was."""
    stop = trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        before = await trace(room, parent)
        with trio.CancelScope() as scope:
            scope.cancel()
            await parent.start_child(never)
        with trio.CancelScope() as second:
            second.cancel()
            await parent.start_children([Child(never, (), {})] * 3)
        after = await trace(room, parent)
        stop.set()

    assert scope.cancelled_caught
    assert second.cancelled_caught
    assert after == before


async def test_a_group_that_meets_a_newer_owner_leaves_nothing_owed() -> None:
    """R-12, R-39: refused as not the owner, a whole group is unused, the room is lost and its block ends."""
    faulty = FaultyStore(MemoryStore())
    answers: list[object] = []
    rooms: list[Room] = []

    async def lose() -> None:
        async with open_room(faulty, name="r") as room:
            rooms.append(room)
            parent = await room.start(wait_for, trio.Event())
            faulty.lose("r")
            answers.extend(await parent.start_children([Child(never, (), {}) for _ in range(3)]))

    with pytest.raises(RoomOwnershipLostError):
        await lose()

    assert [type(answer) for answer in answers] == [AdmissionRefusedError] * 3
    assert {answer.code for answer in answers if isinstance(answer, AdmissionRefusedError)} == {"not-owner"}
    assert rooms[0].state is RoomState.LOST
    assert rooms[0].entries == {}


# -- which child a lease waits for -----------------------------------------------------------------------------------


async def test_a_lease_waits_for_the_registered_child_whatever_is_returned(store: Store) -> None:
    """R-40: a body that returns another Run, or its id, changes nothing about whom its family waits for."""
    stop = trio.Event()

    async def claim_another(_: Run[RunId], other: Run[None]) -> RunId:
        return other.id

    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        other = await parent.start_child(wait_for, stop)
        with parent.reserve() as token:
            child = await parent.admit(token, claim_another, other)
            claimed = await child.result()
            inside = (await observe_settlement(room, parent.id)).leases
        after = (await observe_settlement(room, parent.id)).leases
        stop.set()

    assert claimed == other.id
    assert {lease.run_id: lease.phase for lease in inside} == {
        other.id: LeasePhase.ADMITTED,
        token.run_id: LeasePhase.RETURNED,
    }
    assert [lease.run_id for lease in after] == [other.id]


async def test_a_callback_that_starts_two_children_owns_both(store: Store) -> None:
    """R-40: a callback that returns one of its children leaves the other as owned as before."""
    stop = trio.Event()

    async def supervise(run: Run[None]) -> Run[None]:
        first = await run.start_child(wait_for, trio.Event())
        second = await run.start_child(wait_for, stop)
        first.cancel()
        await first.wait_returned()
        del second
        return first

    async def parent(run: Run[None]) -> None:
        await supervise(run)

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        still_open = is_open(run)
        stop.set()
        await run.wait_returned()

    assert still_open


# -- cancel meets an admission ---------------------------------------------------------------------------------------


async def test_a_cancelled_parent_reserves_nothing(store: Store) -> None:
    """R-42: after the request an admission is refused, and tells why."""
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, trio.Event())
        parent.cancel("enough")
        with pytest.raises(FamilyCancelledError) as caught:
            await parent.start_child(never)

    assert caught.value.reason == "enough"


async def test_a_parent_cancelled_while_the_row_is_written_admits_a_cancelled_child(faulty: FaultyStore) -> None:
    """R-42: the child of a row in flight is admitted, cancelled in the same turn, and joined."""
    events: list[RoomEvent] = []
    reached: list[str] = []

    async def child(run: Run[None]) -> None:
        reached.append("body")
        assert run.cancel_reason == "enough"
        await trio.lowlevel.checkpoint()
        reached.append("after its first checkpoint")

    async with open_room(faulty, name="r") as room, room.watch() as watch, trio.open_nursery() as nursery:
        parent = await room.start(wait_for, trio.Event())
        held = faulty.hold(of=AdmitRun)
        nursery.start_soon(parent.start_child, child)
        await held.wait_reached()
        parent.cancel("enough")
        held.release()
        await parent.wait_returned()
        page = await room.list_runs(parent=parent.id)
        await room.close()
        async for event in watch:
            events.append(event)
            if event.name == "room.fenced":
                break

    assert reached == ["body"]
    assert [(run.status, run.reason) for run in page.runs] == [(RunStatus.CANCELLED, "enough")]
    names = [event.name for event in events]
    assert names[:5] == [
        "run.started",
        "run.cancel-requested",
        "run.started",
        "run.cancel-requested",
        "run.finished",
    ]


async def test_a_reservation_made_before_the_request_is_admitted_and_cancelled(store: Store) -> None:
    """R-42: a lease from before the request still admits, and its child starts cancelled."""
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, trio.Event())
        with parent.reserve() as token:
            parent.cancel("enough")
            child = await parent.admit(token, wait_for, trio.Event())
            at_once = child.cancel_requested
        await child.wait_returned()

        assert at_once
        assert child.outcome_nowait().status is RunStatus.CANCELLED


async def test_a_request_in_the_turn_after_the_admission_meets_the_original_controls(store: Store) -> None:
    """R-50: cancelled before its task took its first step, a child gets flag, callback and scope like any other."""
    called: list[str] = []
    steps: list[str] = []

    async def child(_: Run[None]) -> None:
        steps.append("body")
        await trio.lowlevel.checkpoint()
        steps.append("after its first checkpoint")

    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, trio.Event())
        run = await parent.start_child(child)
        run.add_cancel_callback("note", called.append)
        undecided = parent.cancel("enough")
        await run.wait_returned()

        assert undecided
        assert called == ["enough"]
        assert steps == ["body"]
        assert run.outcome_nowait().status is RunStatus.CANCELLED


async def test_wherever_an_admission_is_cancelled_somebody_has_custody(sweep: Sweep) -> None:
    """R-50: after every step the lease belongs to the family or to the live child, never to both or to nobody."""
    ends: set[str] = set()

    async def scenario(steps: Steps) -> None:
        async def parent(run: Run[None]) -> None:
            steps.arm(partial(check_and_cancel, run))
            first = await run.start_child(child)
            await run.start_children([Child(child, (), {}), Child(child, (), {})])
            await first.wait_returned()

        async def child(_: Run[None]) -> None:
            await trio.lowlevel.checkpoint()

        def check_and_cancel(run: Run[None]) -> None:
            family = run._entry.family
            for entry in () if family is None else family.leases.values():
                controls = entry.scope is not None and entry.fn is not None
                assert room.entries[entry.key] is entry
                assert entry.live == (entry.phase is LeasePhase.ADMITTED)
                assert not (entry.phase is LeasePhase.RESERVED and controls)
            run.cancel()

        async with open_room(name="r") as room:
            run = await room.start(parent)
            await run.wait_returned()
            ends.add(run.outcome_nowait().status.value)
            page = await room.list_runs(limit=100)

            assert all(row.status.terminal and row.family_return_ack is not None for row in page.runs)
            assert room.entries == {}

    assert await sweep(scenario) > 10
    assert ends == {"completed", "cancelled"}


async def test_wherever_the_caller_is_cancelled_an_admission_is_decided(sweep: Sweep) -> None:
    """R-50: a cancelled caller has either a child with a row and a body, or no trace."""

    async def scenario(steps: Steps) -> None:
        bodies: list[RunId] = []

        async def child(run: Run[None]) -> None:
            bodies.append(run.id)

        async def start(parent: Run[None]) -> None:
            with trio.CancelScope() as scope:
                steps.arm(scope.cancel)
                await parent.start_child(child)
                await parent.start_children([Child(child, (), {}), Child(child, (), {})])

        stop = trio.Event()
        async with open_room(name="r") as room:
            parent = await room.start(wait_for, stop)
            await start(parent)
            await wait_all_tasks_blocked()
            left = await trace(room, parent)
            rows = {row.id for row in (await room.list_runs(parent=parent.id)).runs}
            stop.set()

        assert rows == set(bodies)
        assert left.leases == 0
        assert len(bodies) in (0, 1, 3)

    assert await sweep(scenario) > 3


async def test_a_row_is_written_once_for_a_child_and_once_for_its_end(faulty: FaultyStore) -> None:
    """R-86: an admission is one mutation, an end is one."""
    stop = trio.Event()
    async with open_room(faulty, name="r") as room:
        parent = await room.start(wait_for, stop)
        await parent.start_children([Child(give, (n,), {}) for n in range(10)])
        stop.set()
        await parent.wait_returned()

    assert len(faulty.written(AdmitRun)) == 11
    assert len(faulty.written(FinishRun)) == 11
    assert len(faulty.writes) == 1 + 22  # and the look for orphans when the room was opened


class Unstorable:
    """A finisher whose identity can't be a row: options are fine, and only the store finds out."""

    job = JobIdentity(key=7)  # type: ignore[arg-type]

    async def finish(self, finishing: Finishing) -> None:
        raise AssertionError("its Run never begins")


async def test_a_group_with_a_row_that_can_not_be_stored_is_refused_and_leaves_no_trace(store: Store) -> None:
    """R-08, R-39: the store takes none of a group in which one row is invalid; each is refused by name, none is kept."""
    results: list[Run[Any] | AdmissionError] = []

    async def parent(run: Run[None]) -> None:
        children: list[Child[Any]] = [Child.of(never), Child.of(never, finisher=Unstorable())]
        results.extend(await run.start_children(children))

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        await run.result()
        rows = (await room.list_runs()).runs

    assert [type(result) for result in results] == [AdmissionRefusedError] * 2
    assert [(error.code, error.transient) for error in results if isinstance(error, AdmissionRefusedError)] == [
        ("invalid-record", False)
    ] * 2
    assert all("job_key" in str(error) for error in results)
    assert [row.id for row in rows] == [run.id]


async def test_a_single_row_that_can_not_be_stored_is_refused_as_what_it_is(store: Store) -> None:
    """R-08, R-39: started alone, it raises the store's `InvalidRecordError`, and its lease is gone."""

    async def parent(run: Run[None]) -> None:
        with pytest.raises(InvalidRecordError, match="job_key"):
            await run.start_child(never, finisher=Unstorable())

    async with open_room(store, name="r") as room:
        await (await room.start(parent)).result()
