"""Admissions whose first row is uncertain: held, only ever fenced, and recovered by an operator."""

from __future__ import annotations

import gc
import inspect
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import spindel.operator
from spindel.errors import (
    AcknowledgeRefusedError,
    AdmissionUncertainError,
    CallbackNotExitedError,
    DuplicateRunError,
    ForeignRoomError,
    NotHeldError,
    OperatorError,
    RecoveryInProgressError,
    RoomOwnershipLostError,
    StaleRevisionError,
    WriteRefusedError,
)
from spindel.ids import LeaseId, Revision, RunId
from spindel.operator import abandon_held, reconcile_settlement
from spindel.runs import (
    Acquisition,
    Disposal,
    LeaseFacts,
    LeasePhase,
    Preparation,
    Room,
    Run,
    observe_settlement,
    open_room,
)
from spindel.store import AdmitRun, FenceAdmission, RecordDisposal, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from spindel.observe import RoomEvent

ANOTHER = Revision(UUID(int=7))


class Spied(Preparation[str]):
    """Takes one thing, and notes every call of constructor and disposal."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.dispose_waits: trio.Event | None = None
        self.entered = trio.Event()
        self.answers: list[Disposal] = []

    async def construct(self, run_id: RunId, acquisition: Acquisition) -> str:
        acquisition.begin("thing", self.dispose)
        self.calls.append("construct")
        return "ready"

    async def dispose(self) -> Disposal:
        self.calls.append("dispose")
        self.entered.set()
        if self.dispose_waits is not None:
            await self.dispose_waits.wait()
        return self.answers.pop(0) if self.answers else Disposal.DISCARDED


class Scene:
    """A parent whose one child's first row is uncertain."""

    def __init__(self, room: Room, spied: Spied) -> None:
        self.room = room
        self.spied = spied
        self.bodies: list[RunId] = []
        self.errors: list[BaseException] = []
        self.parent: Run[None]

    async def child(self, run: Run[None]) -> None:
        self.bodies.append(run.id)

    async def body(self, run: Run[None]) -> None:
        try:
            await run.start_child(self.child, prepare=self.spied)
        except AdmissionUncertainError as error:
            self.errors.append(error)

    async def begin(self) -> AdmissionUncertainError:
        self.parent = await self.room.start(self.body)
        await wait_all_tasks_blocked()
        (error,) = self.errors
        assert isinstance(error, AdmissionUncertainError)
        return error

    async def facts(self, run_id: RunId) -> LeaseFacts:
        facts = (await observe_settlement(self.room, run_id)).admission
        assert facts is not None
        return facts

    async def reconcile(
        self, run_id: RunId, action: Literal["retry", "acknowledge"] = "retry", **changes: Any
    ) -> LeaseFacts:
        facts = await self.facts(run_id)
        found: dict[str, Any] = {"lease_id": facts.lease_id, "phase": facts.phase, "revision": facts.revision} | changes
        return await reconcile_settlement(self.room, run_id, action=action, **found)


def open_scene(room: Room) -> Scene:
    return Scene(room, Spied())


async def test_a_missing_row_resolves_nothing(faulty: FaultyStore) -> None:
    """R-55: however often the missing row is read, the admission stays held at `starting`, nothing disposed."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        for _ in range(5):
            assert await room.load(error.run_id) is None
            facts = await scene.facts(error.run_id)
            assert (facts.phase, facts.held, facts.child_returned) == (LeasePhase.STARTING, True, False)

        assert scene.spied.calls == ["construct"]
        assert room.find(error.run_id) is None
        with pytest.raises(trio.WouldBlock):
            scene.parent.outcome_nowait()
        await scene.reconcile(error.run_id)
        await scene.parent.result()
    assert scene.bodies == []


async def test_a_lost_reply_is_read_back_and_admits(faulty: FaultyStore) -> None:
    """R-56: a row that was stored though its reply was lost is read back: admitted, its body runs once."""
    faulty.fail(2, Fault.LOST_REPLY, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        scene.parent = await room.start(scene.body)
        await scene.parent.result()

    assert scene.errors == []
    assert len(scene.bodies) == 1
    assert scene.spied.calls == ["construct"]


async def test_another_row_read_back_under_the_same_id_refuses(faulty: FaultyStore) -> None:
    """R-56: if the reading finds the id taken by other content, the write can never be stored: refused, not held."""
    faulty.fail(3, Fault.BEFORE, of=AdmitRun)
    refusals: list[DuplicateRunError] = []
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)

        async def parent(run: Run[None]) -> None:
            first = await run.start_child(scene.child)
            await first.wait_returned()
            try:
                await run.start_child(scene.child, run_id=first.id, prepare=scene.spied)
            except DuplicateRunError as error:
                refusals.append(error)

        run = await room.start(parent)
        await wait_all_tasks_blocked()
        held = room.held()
        abandon_held(room)
        outcome = await run.outcome()

    assert held == ()
    assert outcome.status is RunStatus.COMPLETED
    assert [error.run_id for error in refusals] == scene.bodies
    assert scene.spied.calls == ["construct", "dispose"]
    assert faulty.written(FenceAdmission) == []


async def test_a_stored_row_that_can_not_be_read_back_becomes_the_fence(faulty: FaultyStore) -> None:
    """R-56: if the reading fails, too, the admission is held, and reconciling turns the row into the fence; no body."""
    faulty.fail(2, Fault.LOST_REPLY, of=AdmitRun)
    faulty.fail_confirm(1, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        before = await room.load(error.run_id)
        await scene.reconcile(error.run_id)
        await scene.parent.result()

    assert before is not None
    assert before.status is RunStatus.RUNNING
    after = await faulty.load_run("main", error.run_id)
    assert after is not None
    assert (after.status, after.reason, after.admission_disposal) == (RunStatus.FAILED, "admission-failed", "discarded")
    assert (after.created_at, after.started_at) == (before.created_at, before.started_at)
    assert scene.bodies == []


async def test_reconciling_fences_before_it_disposes(faulty: FaultyStore) -> None:
    """R-57: fence, dispose, project, release, in this order, with the original id and timestamps."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        issued = faulty.written(AdmitRun)[1]
        scene.spied.dispose_waits = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.reconcile, error.run_id)
            await scene.spied.entered.wait()
            fenced = await room.load(error.run_id)
            projected_early = faulty.written(RecordDisposal)
            scene.spied.dispose_waits.set()
        await scene.parent.result()

    assert fenced is not None
    assert (fenced.status, fenced.admission_disposal) == (RunStatus.FAILED, None)
    assert projected_early == []
    (fence,) = faulty.written(FenceAdmission)
    assert fence.admission == issued  # type: ignore[attr-defined]
    assert len(faulty.written(RecordDisposal)) == 1
    assert scene.spied.calls == ["construct", "dispose"]


async def test_a_late_row_meets_the_fence(faulty: FaultyStore) -> None:
    """R-58: an initial write that arrives after the fence is refused, in every store."""
    faulty.fail(2, Fault.LATE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        await scene.reconcile(error.run_id)
        await scene.parent.result()
        (answer,) = await faulty.arrive()
        row = await room.load(error.run_id)

    assert isinstance(answer, WriteRefusedError)
    assert answer.code == "terminal-fence"
    assert row is not None
    assert (row.status, row.reason) == (RunStatus.FAILED, "admission-failed")


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY])
async def test_a_failed_fence_is_repeated_identically(faulty: FaultyStore, fault: Fault) -> None:
    """R-59: a fence that fails before or after its commit is repeated as it was; nothing is disposed before."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    faulty.fail(1, fault, of=FenceAdmission)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        first = await scene.reconcile(error.run_id)
        early = list(scene.spied.calls)
        second = await scene.reconcile(error.run_id)
        await scene.parent.result()

    assert (first.held, first.phase) == (True, LeasePhase.FENCING)
    assert early == ["construct"]
    assert second.phase is LeasePhase.RELEASED
    one, two = faulty.written(FenceAdmission)
    assert one == two


async def test_every_wrong_locator_is_refused_before_any_write(faulty: FaultyStore) -> None:
    """R-62: an open callback, a wrong lease, phase, revision or room is refused before I/O."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    leave = trio.Event()

    async def parent(run: Run[None]) -> None:
        with run.reserve() as token:
            with pytest.raises(AdmissionUncertainError):
                await run.admit(token, scene.child, prepare=scene.spied)
            scene.bodies.append(token.run_id)
            await leave.wait()

    async with open_room(faulty, name="main") as room, open_room(name="other") as other:
        scene = open_scene(room)
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        run_id = scene.bodies.pop()
        writes = len(faulty.writes)
        with pytest.raises(CallbackNotExitedError):
            await scene.reconcile(run_id)
        leave.set()
        await wait_all_tasks_blocked()
        facts = await scene.facts(run_id)
        assert facts.revision is not None
        with pytest.raises(StaleRevisionError):
            await scene.reconcile(run_id, lease_id=LeaseId(run_id))
        with pytest.raises(StaleRevisionError):
            await scene.reconcile(run_id, phase=LeasePhase.DISPOSING)
        with pytest.raises(StaleRevisionError):
            await scene.reconcile(run_id, revision=ANOTHER)
        with pytest.raises(AcknowledgeRefusedError):
            await scene.reconcile(run_id, action="acknowledge")
        with pytest.raises(ForeignRoomError):
            await reconcile_settlement(
                other, run_id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision
            )
        with pytest.raises(NotHeldError):
            await scene.reconcile(run.id)

        assert len(faulty.writes) == writes
        await scene.reconcile(run_id)
        await run.result()


async def test_one_recovery_at_a_time(faulty: FaultyStore) -> None:
    """R-63: while one recovery has the claim, another is refused; cancelling its caller changes nothing."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        facts = await scene.facts(error.run_id)
        scene.spied.dispose_waits = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.reconcile, error.run_id)
            await scene.spied.entered.wait()
            claimed = await scene.facts(error.run_id)
            with pytest.raises(RecoveryInProgressError):
                await scene.reconcile(error.run_id)
            nursery.cancel_scope.cancel()
        still = await scene.facts(error.run_id)
        scene.spied.dispose_waits.set()
        await scene.parent.result()

    assert facts.claimed is False
    assert claimed.claimed
    assert still.claimed
    assert scene.spied.calls == ["construct", "dispose"]


async def test_hold_and_lease_stand_at_one_phase_while_a_recovery_walks_on(faulty: FaultyStore) -> None:
    """R-62: at any moment `room.held()` names the phase that the lease's facts have; with it, a second one is told why."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        scene.spied.dispose_waits = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.reconcile, error.run_id)
            await scene.spied.entered.wait()
            (hold,) = room.held()
            facts = await scene.facts(error.run_id)
            try:
                await scene.reconcile(error.run_id, phase=LeasePhase(hold.phase))
            except OperatorError as refused:
                scene.errors.append(refused)
            scene.spied.dispose_waits.set()
        await scene.parent.result()

    assert (hold.phase, facts.phase) == ("disposing", LeasePhase.DISPOSING)
    assert [type(refused) for refused in scene.errors[1:]] == [RecoveryInProgressError]


async def test_a_failed_recovery_takes_a_new_revision(faulty: FaultyStore) -> None:
    """R-63: a recovery that fails holds again under a new revision; the old one is stale."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        scene.spied.answers = [Disposal.INCOMPLETE]
        error = await scene.begin()
        before = await scene.facts(error.run_id)
        after = await scene.reconcile(error.run_id)
        with pytest.raises(StaleRevisionError):
            await scene.reconcile(error.run_id, revision=before.revision)
        await scene.reconcile(error.run_id)
        await scene.parent.result()

    assert (after.phase, after.held, after.claimed) == (LeasePhase.DISPOSING, True, False)
    assert after.revision not in (None, before.revision)
    assert scene.spied.calls == ["construct", "dispose", "dispose"]


async def test_an_operator_who_is_cancelled_before_claims_nothing(faulty: FaultyStore) -> None:
    """R-63: a recovery whose caller is cancelled already isn't begun, and the hold stays as it was read."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        before = await scene.facts(error.run_id)
        assert before.revision is not None
        with trio.CancelScope() as scope:
            scope.cancel()
            await reconcile_settlement(
                room, error.run_id, lease_id=before.lease_id, phase=before.phase, revision=before.revision
            )
        await wait_all_tasks_blocked()
        after = await scene.facts(error.run_id)
        abandon_held(room)

    assert scope.cancelled_caught
    assert after == before
    assert faulty.written(FenceAdmission) == []


async def test_a_recovery_that_finds_the_room_lost_holds_nothing_again(faulty: FaultyStore) -> None:
    """R-12: a fence refused to an old owner loses the room; the hold ends with it instead of coming back."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    events: list[RoomEvent] = []
    after: list[LeaseFacts] = []

    async def scenario() -> None:
        # Shielded from the room's own cancel of its block, to see what it tells to the end.
        async with open_room(faulty, name="main") as room, room.watch() as watch:
            with trio.CancelScope(shield=True):
                scene = open_scene(room)
                error = await scene.begin()
                faulty.lose("main")
                after.append(await scene.reconcile(error.run_id))
                while not events or events[-1].name != "run.recovered":
                    events.append(await anext(watch))

    with pytest.raises(RoomOwnershipLostError):
        await scenario()

    assert [event.name for event in events if "held" in event.name] == ["run.held"]
    assert (after[0].held, after[0].phase) == (False, LeasePhase.RELEASED)


@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_a_cancelled_parent_does_not_change_the_end(faulty: FaultyStore, moment: str) -> None:
    """R-64: wherever the parent is cancelled, the recovery comes to the same end."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        if moment == "before":
            scene.parent.cancel()
        scene.spied.dispose_waits = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.reconcile, error.run_id)
            await scene.spied.entered.wait()
            if moment == "during":
                room.cancel_all()
            scene.spied.dispose_waits.set()
        if moment == "after":
            scene.parent.cancel()
        outcome = await scene.parent.outcome()

    assert outcome.status is RunStatus.COMPLETED
    row = await faulty.load_run("main", error.run_id)
    assert row is not None
    assert (row.reason, row.admission_disposal) == ("admission-failed", "discarded")


async def test_recovery_calls_nothing_but_disposals(faulty: FaultyStore) -> None:
    """R-65: no body and no constructor is called by any recovery."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    faulty.fail(1, Fault.BEFORE, of=FenceAdmission)
    faulty.fail(1, Fault.BEFORE, of=RecordDisposal)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        phases = [(await scene.reconcile(error.run_id)).phase for _ in range(3)]
        await scene.parent.result()

    assert phases == [LeasePhase.FENCING, LeasePhase.PROJECTING, LeasePhase.RELEASED]
    assert scene.spied.calls == ["construct", "dispose"]
    assert scene.bodies == []


async def test_no_run_reaches_the_operators_door(faulty: FaultyStore) -> None:
    """R-66: nothing that a Run, a token or an event exposes is an operator function; a revision alone does nothing."""
    exposed: list[object] = []

    async def parent(run: Run[None]) -> None:
        with run.reserve() as token:
            exposed.extend((run, token))

    async with open_room(faulty, name="main") as room, room.watch() as watch:
        await (await room.start(parent)).result()
        exposed.append(await anext(watch))
    doors = {getattr(spindel.operator, name) for name in spindel.operator.__all__}
    reachable = {id(getattr(thing, name)) for thing in exposed for name in dir(thing) if not name.startswith("_")}

    assert not {id(door) for door in doors} & reachable
    for door in doors:
        assert "room" in inspect.signature(door).parameters
    for thing in exposed:
        assert not any("revision" in name for name in dir(thing))


async def test_a_restart_supplies_no_authority(faulty: FaultyStore) -> None:
    """R-68: after a restart a held admission is no hold any more; a row that existed is orphaned."""
    faulty.fail(2, Fault.LOST_REPLY, of=AdmitRun)
    faulty.fail_confirm(1, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        error = await scene.begin()
        facts = await scene.facts(error.run_id)
        abandon_held(room)
    gc.collect()
    async with open_room(faulty, name="main") as room:
        assert room.held() == ()
        assert facts.revision is not None
        with pytest.raises(ForeignRoomError):
            await reconcile_settlement(
                room, error.run_id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision
            )
        row = await room.load(error.run_id)

    assert row is not None
    assert (row.status, row.reason) == (RunStatus.FAILED, "orphaned")
    assert scene.spied.calls == ["construct"]


async def test_the_parent_can_wait_for_the_lease(faulty: FaultyStore) -> None:
    """R-55: the parent's `wait_lease` ends when the held lease has been released."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    order: list[str] = []

    async def parent(run: Run[None]) -> None:
        with pytest.raises(AdmissionUncertainError) as caught:
            await run.start_child(scene.child, prepare=scene.spied)
        assert caught.value.lease_id is not None
        scene.bodies.append(caught.value.run_id)
        await run.wait_lease(caught.value.lease_id)
        order.append("released")

    async with open_room(faulty, name="main") as room:
        scene = open_scene(room)
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        order.append("reconciling")
        await scene.reconcile(scene.bodies.pop())
        await run.result()

    assert order == ["reconciling", "released"]
