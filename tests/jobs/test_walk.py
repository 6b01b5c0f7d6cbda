"""The walk of a Job that nothing hinders: its outcome, its stages, their contexts, and who is woken when."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any
from uuid import UUID

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import RoomCloseRefusedError, RunCancelledError, RunFailedError, RunWaiting, RunWaitingError
from spindel.ids import WitnessStage, witness_id
from spindel.jobs import (
    Job,
    JobView,
    Observation,
    Stage,
    cancel_job,
    find_job,
    get_job,
    list_jobs,
    observe_settlement,
    start_job,
)
from spindel.observe import Emitter, RoomEvent, RunFinished
from spindel.operator import abandon_held
from spindel.runs import Outcome, Presence, Room, Run, current_run, open_room
from spindel.store import AdmitRun, AppendWitnesses, FinishRun, RunRecord, RunStatus
from spindel.testing.faults import FaultyStore
from tests.jobs.adapters import Adapter, give, open_main, park, recover_now, row_of, wait_held

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from trio.testing import MockClock

    from spindel.store import Mutation

place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")
OFFER, EXPERIMENT, SCORECARD = UUID(int=1), UUID(int=2), UUID(int=3)


def witnesses(row: RunRecord) -> str:
    """Tell which witnesses a row has, each checked, as `fca`."""
    found = ""
    for letter, stage, value in (
        ("f", WitnessStage.FAMILY_RETURN, row.family_return_ack),
        ("c", WitnessStage.CORE_CLEANUP, row.job_core_cleanup_ack),
        ("a", WitnessStage.ADAPTER_CLEANUP, row.job_adapter_cleanup_ack),
    ):
        if value is not None:
            assert value == witness_id(stage, row.id)
            found += letter
    return found


class StageSpy:
    """Notes at each step where the Job is and what its row holds."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.write = store.write_each
        self.emit = Emitter.emit
        self.seen: list[tuple[str, str | None, str, str]] = []
        self.room: Room
        self.job: Job[Any]

    async def see(self, what: str) -> None:
        row = await row_of(self.store, self.job)
        assert (await observe_settlement(self.room, self.job.id)).lease is Presence.PRESENT
        self.seen.append((what, self.job.view().stage, row.status.value, witnesses(row)))

    async def before_finish(self, _: Outcome[None]) -> None:
        await self.see("before_finish")

    async def on_settled(self, _: Outcome[None]) -> None:
        await self.see("on_settled")

    async def child(self, _: Run[None]) -> None:
        while self.job.view().stage is Stage.WORK:  # noqa: ASYNC110  there is no event for it
            await trio.lowlevel.checkpoint()
        await self.see("child")

    async def spied_write(self, mutations: Sequence[Mutation[Any]]) -> Any:
        mine = [type(each).__name__ for each in mutations if getattr(each, "id", None) == self.job.id]
        for name in mine:
            await self.see(f"before {name}")
        results = await self.write(mutations)
        for name in mine:
            await self.see(f"after {name}")
        return results

    def spied_emit(self, emitter: Emitter, kind: Any, *facts: Any) -> None:
        if kind is RunFinished and facts[0] == self.job.id:
            self.seen.append(("run.finished", self.job.view().stage, facts[1], ""))
        self.emit(emitter, kind, *facts)


class TestStages:
    async def test_a_job_passes_exactly_its_stages(self, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """J-02: the eight stages in their order, and the row after each as the table says, the lease kept to the end."""
        spy = StageSpy(faulty)
        go_on = trio.Event()

        async def work(run: Run[None]) -> None:
            await go_on.wait()
            await spy.see("work")
            await run.start_child(spy.child)

        async with open_room(faulty, name="main") as room:
            job = await start_job(room, work, before_finish=spy.before_finish, on_settled=spy.on_settled)
            spy.room, spy.job = room, job
            monkeypatch.setattr(faulty, "write_each", spy.spied_write)
            monkeypatch.setattr(Emitter, "emit", lambda *args: spy.spied_emit(*args))  # noqa: PLW0108  a bound method gets no self
            go_on.set()
            await job.outcome()
            monkeypatch.undo()
            row = await row_of(faulty, job)
            view = job.view()

        assert spy.seen == [
            ("work", "work", "running", ""),
            ("child", "family-join", "running", ""),
            ("before_finish", "core", "running", ""),
            ("before AppendWitnesses", "core-ack", "running", ""),
            ("after AppendWitnesses", "core-ack", "running", "fc"),
            ("before FinishRun", "terminal", "running", "fc"),
            ("after FinishRun", "terminal", "completed", "fc"),
            ("on_settled", "adapter", "completed", "fc"),
            ("before AppendWitnesses", "adapter-ack", "completed", "fc"),
            ("after AppendWitnesses", "adapter-ack", "completed", "fca"),
            ("run.finished", "release", "completed", ""),
        ]
        assert (view.stage, view.settled, view.status, view.ended_at) == (
            Stage.DONE,
            True,
            RunStatus.COMPLETED,
            row.ended_at,
        )
        assert (row.status, witnesses(row)) == (RunStatus.COMPLETED, "fca")

    async def test_a_job_without_callbacks_gets_all_witnesses(self, faulty: FaultyStore) -> None:
        """J-02: an absent callback passes, and its witness is written all the same; four writes in all."""
        async with open_room(faulty, name="main") as room:
            job = await start_job(room, give, 1)
            await job.outcome()
            report = await observe_settlement(room, job.id)
            row = await row_of(faulty, job)

        assert report.settled
        assert witnesses(row) == "fca"
        assert [type(mutation).__name__ for mutation in faulty.written((AdmitRun, AppendWitnesses, FinishRun))] == [
            "AdmitRun",
            "AppendWitnesses",
            "FinishRun",
            "AppendWitnesses",
        ]

    async def test_a_finished_job_is_one_row(self, faulty: FaultyStore) -> None:
        """J-03: one Run row and no stored work; after a reopening nothing runs or is called again, and it is seen."""
        adapter = Adapter()
        worked: list[str] = []

        async def work(run: Run[Any], secret: str) -> str:
            worked.append(secret)
            return secret

        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, work, "the argument")
            await job.outcome()
            before = await row_of(faulty, job)
        async with open_room(faulty, name="main") as room:
            await wait_all_tasks_blocked()
            page = await list_jobs(room)
            runs = await room.list_runs()
            after = await row_of(faulty, job)
            report = await observe_settlement(room, job.id)

        assert (worked, adapter.calls) == (["the argument"], ["core", "adapter"])
        assert [view.id for view in page.jobs] == [row.id for row in runs.runs] == [job.id]
        assert after == before
        assert "the argument" not in repr(attrs.asdict(after))
        assert (page.jobs[0].status, page.jobs[0].settled, report.settled) == (RunStatus.COMPLETED, True, True)

    async def test_a_waiting_job_is_done_but_not_settled(self, faulty: FaultyStore) -> None:
        """J-02: waiting walks all stages, too; no adapter witness, no result, and it is never settled."""
        adapter = Adapter()

        async def work(_: Run[Any]) -> None:
            raise RunWaiting("for-payment")

        observation = Observation[Any](OFFER, EXPERIMENT, lambda _: SCORECARD)
        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, work, observation=observation)
            with pytest.raises(RunWaitingError):
                await job.result()
            report = await observe_settlement(room, job.id)
            row = await row_of(faulty, job)

        assert adapter.calls == ["core", "adapter"]
        assert (row.status, row.ended_at, witnesses(row)) == (RunStatus.WAITING, None, "fc")
        assert (row.job_result_state, row.job_scorecard, report.settled) == (None, None, False)
        assert (job.view().settled, job.view().ended_at, job.view().reason) == (False, None, "for-payment")


class TestOutcome:
    @pytest.mark.parametrize("value", [None, False, 0, "", []])
    async def test_a_falsy_value_is_a_value(self, faulty: FaultyStore, value: object) -> None:
        """J-10: None, False, 0 and what is empty are results of completed work, not missing ones."""
        adapter = Adapter()
        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, give, value)

            assert await job.result() is value
            assert await job.result() is value
            row = await row_of(faulty, job)
        assert row.status is job.view().status is RunStatus.COMPLETED
        assert adapter.outcomes[0].value is value
        assert adapter.calls == ["core", "adapter"]

    @pytest.mark.parametrize(
        ("asked", "end", "status"),
        [
            (True, "value", RunStatus.COMPLETED),
            (True, "cancelled", RunStatus.CANCELLED),
            (True, "error", RunStatus.CANCELLED),
            (False, "error", RunStatus.FAILED),
        ],
    )
    async def test_how_the_work_ends_after_a_request_decides(
        self, faulty: FaultyStore, asked: bool, end: str, status: RunStatus
    ) -> None:
        """J-11: after a cancel request a value completes, Cancelled and an error are cancelled; an error alone fails."""
        adapter = Adapter()

        async def work(_: Run[Any]) -> int:
            try:
                if asked:
                    await trio.sleep_forever()
            except trio.Cancelled:
                if end == "cancelled":
                    raise
            if end == "error":
                raise ValueError("no")
            return 7

        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, work)
            await wait_all_tasks_blocked()
            if asked:
                assert job.cancel("user-asked")
            outcome = await job.outcome()
            assert not job.cancel()
            row = await row_of(faulty, job)

        assert outcome.status is row.status is status
        assert outcome.value == (7 if end == "value" else None)
        assert row.reason == ("user-asked" if status is RunStatus.CANCELLED else None)
        assert adapter.calls == ["core", "adapter"]
        assert adapter.outcomes == [outcome, outcome]

    @pytest.mark.parametrize(("policy", "status"), [("isolate", RunStatus.COMPLETED), ("cancel", RunStatus.FAILED)])
    async def test_a_failed_child_fails_its_job_only_if_asked_for(
        self, faulty: FaultyStore, policy: str, status: RunStatus
    ) -> None:
        """J-11: a child that failed fails its Job under the policy `cancel` only, and the callbacks learn it so."""
        adapter = Adapter()

        async def fail(_: Run[None]) -> None:
            raise ValueError("the child's")

        async def work(run: Run[Any]) -> str:
            await run.start_child(fail)
            return "done"

        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, work, on_child_failure=policy)
            outcome = await job.outcome()
            row = await row_of(faulty, job)

        assert outcome.status is row.status is status
        assert row.reason == ("child-failed" if status is RunStatus.FAILED else None)
        assert (row.error is not None) is (status is RunStatus.FAILED)
        assert job.view().error == row.error
        assert [seen.status for seen in adapter.outcomes] == [status, status]

    async def test_cancel_reaches_the_children_of_a_job_that_joins_them(self, faulty: FaultyStore) -> None:
        """J-11: in family-join the outcome stands, so cancel gives False, but children still running are cancelled."""
        adapter = Adapter()
        children: list[Run[Any]] = []

        async def work(run: Run[Any]) -> str:
            children.append(await run.start_child(park))
            return "done"

        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, work)
            await wait_all_tasks_blocked()
            assert job.view().stage is Stage.FAMILY_JOIN
            assert adapter.calls == []
            assert job.cancel() is False
            assert await job.result() == "done"
            child = await room.load(children[0].id)

        assert child is not None
        assert child.status is RunStatus.CANCELLED
        assert adapter.calls == ["core", "adapter"]

    @pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
    async def test_callbacks_get_the_frozen_outcome(self, faulty: FaultyStore, end: str) -> None:
        """J-12: for every outcome one call each, with the outcome itself; assigning to it raises."""
        adapter = Adapter()

        async def work(_: Run[Any]) -> str:
            if end == "failed":
                raise ValueError("no")
            if end == "cancelled":
                await trio.sleep_forever()
            return "value"

        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, work)
            await wait_all_tasks_blocked()
            job.cancel()
            outcome = await job.outcome()
            if end == "failed":
                with pytest.raises(RunFailedError):
                    await job.result()
            if end == "cancelled":
                with pytest.raises(RunCancelledError):
                    await job.result()

        assert outcome.status.value == end
        assert adapter.calls == ["core", "adapter"]
        assert all(seen is outcome for seen in adapter.outcomes)
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            outcome.value = "another"  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("end", "result", "state"),
        [
            ("value", "id", "available"),
            ("value", "none", "unavailable"),
            ("value", "error", "unavailable"),
            ("value", "text", "unavailable"),
            ("error", "id", "unavailable"),
            ("cancelled", "id", "unavailable"),
        ],
    )
    async def test_an_observed_job_stores_whether_its_result_is_available(
        self, faulty: FaultyStore, end: str, result: str, state: str
    ) -> None:
        """J-12: the result's id is stored with a completed outcome; anything else is unavailable, and holds nothing."""

        def result_of(outcome: Outcome[Any]) -> Any:
            if result == "error":
                raise ValueError("unreadable")
            return {"id": SCORECARD, "none": None, "text": "no id"}[result]

        async def work(_: Run[Any]) -> int:
            if end == "error":
                raise ValueError("no")
            if end == "cancelled":
                await trio.sleep_forever()
            return 1

        async with open_room(faulty, name="main") as room:
            job = await start_job(room, work, observation=Observation(OFFER, EXPERIMENT, result_of))
            await wait_all_tasks_blocked()
            job.cancel()
            await job.outcome()
            row = await row_of(faulty, job)

        scorecard = SCORECARD if state == "available" else None
        assert (row.job_result_state, row.job_scorecard) == (state, scorecard)
        assert (job.view().result_state, job.view().scorecard) == (state, scorecard)

    async def test_a_result_is_shown_once_it_is_stored(self, faulty: FaultyStore) -> None:
        """J-17: a Job that is held before its terminal write shows no result, though that is decided already."""
        adapter = Adapter(core_errors=[ValueError("no")])
        observation: Observation[Any] = Observation(OFFER, EXPERIMENT, lambda _: SCORECARD)
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, observation=observation)
            before = await wait_held(job)
            await recover_now(room, job, "acknowledge")
            await job.outcome()
            after = job.view()

        assert (before.cleanup_stage, before.result_state, before.scorecard) == (Stage.CORE, None, None)
        assert (after.result_state, after.scorecard) == ("available", SCORECARD)


class TestContexts:
    async def test_work_and_callbacks_have_their_own_contexts(self, faulty: FaultyStore) -> None:
        """J-13: the work, and what it starts, sees the given context; the callbacks see the room's, whatever was set."""
        seen: dict[str, tuple[str, Any]] = {}
        token = place.set("control")

        async def look(what: str) -> None:
            await trio.lowlevel.checkpoint()
            run = current_run()
            seen[what] = (place.get(), None if run is None else run.id)

        async def work(run: Run[Any]) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look, "work")
            place.set("changed by the work")

        async def before_finish(_: Outcome[Any]) -> None:
            await look("core")
            place.set("changed by core")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look, "task of core")

        async def on_settled(_: Outcome[Any]) -> None:
            await look("adapter")

        def result_of(_: Outcome[Any]) -> None:
            run = current_run()
            seen["result"] = (place.get(), None if run is None else run.id)

        async with open_room(faulty, name="main") as room:
            place.reset(token)
            context = contextvars.copy_context()
            context.run(place.set, "given")
            job = await start_job(
                room,
                work,
                before_finish=before_finish,
                on_settled=on_settled,
                observation=Observation(OFFER, EXPERIMENT, result_of),
                context=context,
            )
            await job.outcome()

        assert seen == {
            "result": ("control", job.id),
            "work": ("given", job.id),
            "core": ("control", job.id),
            "task of core": ("changed by core", job.id),
            "adapter": ("control", job.id),
        }
        assert context[place] == "given"
        assert room.context[place] == "control"

    async def test_a_callback_that_awaits_what_is_not_trios_learns_of_it_where_it_waits(
        self, faulty: FaultyStore
    ) -> None:
        """J-13: in another context, too, an error of a wait is raised at that wait, where the callback can meet it."""
        met: list[str] = []

        class Foreign:
            def __await__(self) -> Generator[object]:
                yield "of another framework"

        async def before_finish(_: Outcome[Any]) -> None:
            try:
                await Foreign()
            except TypeError as error:
                met.append(type(error).__name__)

        async with open_main(faulty) as room:
            job = await start_job(room, give, before_finish=before_finish)
            view = await job.wait_done_or_held()
            abandon_held(room)

        assert met == ["TypeError"]
        assert view.settled

    async def test_a_callback_may_close_what_the_work_ran_in(self, faulty: FaultyStore) -> None:
        """J-14: work in another Room, which `on_settled` closes: release and done pass, and the Job is settled."""
        closed: list[str] = []

        async with open_room(faulty, name="control") as control, open_room(faulty, name="work") as other:

            async def work(_: Run[Any]) -> int:
                return await (await other.start(give_two)).result()

            async def on_settled(_: Outcome[int]) -> None:
                await other.close()
                closed.append(other.state.value)

            context = contextvars.copy_context()
            job = await start_job(control, work, on_settled=on_settled, context=context)
            assert await job.result() == 2
            report = await observe_settlement(control, job.id)

        assert closed == ["closed"]
        assert report.settled


async def give_two(_: Run[int]) -> int:
    return 2


class TestDone:
    async def test_nothing_touches_room_or_store_after_release(
        self, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """J-15: with a store and a room that fail on use after the release, the Job is done all the same."""
        used: list[str] = []
        released = False
        outcomes: list[Outcome[Any]] = []

        def broken(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def use(*args: Any, **options: Any) -> Any:
                if released:
                    used.append(name)
                    raise RuntimeError(f"{name} was used after the release")
                return original(*args, **options)

            return use

        def spied_emit(emitter: Emitter, kind: Any, *facts: Any) -> None:
            nonlocal released
            emit(emitter, kind, *facts)
            released = released or kind is RunFinished

        async def wait(job: Job[Any]) -> None:
            outcomes.append(await job.outcome())

        emit = Emitter.emit
        async with open_room(faulty, name="main") as room:
            gate = trio.Event()
            adapter = Adapter(adapter_gate=gate)
            job = await adapter.start(room, give, 5, key="k")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, job)
                await wait_all_tasks_blocked()
                for name in ("write", "write_shielded", "write_each", "confirm", "load_run", "list_runs"):
                    monkeypatch.setattr(faulty, name, broken(name, getattr(faulty, name)))
                for name in ("held", "write", "now_micros", "next_uuid", "find_entry", "find"):
                    monkeypatch.setattr(Room, name, broken(name, getattr(Room, name)))
                monkeypatch.setattr(Emitter, "emit", spied_emit)
                gate.set()
            view = job.view()
            monkeypatch.undo()

        assert used == []
        assert [outcome.value for outcome in outcomes] == [5]
        assert (view.stage, view.settled, view.key, find_job(room, "k")) == (Stage.DONE, True, "k", None)

    async def test_a_blocked_adapter_keeps_everybody(
        self, faulty: FaultyStore, nursery: trio.Nursery, spindel_clock: MockClock
    ) -> None:
        """J-16: while `on_settled` runs: completed and unsettled, close refused, the waiter asleep; then one event, then wake.

        Waiters were woken by the stored outcome once, and the lease went with it: then the adapter was still at work.
        """
        gate = trio.Event()
        adapter = Adapter(adapter_gate=gate)
        order: list[str] = []

        async with open_room(faulty, name="main") as room:

            async def wait(what: str, waiting: Callable[[], Awaitable[object]]) -> None:
                await waiting()
                order.append(what)

            async def collect(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                async with room.watch() as watch:
                    task_status.started()
                    async for event in watch:
                        if isinstance(event, RunFinished):
                            order.append(f"{event.name} {event.status}")  # noqa: PERF401  in the order of all

            await nursery.start(collect)
            job = await adapter.start(room, give, 1)
            nursery.start_soon(wait, "outcome", job.outcome)
            nursery.start_soon(wait, "result", job.result)
            nursery.start_soon(wait, "returned", job.run.wait_returned)
            await wait_all_tasks_blocked()
            view = await get_job(room, job.id)
            report = await observe_settlement(room, job.id)
            began = trio.current_time()
            with pytest.raises(RoomCloseRefusedError) as caught:
                await room.close(grace_seconds=5)
            waited = trio.current_time() - began
            asleep = list(order)
            gate.set()
            await wait_all_tasks_blocked()
            after = await observe_settlement(room, job.id)
            await room.close()

        assert view is not None
        assert (view.status, view.settled, view.stage) == (RunStatus.COMPLETED, False, Stage.ADAPTER)
        assert (view.cleanup_required, view.cleanup_stage, view.ended_at) == (False, None, job.view().ended_at)
        assert (report.lease, report.owner, report.settled) == (Presence.PRESENT, Presence.PRESENT, False)
        assert caught.value.remaining == (job.id,)
        assert waited == 5
        assert asleep == []
        assert order.count("run.finished completed") == 1
        assert sorted(order) == ["outcome", "result", "returned", "run.finished completed"]
        assert (after.lease, after.owner, after.settled) == (Presence.ABSENT, Presence.ABSENT, True)
        assert adapter.calls == ["core", "adapter"]
        assert (await row_of(faulty, job)).status is RunStatus.COMPLETED

    async def test_waiters_wake_after_the_event_of_the_end(self, faulty: FaultyStore) -> None:
        """J-16: when a waiter wakes, `run.finished` is out, the key is free and nothing of the Job is left."""
        async with open_room(faulty, name="main") as room, room.watch() as watch:
            job = await start_job(room, give, key="k")
            await job.outcome()

            assert (room.live(), find_job(room, "k")) == ((), None)
            events: list[RoomEvent] = []
            async for event in watch:
                events.append(event)
                if isinstance(event, RunFinished):
                    break
        assert [event.name for event in events] == ["run.started", "run.finished"]

    async def test_a_cancelled_waiter_ends_its_wait_only(self, faulty: FaultyStore) -> None:
        """J-16: cancelling who waits for a Job leaves the Job as it is."""
        adapter = Adapter(adapter_gate=trio.Event())
        assert adapter.adapter_gate is not None
        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, give, 1)
            await wait_all_tasks_blocked()
            with trio.move_on_after(0) as scope:
                await job.outcome()
            assert scope.cancelled_caught
            view: JobView | None = await cancel_job(room, job.id)
            assert view is not None
            assert (view.status, view.settled) == (RunStatus.COMPLETED, False)
            adapter.adapter_gate.set()
            assert await job.result() == 1

        assert adapter.calls == ["core", "adapter"]

    async def test_a_run_that_waits_for_a_job_stores_the_cause(self, faulty: FaultyStore) -> None:
        """J-16: a Run that learns a Job's outcome has it as its stored cause when it goes on."""
        causes: list[tuple[UUID, ...]] = []
        async with open_room(faulty, name="main") as room:
            job = await start_job(room, give, 3)

            async def consumer(run: Run[None]) -> None:
                assert await job.result() == 3
                row = await room.load(run.id)
                assert row is not None
                causes.append(row.caused_by)

            await (await room.start(consumer)).result()

        assert causes == [(job.id,)]
