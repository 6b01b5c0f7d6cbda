"""Held stages together with families, cancelling, interrupts and operators who race each other."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import UUID

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AcknowledgeRefusedError,
    AdmissionUncertainError,
    NotHeldError,
    RecoveryInProgressError,
    RoomCloseRefusedError,
    RoomOwnershipLostError,
    RunAbandonedError,
    StageHeldError,
    StaleRevisionError,
    WriteUncertainError,
)
from spindel.ids import Revision, RunId
from spindel.jobs import HoldLocator, Job, Observation, Stage, observe_settlement, start_job
from spindel.operator import abandon_held, recover, recovery_state
from spindel.runs import Presence, WitnessFact, open_room
from spindel.store import AdmitRun, AppendWitnesses, FinishRun, RunStatus
from spindel.testing.faults import Fault, FaultyStore
from tests.runs.test_launch_recovery import FlakyExecutor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.jobs import JobView
    from spindel.runs import Outcome, Room, Run


@attrs.define
class Callback:
    """A callback that counts its calls, and fails or waits when told to."""

    errors: list[BaseException] = attrs.Factory(list)
    calls: list[Outcome[Any]] = attrs.Factory(list)
    go_on: trio.Event | None = None

    async def __call__(self, outcome: Outcome[Any]) -> None:
        self.calls.append(outcome)
        await trio.lowlevel.checkpoint()
        if self.go_on is not None:
            await self.go_on.wait()
        if self.errors:
            raise self.errors.pop(0)


async def give(_: Run[str]) -> str:
    await trio.lowlevel.checkpoint()
    return "value"


async def park(_: Run[Any]) -> None:
    await trio.sleep_forever()


def locator_of(room: Room, job: Job[Any]) -> HoldLocator:
    return recovery_state(room, job.id).locator


async def held(job: Job[Any]) -> JobView:
    view = await job.wait_done_or_held()
    assert view.cleanup_required
    return view


async def test_a_cancelled_operator_ends_only_its_own_wait(faulty: FaultyStore) -> None:
    """J-30: a retry whose caller is cancelled goes on in the Job's own task, and no callback that passed repeats."""
    core, adapter = Callback(), Callback()
    faulty.fail(1, Fault.REFUSED, of=FinishRun)
    async with open_room(faulty, name="main") as room:
        job = await start_job(room, give, before_finish=core, on_settled=adapter)
        view = await held(job)
        assert view.cleanup_stage is Stage.TERMINAL
        slow = faulty.hold(of=FinishRun)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recover, room, locator_of(room, job), "retry")
            await slow.wait_reached()
            nursery.cancel_scope.cancel()
        assert job.view().stage is Stage.TERMINAL
        slow.release()

        assert await job.result() == "value"
        assert (len(core.calls), len(adapter.calls)) == (1, 1)
        assert (await observe_settlement(room, job.id)).settled


async def test_an_operator_who_is_cancelled_already_changes_nothing(faulty: FaultyStore) -> None:
    """J-30: a recovery in a cancelled scope is refused before it claims anything."""
    core = Callback([ValueError("once")])
    async with open_room(faulty, name="main") as room:
        job = await start_job(room, give, before_finish=core)
        await held(job)
        locator = locator_of(room, job)
        with trio.CancelScope() as scope:
            scope.cancel()
            await recover(room, locator, "retry")
        assert scope.cancelled_caught
        assert locator_of(room, job) == locator
        assert len(core.calls) == 1

        assert (await recover(room, locator, "retry")).id == job.id
        assert await job.result() == "value"


async def test_a_held_grandchild_is_named_by_both_ancestors(faulty: FaultyStore) -> None:
    """J-31: ancestors are shown as held at family-join and name the one to recover; they settle after it."""
    core = Callback([ValueError("once")])
    jobs: list[Job[Any]] = []

    async def middle(run: Run[None]) -> None:
        jobs.append(await start_job(run, give, before_finish=core))

    async def top(run: Run[None]) -> None:
        jobs.append(await start_job(run, middle))

    async with open_room(faulty, name="main") as room:
        parent = await start_job(room, top)
        view = await parent.wait_done_or_held()
        child, grandchild = jobs
        views = [view, await child.wait_done_or_held()]
        assert [seen.stage for seen in views] == [Stage.FAMILY_JOIN, Stage.FAMILY_JOIN]
        assert [seen.cleanup_stage for seen in views] == [Stage.FAMILY_JOIN, Stage.FAMILY_JOIN]
        assert [seen.blocked_by for seen in views] == [(grandchild.id,), (grandchild.id,)]
        assert all(seen.cleanup_required and not seen.settled for seen in views)
        for ancestor in (parent, child):
            with pytest.raises(NotHeldError) as refused:
                recovery_state(room, ancestor.id)
            assert refused.value.blocked_by == (grandchild.id,)
        await recover(room, locator_of(room, grandchild), "retry")
        for job in (parent, child, grandchild):
            await job.outcome()
            assert job.view().blocked_by == ()

            assert (await observe_settlement(room, job.id)).settled


async def test_at_most_twenty_are_named(faulty: FaultyStore) -> None:
    """J-31: a Job that waits for very many held ones names twenty of them."""

    async def fail(_: Outcome[Any]) -> None:
        raise ValueError("again and again")

    async def top(run: Run[None]) -> None:
        for _ in range(25):
            await start_job(run, give, before_finish=fail)

    async with open_room(faulty, name="main") as room:
        parent = await start_job(room, top)
        await wait_all_tasks_blocked()
        view = parent.view()
        for held_one in room.held():
            await recover(room, recovery_state(room, held_one.run_id).locator, "acknowledge")
        await parent.outcome()

        assert len(set(view.blocked_by)) == 20


def make_flaky(room: Room, **failures: Any) -> FlakyExecutor:
    flaky = FlakyExecutor(room.pool.tasks, **failures)
    room.pool.tasks = flaky
    return flaky


async def test_a_join_that_failed_is_joined_anew(faulty: FaultyStore) -> None:
    """J-32: a join that failed on its worker is held at family-join; a retry makes a new one."""
    core = Callback()
    released = trio.Event()

    async def wait(_: Run[None]) -> None:
        await released.wait()

    async def top(run: Run[str]) -> str:
        await run.start_child(wait)
        return "value"

    async with open_room(faulty, name="main") as room:
        flaky = make_flaky(room, results=2, result=OSError("the worker died"))
        job = await start_job(room, top, before_finish=core)
        view = await held(job)
        assert (view.cleanup_stage, view.status) == (Stage.FAMILY_JOIN, RunStatus.RUNNING)
        first = recovery_state(room, job.id)
        assert isinstance(first.error, OSError)
        with pytest.raises(AcknowledgeRefusedError):
            await recover(room, first.locator, "acknowledge")
        second = recovery_state(room, job.id)
        assert second.error is first.error
        with pytest.raises(StaleRevisionError):
            await recover(room, first.locator, "retry")
        with pytest.raises(StageHeldError) as again:
            await recover(room, second.locator, "retry")
        assert again.value.locator == locator_of(room, job)
        assert core.calls == []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recover, room, again.value.locator, "retry")
            await wait_all_tasks_blocked()
            with pytest.raises(RecoveryInProgressError):
                await recover(room, again.value.locator, "retry")
            with pytest.raises(StaleRevisionError):
                await recover(room, second.locator, "retry")
            assert not job.view().cleanup_required
            released.set()

        assert await job.result() == "value"
        assert len(core.calls) == 1
        assert len({launch.id for launch in flaky.launches}) == 1


async def test_a_family_that_has_gone_may_be_attested(faulty: FaultyStore) -> None:
    """J-32: an acknowledgement of a held join is refused with a child alive, and accepted once none is left."""
    released = trio.Event()

    async def wait(_: Run[None]) -> None:
        await released.wait()

    async def top(run: Run[str]) -> str:
        await run.start_child(wait)
        return "value"

    async with open_room(faulty, name="main") as room:
        make_flaky(room, fail_submit=1)
        job = await start_job(room, top)
        await held(job)
        with pytest.raises(AcknowledgeRefusedError):
            await recover(room, locator_of(room, job), "acknowledge")
        released.set()
        await wait_all_tasks_blocked()
        view = await recover(room, locator_of(room, job), "acknowledge")
        assert view.stage not in (None, Stage.WORK, Stage.FAMILY_JOIN)

        assert await job.result() == "value"
        assert (await observe_settlement(room, job.id)).settled


async def test_a_family_of_which_something_was_given_up_is_not_attested(faulty: FaultyStore) -> None:
    """J-32: with an admission below given up nobody knows that the family returned, though nothing of it is left."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    given_up, released = trio.Event(), trio.Event()

    async def wait(_: Run[None]) -> None:
        await released.wait()

    async def top(run: Run[str]) -> str:
        with suppress(AdmissionUncertainError):
            await run.start_child(give)
        await run.start_child(wait)
        await given_up.wait()
        return "value"

    async with open_room(faulty, name="main") as room:
        make_flaky(room, results=1, result=OSError("the worker died"))
        job = await start_job(room, top)
        await wait_all_tasks_blocked()
        (admission,) = abandon_held(room)
        given_up.set()
        await held(job)
        released.set()
        await wait_all_tasks_blocked()
        with pytest.raises(AcknowledgeRefusedError):
            await recover(room, locator_of(room, job), "acknowledge")
        with pytest.raises(RunAbandonedError):
            await recover(room, locator_of(room, job), "retry")
        with pytest.raises(RunAbandonedError):
            await job.result()
        row = await room.load(job.id)

    assert admission.phase == "starting"
    assert row is not None
    assert (row.status, row.family_return_ack) == (RunStatus.RUNNING, None)


async def test_an_attested_join_still_decides(faulty: FaultyStore) -> None:
    """J-32: what follows the join isn't skipped by attesting it: outcome and result are decided all the same."""

    def result_of(_: Outcome[Any]) -> Any:
        raise errors.pop()

    errors: list[BaseException] = [ValueError("unreadable"), KeyboardInterrupt()]
    offer, experiment = UUID(int=1), UUID(int=2)

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            observation: Observation[str] = Observation(offer, experiment, result_of)
            job = await start_job(room, give, observation=observation, on_child_failure="cancel")
            jobs.append(job)
            with trio.CancelScope(shield=True):
                await held(job)
                await recover(room, locator_of(room, job), "acknowledge")
                await job.outcome()

    jobs: list[Job[str]] = []
    with pytest.raises(KeyboardInterrupt):
        await scenario()

    view = jobs[0].view()
    assert (view.status, view.result_state, view.scorecard) == (RunStatus.COMPLETED, "unavailable", None)
    assert (view.offer, view.experiment) == (offer, experiment)


@pytest.mark.parametrize("where", ["core", "adapter"])
async def test_an_interrupt_in_a_callback_holds_the_stage_and_is_raised_by_the_room(
    faulty: FaultyStore, where: str
) -> None:
    """J-33: a KeyboardInterrupt in a callback holds its stage, cancels the Runs, and is raised once recovered."""
    callback = Callback([KeyboardInterrupt()])
    other: list[Run[None]] = []
    jobs: list[Job[str]] = []

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            other.append(await room.start(park))
            job = await start_job(
                room,
                give,
                **{"before_finish" if where == "core" else "on_settled": callback},  # type: ignore[arg-type]
            )
            jobs.append(job)
            with trio.CancelScope(shield=True):
                view = await held(job)
                assert view.cleanup_stage == where
                await other[0].wait_returned()
                await recover(room, locator_of(room, job), "retry")
                await job.outcome()

    with pytest.raises(KeyboardInterrupt):
        await scenario()

    assert other[0].status is RunStatus.CANCELLED
    assert jobs[0].view().status is RunStatus.COMPLETED
    assert jobs[0].view().settled
    assert len(callback.calls) == 2


async def test_an_abandoned_job_ends_without_a_witness(faulty: FaultyStore) -> None:
    """J-46: giving up a held Job ends the block; its waiters are told, and the next owner adopts it as an orphan."""
    core, adapter = Callback([ValueError("stuck")]), Callback()
    told: list[BaseException] = []

    async def ask(wait: Callable[[], Awaitable[object]]) -> None:
        try:
            await wait()
        except RunAbandonedError as error:
            told.append(error)

    async with trio.open_nursery() as nursery, open_room(faulty, name="main") as room:
        job = await start_job(room, give, key="k", before_finish=core, on_settled=adapter)
        nursery.start_soon(ask, job.outcome)
        nursery.start_soon(ask, job.result)
        await held(job)
        with pytest.raises(RoomCloseRefusedError):
            await room.close(grace_seconds=0)
        (given_up,) = abandon_held(room)
        assert (given_up.run_id, given_up.phase) == (job.id, "core")
        view = await job.wait_done_or_held()
        assert (view.settled, view.cleanup_required) == (False, False)
    row = await faulty.load_run("main", job.id)
    async with open_room(faulty, name="main") as room:
        report = await observe_settlement(room, job.id)

    assert len(told) == 2
    assert (len(core.calls), adapter.calls) == (1, [])
    assert row is not None
    assert (row.status, row.family_return_ack, row.job_core_cleanup_ack) == (RunStatus.RUNNING, None, None)
    assert report.outcome is not None
    assert (report.outcome.status, report.outcome.reason, report.settled) == (RunStatus.FAILED, "orphaned", False)
    assert (report.family, report.core, report.adapter) == (WitnessFact.ABSENT,) * 3
    assert faulty.written(AppendWitnesses) == []


async def test_of_two_recoveries_one_claims_it(faulty: FaultyStore) -> None:
    """J-21: while a retried callback runs, any other recovery of that hold is refused as under way."""
    core = Callback([ValueError("once")])
    async with open_room(faulty, name="main") as room:
        job = await start_job(room, give, before_finish=core)
        await held(job)
        locator = locator_of(room, job)
        core.go_on = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recover, room, locator, "retry")
            await wait_all_tasks_blocked()
            assert len(core.calls) == 2
            for action in ("retry", "acknowledge"):
                with pytest.raises(RecoveryInProgressError):
                    await recover(room, locator, action)
            with pytest.raises(StaleRevisionError):
                await recover(room, attrs.evolve(locator, revision=Revision(UUID(int=7))), "retry")
            with pytest.raises(NotHeldError):
                recovery_state(room, job.id)
            core.go_on.set()

        assert await job.result() == "value"
        assert len(core.calls) == 2


@pytest.mark.parametrize("error", [RunAbandonedError(RunId(UUID(int=1))), RoomOwnershipLostError("other", 3)])
@pytest.mark.parametrize("where", ["before_finish", "on_settled"])
async def test_a_callback_that_met_another_runs_end_holds_its_stage(
    faulty: FaultyStore, error: Exception, where: str
) -> None:
    """J-17: what a callback raises about another Run or room is its own failure, and never ends the Job unheld."""
    callback = Callback([error])
    async with open_room(faulty, name="main") as room:
        job = await start_job(room, give, **{where: callback})  # type: ignore[arg-type]
        await held(job)
        state = recovery_state(room, job.id)
        assert state.error is error
        await recover(room, state.locator, "retry")

        assert await job.result() == "value"
        assert (await observe_settlement(room, job.id)).settled


async def test_a_lost_room_calls_no_callback(faulty: FaultyStore) -> None:
    """J-12: once a newer owner has the room nothing is called, written or claimed for a Job, and its waiters know."""
    core, adapter = Callback(), Callback()
    told: list[BaseException] = []
    jobs: list[Job[None]] = []

    async def ask(job: Job[None]) -> None:
        try:
            await job.outcome()
        except RoomOwnershipLostError as error:
            told.append(error)

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            jobs.append(await start_job(room, park, before_finish=core, on_settled=adapter))
            nursery.start_soon(ask, jobs[0])
            await wait_all_tasks_blocked()
            room.lose()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        with pytest.raises(RoomOwnershipLostError):
            await scenario()

    assert (core.calls, adapter.calls) == ([], [])
    assert len(told) == 1
    assert faulty.written((AppendWitnesses, FinishRun)) == []
    assert not jobs[0].view().settled


async def test_a_room_that_is_lost_while_the_outcome_is_stored_calls_no_adapter(faulty: FaultyStore) -> None:
    """J-46: an outcome that was still stored stays, and all the same nothing is called for it or said of it any more."""
    core, adapter = Callback(), Callback()
    slow = faulty.hold(of=FinishRun)
    jobs: list[Job[str]] = []

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            jobs.append(await start_job(room, give, before_finish=core, on_settled=adapter))
            await slow.wait_reached()
            room.lose()
            slow.release()
            await trio.sleep_forever()

    with pytest.raises(RoomOwnershipLostError):
        await scenario()
    with pytest.raises(RoomOwnershipLostError):
        await jobs[0].outcome()
    row = await faulty.load_run("main", jobs[0].id)

    assert row is not None
    assert (row.status, row.job_adapter_cleanup_ack) == (RunStatus.COMPLETED, None)
    assert (len(core.calls), adapter.calls) == (1, [])
    assert not jobs[0].view().settled


async def test_a_held_stage_of_a_lost_room_ends_when_it_is_taken_up(faulty: FaultyStore) -> None:
    """J-46: a stage that was held when its room was lost calls nothing any more, whatever an operator asks."""
    core = Callback([ValueError("stuck")])

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            job = await start_job(room, give, before_finish=core)
            await held(job)
            room.lose()
            with trio.CancelScope(shield=True), pytest.raises(RoomOwnershipLostError):
                await recover(room, locator_of(room, job), "retry")

    with pytest.raises(RoomOwnershipLostError):
        await scenario()

    assert len(core.calls) == 1


async def test_the_lease_of_a_held_adapter_is_seen(faulty: FaultyStore) -> None:
    """J-37: with the adapter held the outcome is stored, two witnesses are there, lease and owner live: unsettled."""
    adapter = Callback([ValueError("stuck")])
    async with open_room(faulty, name="main") as room:
        job = await start_job(room, give, on_settled=adapter)
        await held(job)
        report = await observe_settlement(room, job.id)
        await recover(room, locator_of(room, job), "acknowledge")
        await job.outcome()
        after = await observe_settlement(room, job.id)

    assert (report.family, report.core, report.adapter) == (WitnessFact.VALID, WitnessFact.VALID, WitnessFact.ABSENT)
    assert (report.lease, report.owner, report.settled) == (Presence.PRESENT, Presence.PRESENT, False)
    assert (after.adapter, after.lease, after.owner, after.settled) == (
        WitnessFact.VALID,
        Presence.ABSENT,
        Presence.ABSENT,
        True,
    )
    assert len(adapter.calls) == 1


async def test_a_locator_names_one_form_of_one_stage(faulty: FaultyStore) -> None:
    """J-20: another stage, opening or revision is stale; a refused attestation has a new form, and the old error."""
    core = Callback()
    faulty.fail(1, Fault.BEFORE, of=AppendWitnesses)
    async with open_room(faulty, name="main") as room:
        job = await start_job(room, give, before_finish=core)
        await held(job)
        first = recovery_state(room, job.id)
        others = (
            attrs.evolve(first.locator, stage=Stage.TERMINAL),
            attrs.evolve(first.locator, incarnation=UUID(int=7)),
            attrs.evolve(first.locator, revision=Revision(UUID(int=7))),
        )
        stale: list[HoldLocator] = []
        for locator in others:
            with suppress(StaleRevisionError):
                await recover(room, locator, "retry")
                stale.append(locator)
        with pytest.raises(AcknowledgeRefusedError):
            await recover(room, first.locator, "acknowledge")
        second = recovery_state(room, job.id)
        await recover(room, second.locator, "retry")
        await job.outcome()

    assert stale == []
    assert isinstance(first.error, WriteUncertainError)
    assert second.error is first.error
    assert second.locator.revision != first.locator.revision
    assert len(core.calls) == 1
