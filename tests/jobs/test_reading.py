"""Seeing Jobs: one, pages of them, and waits that are cut or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import InvalidRecordError, WaitRefusedError
from spindel.jobs import Job, JobView, Stage, cancel_job, get_job, list_jobs, observe_settlement, start_job
from spindel.operator import recover, recovery_state
from spindel.runs import open_reader, open_room
from spindel.runs._frontier import frontier
from spindel.store import RunStatus
from spindel.testing.clocks import ManualWallClock
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.runs import Outcome, Room, Run
    from spindel.store import RunCursor, RunPage, RunQuery, Store


async def give(_: Run[str]) -> str:
    await trio.lowlevel.checkpoint()
    return "value"


async def fail(_: Run[None]) -> None:
    await trio.lowlevel.checkpoint()
    raise ValueError("no")


async def park(_: Run[None]) -> None:
    await trio.sleep_forever()


async def test_a_wait_is_cut_to_25_seconds(store: Store, autojump_clock: trio.testing.MockClock) -> None:
    """J-43: an unknown id gives None; a wait of 60 s returns at 25 s with what is so; a finished Job at once."""
    async with open_room(store, name="main") as room:
        job = await start_job(room, park, kind="import", actor="someone")
        assert await get_job(room, room.new_run_id(), wait_seconds=60) is None
        assert trio.current_time() == 0
        running = await get_job(room, job.id, wait_seconds=60)
        assert trio.current_time() == 25
        short = await get_job(room, job.id, wait_seconds=2)
        assert trio.current_time() == 27
        at_once = await get_job(room, job.id)
        assert trio.current_time() == 27
        job.cancel()
        await job.outcome()
        hot = await get_job(room, job.id, wait_seconds=60)
        again = await cancel_job(room, job.id, wait_seconds=60)
        assert trio.current_time() == 27
    async with open_room(store, name="main") as room:
        cold = await get_job(room, job.id, wait_seconds=60)

    assert running is not None
    assert (running.status, running.stage, running.kind, running.actor) == (
        RunStatus.RUNNING,
        Stage.WORK,
        "import",
        "someone",
    )
    assert short == at_once == running
    assert hot is not None
    assert (hot.status, hot.reason, hot.settled) == (RunStatus.CANCELLED, "cancel-requested", True)
    assert (again, cold) == (hot, hot)


async def test_a_wait_ends_at_done_and_at_a_hold(store: Store, autojump_clock: trio.testing.MockClock) -> None:
    """J-43: a wait sees a Job become done, or held, as soon as it is so, and not before its adapter is retired."""

    async def adapter(_: Outcome[str]) -> None:
        await trio.sleep(3)
        if first:
            raise first.pop()

    first = [ValueError("once")]
    async with open_room(store, name="main") as room:
        job = await start_job(room, give, on_settled=adapter)
        held = await get_job(room, job.id, wait_seconds=25)
        assert trio.current_time() == 3
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recover, room, recovery_state(room, job.id).locator, "retry")
            await wait_all_tasks_blocked()
            done = await get_job(room, job.id, wait_seconds=25)
        assert trio.current_time() == 6

    assert held is not None
    assert (held.status, held.settled, held.cleanup_stage) == (RunStatus.COMPLETED, False, Stage.ADAPTER)
    assert done is not None
    assert (done.settled, done.cleanup_required, done.stage) == (True, False, Stage.DONE)


async def test_asking_a_job_to_stop_and_waiting_for_it(store: Store) -> None:
    """J-43: `cancel_job` asks and sees the end; a finished Job stays as it is; an unknown one is None."""
    async with open_room(store, name="main") as room:
        job = await start_job(room, park)
        asked = await cancel_job(room, job.id)
        seen = await cancel_job(room, job.id, wait_seconds=25)
        done = await start_job(room, give)
        await done.outcome()
        stays = await cancel_job(room, done.id)
        nobody = await cancel_job(room, room.new_run_id())

    assert asked is not None
    assert (asked.status, asked.cancel_requested) == (RunStatus.CANCELLING, True)
    assert seen is not None
    assert (seen.status, seen.settled) == (RunStatus.CANCELLED, True)
    assert stays is not None
    assert (stays.status, stays.cancel_requested) == (RunStatus.COMPLETED, False)
    assert nobody is None


async def pages_of(room: Any, limit: int, **query: Any) -> list[JobView]:
    views: list[JobView] = []
    before: RunCursor | None = None
    while True:
        page = await list_jobs(room, before=before, limit=limit, **query)
        assert len(page.jobs) <= limit
        views.extend(page.jobs)
        before = page.next
        if before is None:
            return views


async def test_pages_are_newest_first_and_filtered_first(store: Store) -> None:
    """J-44: 45 Jobs with equal times come by pages, newest first, ties by id, without gap or double, plain Runs apart."""
    clock = ManualWallClock()
    parents: list[Run[None]] = []

    async def parent(run: Run[None]) -> None:
        parents.append(run)
        for _ in range(5):
            await start_job(run, give)
        await run.start_child(give)

    jobs: list[Job[Any]] = []
    async with open_room(store, name="main", wall_clock=clock) as room:
        for number in range(40):
            if number == 20:
                clock.advance(1)
            program: Callable[[Run[Any]], Awaitable[Any]] = fail if number % 4 == 0 else give
            jobs.append(await start_job(room, program))
            await (await room.start(give)).outcome()
        for job in jobs:
            await job.outcome()
        top = await room.start(parent)
        await top.outcome()
        everything = await pages_of(room, 7)
        failed = await pages_of(room, 3, status=RunStatus.FAILED)
        below = await pages_of(room, 2, parent=top.id)
        async with open_reader(store, name="main") as reader:
            cold = await pages_of(reader, 100)
        live = await start_job(room, park)
        (first, *_) = (await list_jobs(room, status=RunStatus.RUNNING)).jobs
        live.cancel()
        for limit in (0, 101, -1):
            with pytest.raises(InvalidRecordError):
                await list_jobs(room, limit=limit)
        with pytest.raises(InvalidRecordError):
            await list_jobs(room, status=RunStatus.CANCELLING)

    order = [(view.started_at, str(view.id)) for view in everything]
    assert len(everything) == 45
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == 45
    assert len({started_at for started_at, _ in order}) == 2
    assert all(view.settled for view in everything)
    assert [view.id for view in cold] == [view.id for view in everything]
    assert [view.id for view in failed] == [view.id for view in everything if view.status is RunStatus.FAILED]
    assert len(failed) == 10
    assert {view.parent_id for view in below} == {top.id}
    assert len(below) == 5
    assert (first.id, first.stage) == (live.id, Stage.WORK)


async def test_a_page_is_one_query_and_an_observation_one_reading(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J-44: a page of finished Jobs is read in one query; one Job, and what is proved about it, in one reading each."""
    asked: list[str] = []

    def note(name: str) -> None:
        inner = getattr(faulty, name)

        async def noted(*args: Any) -> Any:
            asked.append(name)
            return await inner(*args)

        monkeypatch.setattr(faulty, name, noted)

    async with open_room(faulty, name="main") as room:
        jobs = [await start_job(room, give) for _ in range(3)]
        for job in jobs:
            await job.outcome()
        note("load_run")
        note("list_runs")
        page = await list_jobs(room)
        view = await get_job(room, jobs[0].id)
        report = await observe_settlement(room, jobs[0].id)
        monkeypatch.undo()

    assert asked == ["list_runs", "load_run", "load_run"]
    assert [view.settled for view in page.jobs] == [True, True, True]
    assert view is not None
    assert (view.settled, report.settled) == (True, True)


@pytest.mark.parametrize("when", ["running", "completed"])
async def test_a_job_that_ends_while_its_page_is_read_is_shown_as_it_ended(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """J-44: a row that was read before its Job ended doesn't stand for it once its owner has gone."""
    go_on = trio.Event()
    list_runs = faulty.list_runs

    async def wait(_: object) -> None:
        await go_on.wait()

    async def late(query: RunQuery) -> RunPage:
        page = await list_runs(query)
        assert [row.status.value for row in page.runs] == [when]
        go_on.set()
        await job.outcome()
        return page

    async with open_room(faulty, name="main") as room:
        job: Job[Any] = await start_job(room, give, **{"before_finish" if when == "running" else "on_settled": wait})  # type: ignore[arg-type]
        await wait_all_tasks_blocked()
        monkeypatch.setattr(faulty, "list_runs", late)
        (view,) = (await list_jobs(room)).jobs
        monkeypatch.undo()

    assert (view.status, view.settled, view.stage) == (RunStatus.COMPLETED, True, None)


def waits_for(room: Room, job: Job[Any]) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "outcome": job.outcome,
        "result": job.result,
        "wait_done_or_held": job.wait_done_or_held,
        "get_job": lambda: get_job(room, job.id, wait_seconds=1),
        "cancel_job": lambda: cancel_job(room, job.id, wait_seconds=1),
    }


async def reasons_of(room: Room, job: Job[Any]) -> set[str]:
    reasons = set()
    for name, wait in waits_for(room, job).items():
        with pytest.raises(WaitRefusedError) as refused:
            await wait()
        reasons.add(refused.value.reason)
        assert not job.run.cancel_requested, f"{name} had an effect"
    return reasons


async def test_waits_that_could_never_end_are_refused(store: Store) -> None:
    """J-45: a Job that waits for itself or an ancestor is refused at once, in its callbacks too; nothing is asked."""
    told: dict[str, set[str]] = {}
    jobs: list[Job[None]] = []

    async def ask(name: str, target: int) -> None:
        told[name] = await reasons_of(room, jobs[target])

    async def child(_: Run[None]) -> None:
        await ask("ancestor", 0)

    async def core(_: Outcome[None]) -> None:
        await ask("own callback", 0)

    async def work(run: Run[None]) -> None:
        await started.wait()
        await ask("self", 0)
        # A wait of no length is none.
        assert await get_job(room, run.id) is not None
        await start_job(run, child)

    started = trio.Event()
    async with open_room(store, name="main") as room:
        jobs.append(await start_job(room, work, before_finish=core))
        started.set()
        await jobs[0].outcome()

    assert told == {"self": {"self"}, "ancestor": {"self"}, "own callback": {"self"}}


@pytest.mark.parametrize("reason", ["room-gate", "host-line"])
async def test_waits_under_a_frontier_are_refused(store: Store, reason: str) -> None:
    """J-45: who holds an exclusive stretch waits for no Job, living or done, and asks none to stop by the way."""
    async with open_room(store, name="main") as room:
        live = await start_job(room, park)
        done = await start_job(room, give)
        await done.outcome()
        with frontier(reason):
            told = [await reasons_of(room, job) for job in (live, done)]
            seen = await get_job(room, live.id)
        live.cancel()

    assert told == [{reason}, {reason}]
    assert seen is not None
    assert seen.status is RunStatus.RUNNING
