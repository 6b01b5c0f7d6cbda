"""A hold while somebody recovers it, and what its ancestors, its room and its waiters are told meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.control._holds import recover_held
from spindel.control._wire import RecoverHeld
from spindel.errors import (
    AcknowledgeRefusedError,
    NotHeldError,
    RoomCloseRefusedError,
    RoomOwnershipLostError,
    RunAbandonedError,
    StageHeldError,
)
from spindel.jobs import Job, Stage, get_job, list_jobs, observe_settlement, start_job
from spindel.observe import RoomEvent, RunFinished, RunHeld, RunRecovered
from spindel.operator import abandon_held, recover, recovery_state
from spindel.runs import WitnessFact, open_room
from spindel.runs._holds import Hold, Holds
from spindel.runs._states import HoldKind
from spindel.store import FinishRun
from spindel.testing.faults import Fault, FaultyStore
from tests.jobs.adapters import Adapter, give, open_main, park, recover_now, wait_held
from tests.runs.test_launch_recovery import FlakyExecutor

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.runs import Outcome, Room, RoomWatch, Run


async def told_until_finished(watch: RoomWatch) -> list[tuple[object, ...]]:
    """Give what the events tell of holds, until the first Run has finished."""
    found: list[tuple[object, ...]] = []
    event: RoomEvent
    async for event in watch:
        if isinstance(event, RunHeld):
            found.append(("held", event.phase, event.code, event.again))
        elif isinstance(event, RunRecovered):
            found.append(("recovered", event.phase, event.action))
        elif isinstance(event, RunFinished):
            break
    return found


async def test_a_failed_retry_has_recovered_nothing(faulty: FaultyStore) -> None:
    """J-20: a retry that fails is told as held again; recovered is said once, of the retry that passed."""
    adapter = Adapter(core_errors=[ValueError("first"), KeyError("second")])
    async with open_main(faulty) as room, room.watch() as watch:
        job = await adapter.start(room, give)
        await wait_held(job)
        since = recovery_state(room, job.id).held_since
        with pytest.raises(StageHeldError):
            await recover_now(room, job, "retry")
        assert recovery_state(room, job.id).held_since == since
        await recover_now(room, job, "retry")
        await job.outcome()

        assert await told_until_finished(watch) == [
            ("held", "core", "ValueError", False),
            ("held", "core", "KeyError", True),
            ("recovered", "core", "retry"),
        ]


async def test_a_refused_acknowledgement_has_recovered_nothing(faulty: FaultyStore) -> None:
    """J-23: an attestation that is refused is told as held again, for the original error."""
    faulty.fail(1, Fault.BEFORE, of=FinishRun)
    async with open_main(faulty) as room, room.watch() as watch:
        job = await start_job(room, give)
        await wait_held(job)
        with pytest.raises(AcknowledgeRefusedError):
            await recover_now(room, job, "acknowledge")
        await recover_now(room, job, "retry")
        await job.outcome()

        assert await told_until_finished(watch) == [
            ("held", "terminal", "WriteUncertainError", False),
            ("held", "terminal", "WriteUncertainError", True),
            ("recovered", "terminal", "retry"),
        ]


@pytest.mark.parametrize("again", [False, True])
async def test_a_stage_stays_in_the_rooms_book_while_it_is_recovered(faulty: FaultyStore, again: bool) -> None:
    """J-21: while its retry runs it keeps the room by name, needs nobody else, and giving up leaves it to its retry."""
    adapter = Adapter(core_errors=[ValueError("first")])
    async with open_main(faulty) as room, trio.open_nursery() as nursery:
        job = await adapter.start(room, give)
        await wait_held(job)
        (before,) = room.held()
        adapter.core_gate = trio.Event()
        if again:
            adapter.core_errors.append(ValueError("second"))
        locator = recovery_state(room, job.id).locator

        async def retry() -> None:
            if again:
                with pytest.raises(StageHeldError):
                    await recover(room, locator, "retry")
            else:
                await recover(room, locator, "retry")

        nursery.start_soon(retry)
        await wait_all_tasks_blocked()
        calls, held, view, given_up = list(adapter.calls), room.held(), job.view(), abandon_held(room)
        with pytest.raises(RoomCloseRefusedError) as refused:
            await room.close(grace_seconds=0)
        with pytest.raises(NotHeldError):
            recovery_state(room, job.id)
        adapter.core_gate.set()
        if again:
            assert (await wait_held(job)).cleanup_stage is Stage.CORE
            await recover_now(room, job, "acknowledge")
        await job.outcome()

        assert calls == ["core", "core"]
        assert held == refused.value.held == (before,)
        assert (view.cleanup_required, given_up) == (False, ())
        assert room.held() == ()
        assert (await observe_settlement(room, job.id)).settled


@pytest.mark.parametrize("when", ["held", "retried and fails", "retried and passes"])
async def test_waiters_of_a_held_job_are_told_that_its_room_was_lost(faulty: FaultyStore, when: str) -> None:
    """J-46: a room lost while a stage is held, or retried, ends the Job as lost, not as given up by an operator."""
    adapter = Adapter(core_errors=[ValueError("first")])
    told: list[type[BaseException]] = []

    async def ask(what: Any, *args: object) -> None:
        try:
            await what(*args)
        except RoomOwnershipLostError as error:
            told.append(type(error))

    async def scenario(nursery: trio.Nursery) -> None:
        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, give)
            with trio.CancelScope(shield=True):
                await wait_held(job)
                nursery.start_soon(ask, job.outcome)
                nursery.start_soon(ask, job.result)
                if when != "held":
                    adapter.core_gate = trio.Event()
                    if when == "retried and fails":
                        adapter.core_errors.append(ValueError("second"))
                    nursery.start_soon(ask, recover, room, recovery_state(room, job.id).locator, "retry")
                    await wait_all_tasks_blocked()
                room.lose()
                if adapter.core_gate is not None:
                    adapter.core_gate.set()

    async with trio.open_nursery() as nursery:
        with pytest.raises(RoomOwnershipLostError):
            await scenario(nursery)

    assert len(told) == (2 if when != "retried and fails" else 3)
    assert adapter.calls == (["core"] if when == "held" else ["core", "core"])


async def test_a_parent_of_a_held_job_is_told_that_its_room_was_lost(faulty: FaultyStore) -> None:
    """J-46: a Job whose join waits for a held one ends as lost with its room, too."""
    adapter = Adapter(core_errors=[ValueError("first")])
    parents: list[Job[Any]] = []

    async def top(run: Run[None]) -> None:
        await adapter.start(run, give)

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            parents.append(await start_job(room, top))
            await wait_held(parents[0])
            room.lose()

    with pytest.raises(RoomOwnershipLostError):
        await scenario()

    with pytest.raises(RoomOwnershipLostError):
        await parents[0].outcome()


async def test_work_goes_on_whatever_is_held_below_it(faulty: FaultyStore) -> None:
    """J-31: a Job still at work isn't held by its held child; once its work is over it is, and waiters are told then."""
    adapter = Adapter(core_errors=[ValueError("first")])
    go_on = trio.Event()
    children: list[Job[Any]] = []
    seen: list[Stage | None] = []

    async def top(run: Run[None]) -> None:
        children.append(await adapter.start(run, give))
        await go_on.wait()

    async def wait(job: Job[Any]) -> None:
        seen.append((await job.wait_done_or_held()).cleanup_stage)

    async with open_main(faulty) as room, trio.open_nursery() as nursery:
        parent = await start_job(room, top)
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, parent)
        await wait_all_tasks_blocked()
        view = parent.view()
        assert children[0].view().cleanup_stage is Stage.CORE
        assert (view.stage, view.cleanup_required, view.cleanup_stage) == (Stage.WORK, False, None)
        assert (view.blocked_by, seen) == ((), [])
        go_on.set()
        await wait_all_tasks_blocked()
        assert seen == [Stage.FAMILY_JOIN]
        assert parent.view().blocked_by == (children[0].id,)
        await recover_now(room, children[0], "acknowledge")
        await parent.outcome()


async def test_a_family_that_nobody_vouched_for_is_not_called_settled(faulty: FaultyStore) -> None:
    """J-41: without the family's witness a finished Job isn't settled, for whoever looks, from memory or from its row."""
    async with open_main(faulty) as room:
        job = await start_job(room, park)
        job.run._entry.family_version = None
        job.cancel()
        await job.outcome()
        report = await observe_settlement(room, job.id)
        view = await get_job(room, job.id)

    assert (report.family, report.core, report.adapter) == (WitnessFact.ABSENT, WitnessFact.VALID, WitnessFact.VALID)
    assert view is not None
    assert (report.settled, view.settled, job.view().settled) == (False, False, False)


async def test_who_waits_for_what_is_being_recovered_needs_nobody_else(faulty: FaultyStore) -> None:
    """J-31: while a held child is retried its parent isn't in need; a retry that fails wakes the parent's waiters."""
    adapter = Adapter(core_errors=[ValueError("first"), ValueError("second")])
    children: list[Job[Any]] = []
    seen: list[tuple[RunId, ...]] = []

    async def top(run: Run[None]) -> None:
        children.append(await adapter.start(run, give))

    async def retry(room: Room) -> None:
        with pytest.raises(StageHeldError):
            await recover_now(room, children[0], "retry")

    async def wait(job: Job[Any]) -> None:
        seen.append((await job.wait_done_or_held()).blocked_by)

    async with open_main(faulty) as room, trio.open_nursery() as nursery:
        parent = await start_job(room, top)
        await wait_held(parent)
        adapter.core_gate = trio.Event()
        nursery.start_soon(retry, room)
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, parent)
        await wait_all_tasks_blocked()
        view, early = parent.view(), list(seen)
        adapter.core_gate.set()
        await wait_all_tasks_blocked()
        assert (view.cleanup_required, view.blocked_by, early) == (False, (), [])
        assert seen == [(children[0].id,)]
        await recover_now(room, children[0], "acknowledge")
        await parent.outcome()


async def test_a_hold_wakes_only_those_whom_it_concerns(faulty: FaultyStore) -> None:
    """J-31: of very many waiters a hold wakes those of its own Run and of the Runs above it, and no others."""
    adapter = Adapter(core_errors=[ValueError("first")])
    go_on = trio.Event()
    children: list[Job[Any]] = []

    async def middle(run: Run[None]) -> None:
        await go_on.wait()
        children.append(await adapter.start(run, give))

    async def top(run: Run[None]) -> None:
        children.append(await start_job(run, middle))

    async with open_main(faulty) as room:
        parent = await start_job(room, top)
        other = await start_job(room, park)
        await wait_all_tasks_blocked()
        concerned = [room.holds.changed_at(job.run._entry) for job in (parent, *children)]
        unconcerned = room.holds.changed_at(other.run._entry)
        assert room.holds.changed_at(other.run._entry) is unconcerned
        go_on.set()
        await wait_held(parent)
        assert [event.is_set() for event in concerned] == [True, True]
        assert not unconcerned.is_set()
        await recover_now(room, children[-1], "acknowledge")
        other.cancel()
        await parent.outcome()


async def test_nobody_searches_all_holds_for_those_of_one_job(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J-31: seeing, listing, waiting for and recovering one Job looks at its own holds, however many others there are."""
    adapter = Adapter(core_errors=[ValueError(f"{number}") for number in range(5)])
    children: list[Job[Any]] = []

    def search(holds: Holds) -> NoReturn:
        raise AssertionError("all holds were looked at")

    async def top(run: Run[None]) -> None:
        for _ in range(5):
            children.append(await adapter.start(run, give))  # noqa: PERF401  started one after the other

    async with open_main(faulty) as room:
        parent = await start_job(room, top)
        await wait_held(parent)
        monkeypatch.setattr(Holds, "facts", search)
        monkeypatch.setattr(Holds, "present", search)
        assert set(parent.view().blocked_by) == {child.id for child in children}
        assert (await get_job(room, parent.id, wait_seconds=5)) == parent.view()
        assert len((await list_jobs(room)).jobs) == 6
        for child in children[1:]:
            await recover_now(room, child, "acknowledge")
        hold = room.holds.of(children[0].run._entry, HoldKind.STAGE)
        assert hold is not None
        assert (await recover_held(room, asked_for(hold))).held is None
        await parent.outcome()
        monkeypatch.undo()


async def test_what_was_given_up_is_named_by_nobody_any_more(faulty: FaultyStore) -> None:
    """J-46: Runs above what is being recovered stay until it is over, also when given up; then no book names any of it."""
    go_on, published = trio.Event(), trio.Event()
    calls: list[int] = []

    async def publish(_: Outcome[object]) -> None:
        calls.append(len(calls))
        if calls == [0]:
            raise ValueError("first")
        await published.wait()

    async def middle(run: Run[None]) -> None:
        await run.start_child(give, publish=publish)
        await go_on.wait()

    async def top(run: Run[None]) -> None:
        await start_job(run, middle)
        await go_on.wait()

    async with open_main(faulty) as room, trio.open_nursery() as nursery:
        job = await start_job(room, top)
        await wait_all_tasks_blocked()
        (hold,) = room.holds.present()
        nursery.start_soon(recover_held, room, asked_for(hold))
        await wait_all_tasks_blocked()
        room.pool.tasks = FlakyExecutor(room.pool.tasks, fail_submit=2)
        go_on.set()
        await wait_held(job)
        given_up = abandon_held(room)
        await wait_all_tasks_blocked()
        claimed = room.held()
        with pytest.raises(trio.WouldBlock):
            job.run.outcome_nowait()
        published.set()
        await wait_all_tasks_blocked()
        with pytest.raises(RunAbandonedError):
            await job.outcome()

        assert [given.phase for given in given_up] == ["join", "join"]
        assert [left.phase for left in claimed] == ["publishing"]
        assert (room.held(), room.holds._of, room.holds._below) == ((), {}, {})
    assert calls == [0, 1]


def asked_for(hold: Hold) -> RecoverHeld:
    return RecoverHeld(run_id=hold.entry.run_id, stage=hold.phase, revision=hold.revision, action="retry")


async def test_new_holds_are_told_apart_from_those_that_came_before(faulty: FaultyStore) -> None:
    """J-31: what came after a given hold is found, whichever of the earlier ones have ended or have changed."""
    adapter = Adapter(core_errors=[ValueError(f"{number}") for number in range(5)])
    async with open_main(faulty) as room:
        jobs: list[Job[Any]] = []
        for _ in range(3):
            jobs.append(await adapter.start(room, give))
            await wait_held(jobs[-1])
        first, second, third = room.holds.after(0)
        with pytest.raises(StageHeldError):
            await recover_now(room, jobs[0], "retry")
        await recover_now(room, jobs[1], "acknowledge")
        later = room.holds.after(second.number)
        everything, nothing = room.holds.after(0), room.holds.after(third.number)
        for job in (jobs[0], jobs[2]):
            await recover_now(room, job, "acknowledge")

        assert later == (third,)
        assert everything == (first, third)
        assert nothing == ()
