"""Starting a Job: stored before it begins, once for each living key, or not at all."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AdmissionRefusedError,
    AdmissionUncertainError,
    DurableRoomRequiredError,
    InvalidRecordError,
    JobKeyConflictError,
    WriteRefusedError,
)
from spindel.jobs import Job, Observation, find_job, observe_settlement, start_job
from spindel.jobs._start import start_job_of_any_kind
from spindel.operator import reconcile_settlement
from spindel.runs import LeasePhase, Outcome, Room, Run, open_room
from spindel.runs import observe_settlement as observe_run
from spindel.store import AdmitRun, RunStatus
from spindel.testing.faults import Fault, FaultyStore
from tests.jobs.adapters import Adapter, give, park, row_of


class Work:
    """Work that counts its calls and goes on when it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = trio.Event()

    async def __call__(self, run: Run[Any]) -> None:
        self.calls += 1
        await self.go_on.wait()


def nothing(_: Outcome[Any]) -> UUID | None:
    return None


class TestAdmission:
    async def test_a_refused_row_starts_nothing(self, faulty: FaultyStore) -> None:
        """J-01: a store that refuses the first row: a typed error, no call of work or callbacks, nothing live."""
        faulty.fail(1, Fault.REFUSED, of=AdmitRun)
        adapter, work = Adapter(), Work()
        async with open_room(faulty, name="main") as room:
            with pytest.raises(AdmissionRefusedError) as caught:
                await adapter.start(room, work, key="k")
            await wait_all_tasks_blocked()

            assert caught.value.code == "injected"
            assert (room.live(), room.held(), find_job(room, "k")) == ((), (), None)
        assert (work.calls, adapter.calls) == (0, [])
        assert faulty.writes[-1].fault is Fault.REFUSED

    async def test_a_room_without_a_store_keeps_no_jobs(self) -> None:
        """J-01: a room with `durable=False` refuses Jobs with a typed error, of its own and of its Runs."""
        adapter, work = Adapter(), Work()
        refused: list[str] = []

        async def body(run: Run[None]) -> None:
            with pytest.raises(DurableRoomRequiredError) as caught:
                await adapter.start(run, work)
            refused.append(caught.value.room)

        async with open_room(name="main", durable=False) as room:
            with pytest.raises(DurableRoomRequiredError) as caught:
                await adapter.start(room, work, key="k")
            await (await room.start(body)).result()

            assert (room.live(), find_job(room, "k")) == ((), None)
        assert (caught.value.room, refused) == ("main", ["main"])
        assert (work.calls, adapter.calls) == (0, [])

    async def test_a_lost_start_is_fenced_and_never_begins(self, faulty: FaultyStore) -> None:
        """J-04: a root Job whose start can't be read back: an error, a fence, a late row refused, no call at all."""
        faulty.fail(1, Fault.LATE, of=AdmitRun)
        faulty.fail_confirm(1, of=AdmitRun)
        adapter, work = Adapter(), Work()
        async with open_room(faulty, name="main") as room:
            with pytest.raises(AdmissionUncertainError) as caught:
                await adapter.start(room, work, key="k")
            (late,) = await faulty.arrive()
            row = await room.load(caught.value.run_id)
            work.go_on.set()
            again = await adapter.start(room, work, key="k")
            await again.outcome()

        assert caught.value.fenced
        assert isinstance(late, WriteRefusedError)
        assert late.code == "terminal-fence"
        assert row is not None
        assert (row.status, row.reason) == (RunStatus.FAILED, "admission-failed")
        assert again.id != caught.value.run_id
        assert (work.calls, adapter.calls) == (1, ["core", "adapter"])

    @pytest.mark.parametrize("fault", [Fault.LATE, Fault.LOST_REPLY])
    async def test_a_lost_start_below_a_run_is_held_until_it_is_fenced(self, faulty: FaultyStore, fault: Fault) -> None:
        """J-04: of a child, the row becomes the fence by an operator's hand; its key is free then, not before."""
        faulty.fail(2, fault, of=AdmitRun)
        faulty.fail_confirm(1, of=AdmitRun)
        adapter, work = Adapter(), Work()
        work.go_on.set()
        errors: list[AdmissionUncertainError] = []
        fenced = trio.Event()
        later: list[Job[Any]] = []

        async def body(run: Run[None]) -> None:
            for _ in range(2):
                with pytest.raises(AdmissionUncertainError) as caught:
                    await adapter.start(run, work, key="k")
                errors.append(caught.value)
            await fenced.wait()
            later.append(await adapter.start(run, work, key="k"))

        async with open_room(faulty, name="main") as room:
            parent = await room.start(body)
            await wait_all_tasks_blocked()
            report = await observe_run(room, errors[0].run_id)
            facts = report.admission
            assert facts is not None
            assert (facts.phase, facts.held) == (LeasePhase.STARTING, True)
            assert facts.revision is not None
            assert (work.calls, adapter.calls) == (0, [])
            await reconcile_settlement(
                room, errors[0].run_id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision
            )
            late = await faulty.arrive()
            row = await room.load(errors[0].run_id)
            fenced.set()
            await parent.result()

        assert errors[0].run_id == errors[1].run_id
        assert len(late) == (1 if fault is Fault.LATE else 0)
        assert all(isinstance(answer, WriteRefusedError) for answer in late)
        assert row is not None
        assert (row.status, row.reason) == (RunStatus.FAILED, "admission-failed")
        assert later[0].id != errors[0].run_id
        assert (work.calls, adapter.calls) == (1, ["core", "adapter"])

    async def test_a_cancelled_caller_starts_nothing(self, faulty: FaultyStore) -> None:
        """J-05: in a scope that is cancelled already, a start raises Cancelled and leaves no row and no key."""
        adapter, work = Adapter(), Work()
        async with open_room(faulty, name="main") as room:
            with trio.CancelScope() as scope:
                scope.cancel()
                await adapter.start(room, work, key="k")

            assert (room.live(), find_job(room, "k")) == ((), None)
            page = await room.list_runs()
        assert scope.cancelled_caught
        assert faulty.written(AdmitRun) == []
        assert page.runs == ()
        assert (work.calls, adapter.calls) == (0, [])

    async def test_a_cancelled_scope_around_the_room_cancels_a_start(self, faulty: FaultyStore) -> None:
        """J-05: whoever is inside a cancelled scope around the room is cancelled, not told that the room is fenced."""
        adapter, work = Adapter(), Work()
        with trio.CancelScope() as scope:
            async with open_room(faulty, name="main") as room:
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                await adapter.start(room, work)

        assert scope.cancelled_caught
        assert (work.calls, adapter.calls, faulty.written(AdmitRun)) == (0, [], [])

    async def test_a_caller_that_is_cancelled_during_the_write_gets_its_job(self, faulty: FaultyStore) -> None:
        """J-05: cancelled while its row is being written, a start gives the Job: one row, and it runs to its end."""
        hold = faulty.hold(1, of=AdmitRun)
        adapter, work = Adapter(), Work()
        started: list[Job[Any]] = []
        scope = trio.CancelScope()

        async def start(room: Room) -> None:
            with scope:
                started.append(await adapter.start(room, work))

        async with open_room(faulty, name="main") as room, trio.open_nursery() as nursery:
            nursery.start_soon(start, room)
            await hold.wait_reached()
            scope.cancel()
            await wait_all_tasks_blocked()
            hold.release()
            await wait_all_tasks_blocked()
            assert work.calls == 1
            work.go_on.set()
            outcome = await started[0].outcome()
            page = await room.list_runs()

        assert outcome.status is RunStatus.COMPLETED
        assert [row.id for row in page.runs] == [started[0].id]
        assert adapter.calls == ["core", "adapter"]

    async def test_work_of_a_run_that_is_cancelled_already_is_called_once(self, faulty: FaultyStore) -> None:
        """J-05: a Job whose parent is cancelled during its write is called once, cancelled, and cleaned up."""
        hold = faulty.hold(2, of=AdmitRun)
        adapter, work = Adapter(), Work()
        jobs: list[Job[Any]] = []

        async def body(run: Run[None]) -> None:
            jobs.append(await adapter.start(run, work))

        async with open_room(faulty, name="main") as room:
            parent = await room.start(body)
            await hold.wait_reached()
            parent.cancel()
            hold.release()
            outcome = await _outcome_of_first(jobs)

        assert (work.calls, outcome.status) == (1, RunStatus.CANCELLED)
        assert adapter.calls == ["core", "adapter"]

    @pytest.mark.parametrize("kind", ["raises", "gives 3", "gives a list"])
    async def test_work_that_can_not_be_constructed_is_a_failed_job(self, faulty: FaultyStore, kind: str) -> None:
        """J-06: work that raises when called, or gives nothing awaitable: a Job, failed, both callbacks once, settled.

        A construction failure that skipped the adapter left it open for ever.
        """
        adapter = Adapter()

        def work(_: Run[Any]) -> Any:
            if kind == "raises":
                raise ValueError("no such config")
            return 3 if kind == "gives 3" else []

        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, work)
            outcome = await job.outcome()
            report = await observe_settlement(room, job.id)
            row = await row_of(faulty, job)

        assert outcome.status is row.status is RunStatus.FAILED
        assert isinstance(outcome.error, ValueError if kind == "raises" else TypeError)
        assert adapter.calls == ["core", "adapter"]
        assert report.settled

    async def test_a_journal_that_fails_after_the_start_owes_no_abandonment(self, faulty: FaultyStore) -> None:
        """J-07: once `start_job` has returned, retiring the adapter is the Job's, whatever the caller's journal does."""
        adapter, work = Adapter(), Work()
        abandoned: list[str] = []
        jobs: list[Job[Any]] = []

        def journal(job: Job[Any]) -> None:
            jobs.append(job)
            raise OSError("the journal's disk is full")

        async def invoke(room: Room) -> None:
            try:
                job = await adapter.start(room, work)
            except BaseException:
                abandoned.append("abandoned")
                raise
            journal(job)

        async with open_room(faulty, name="main") as room:
            with pytest.raises(OSError, match="disk is full"):
                await invoke(room)
            work.go_on.set()
            outcome = await jobs[0].outcome()
            report = await observe_settlement(room, jobs[0].id)

        assert (outcome.status, report.settled) == (RunStatus.COMPLETED, True)
        assert adapter.calls.count("adapter") == 1
        assert abandoned == []

    @pytest.mark.parametrize(
        "options",
        [
            {"key": ""},
            {"key": "k" * 201},
            {"key": 7},
            {"before_finish": 7},
            {"on_settled": "x"},
            {"finisher": Adapter()},
            {"kind": "experiment"},
            {"kind": "attempt"},
        ],
    )
    async def test_an_option_that_means_nothing_is_refused(self, faulty: FaultyStore, options: dict[str, Any]) -> None:
        """What means nothing is refused before any row: a key that is none, no callback, a finisher, a reserved kind."""
        async with open_room(faulty, name="main") as room:
            with pytest.raises(InvalidRecordError):
                await start_job(room, give, **options)

            assert room.live() == ()
        assert faulty.written(AdmitRun) == []

    async def test_the_longest_key_and_the_kind_are_stored(self, faulty: FaultyStore) -> None:
        """A key of 200 characters, the kind, `job` by default, and the identity of who asked are stored.

        The layer that owns a reserved kind may use it.
        """
        observation = Observation(UUID(int=5), UUID(int=6), nothing)
        async with open_room(faulty, name="main") as room:
            plain = await start_job(room, give)
            own = await start_job(room, give, key="k" * 200, kind="build", observation=observation)
            reserved = await start_job_of_any_kind(room, give, kind="attempt")
            rows = [await row_of(faulty, job) for job in (plain, own, reserved)]

        assert [(row.kind, row.job_key, row.job_offer, row.job_experiment) for row in rows] == [
            ("job", None, None, None),
            ("build", "k" * 200, UUID(int=5), UUID(int=6)),
            ("attempt", None, None, None),
        ]
        assert [row.job_version for row in rows] == [1, 1, 1]


async def _outcome_of_first(jobs: list[Job[Any]]) -> Outcome[Any]:
    while not jobs:
        await wait_all_tasks_blocked()
    return await jobs[0].outcome()


class TestKeys:
    async def test_ten_starts_of_one_key_are_one_job(self, faulty: FaultyStore) -> None:
        """J-08: ten tasks that start one key at once get the same Job, called once; after done it is a new one."""
        hold = faulty.hold(1, of=AdmitRun)
        adapter, work = Adapter(), Work()
        jobs: list[Job[Any]] = []

        async def start(room: Room) -> None:
            jobs.append(await adapter.start(room, work, key="k"))

        async with open_room(faulty, name="main") as room:
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(start, room)
                await hold.wait_reached()
                await wait_all_tasks_blocked()
                assert (find_job(room, "k"), jobs) == (None, [])
                hold.release()
            assert find_job(room, "k") is jobs[0]
            assert await adapter.start(room, give, key="k") is jobs[0]
            work.go_on.set()
            await jobs[0].outcome()
            assert find_job(room, "k") is None
            new = await adapter.start(room, work, key="k")
            await new.outcome()

        assert {id(job) for job in jobs} == {id(jobs[0])}
        assert len(jobs) == 10
        assert new.id != jobs[0].id
        assert (work.calls, len(faulty.written(AdmitRun))) == (2, 2)

    async def test_a_key_belongs_to_its_job_until_done(self, faulty: FaultyStore) -> None:
        """J-08: a stored outcome doesn't free the key; only done does."""
        adapter = Adapter(adapter_gate=trio.Event())
        assert adapter.adapter_gate is not None
        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, give, key="k")
            await wait_all_tasks_blocked()
            assert job.view().status is RunStatus.COMPLETED
            assert await adapter.start(room, give, key="k") is job
            adapter.adapter_gate.set()
            await job.outcome()
            assert find_job(room, "k") is None

    async def test_the_next_waiter_starts_when_the_first_is_refused(self, faulty: FaultyStore) -> None:
        """J-08: if the first admission is refused, or its caller cancelled before the row, the next waiter starts."""
        faulty.fail(1, Fault.REFUSED, of=AdmitRun)
        hold = faulty.hold(1, of=AdmitRun)
        adapter, work = Adapter(), Work()
        jobs: list[Job[Any]] = []
        refused: list[str] = []

        async def start(room: Room) -> None:
            try:
                jobs.append(await adapter.start(room, work, key="k"))
            except AdmissionRefusedError as error:
                refused.append(error.code)

        async with open_room(faulty, name="main") as room:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(start, room)
                await hold.wait_reached()
                nursery.start_soon(start, room)
                nursery.start_soon(start, room)
                await wait_all_tasks_blocked()
                hold.release()
            work.go_on.set()
            await jobs[0].outcome()

        assert refused == ["injected"]
        assert len(jobs) == 2
        assert jobs[0] is jobs[1]
        assert work.calls == 1

    async def test_all_waiters_get_the_error_of_an_uncertain_start(self, faulty: FaultyStore) -> None:
        """J-08: if the first admission is uncertain, everybody who waits for the key gets that error; nobody starts."""
        faulty.fail(1, Fault.BEFORE, of=AdmitRun)
        hold = faulty.hold(1, of=AdmitRun)
        adapter, work = Adapter(), Work()
        errors: list[AdmissionUncertainError] = []

        async def start(room: Room) -> None:
            with pytest.raises(AdmissionUncertainError) as caught:
                await adapter.start(room, work, key="k")
            errors.append(caught.value)

        async with open_room(faulty, name="main") as room:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(start, room)
                await hold.wait_reached()
                nursery.start_soon(start, room)
                await wait_all_tasks_blocked()
                hold.release()
            work.go_on.set()
            job = await adapter.start(room, work, key="k")
            await job.outcome()

        assert len(errors) == 2
        assert errors[0].run_id == errors[1].run_id != job.id
        assert work.calls == 1

    async def test_another_parent_or_offer_is_a_conflict(self, faulty: FaultyStore) -> None:
        """J-09: while a key lives under parent A, a start under B, or for another offer, is refused by name."""
        adapter, work = Adapter(), Work()
        first: list[Job[Any]] = []
        conflicts: list[JobKeyConflictError] = []
        observed = Observation(UUID(int=1), UUID(int=2), nothing)
        other = Observation(UUID(int=3), UUID(int=2), nothing)

        async def conflict(owner: Room | Run[Any], observation: Observation[Any] | None) -> None:
            with pytest.raises(JobKeyConflictError) as caught:
                await adapter.start(owner, work, key="k", observation=observation)
            conflicts.append(caught.value)

        async def a(run: Run[None]) -> None:
            first.append(await adapter.start(run, work, key="k", observation=observed))
            await conflict(run, other)
            await conflict(run, None)
            assert await adapter.start(run, work, key="k", observation=observed) is first[0]

        async def b(run: Run[None]) -> None:
            await conflict(run, observed)

        async with open_room(faulty, name="main") as room:
            parent = await room.start(a)
            await wait_all_tasks_blocked()
            await (await room.start(b)).result()
            await conflict(room, observed)
            work.go_on.set()
            await parent.result()

        assert [(error.key, error.job_id) for error in conflicts] == [("k", first[0].id)] * 4
        assert work.calls == 1

    async def test_a_key_that_is_being_admitted_conflicts_at_once(self, faulty: FaultyStore) -> None:
        """J-09: a conflict is told while the other is still being started, without its id."""
        hold = faulty.hold(2, of=AdmitRun)
        adapter, work = Adapter(), Work()

        async def body(run: Run[None]) -> None:
            await adapter.start(run, work, key="k")

        async with open_room(faulty, name="main") as room:
            parent = await room.start(body)
            await hold.wait_reached()
            with pytest.raises(JobKeyConflictError) as caught:
                await adapter.start(room, work, key="k")
            hold.release()
            work.go_on.set()
            await parent.result()

        assert caught.value.job_id is None

    async def test_a_key_is_of_one_room_and_old_rows_block_nothing(self, faulty: FaultyStore) -> None:
        """J-08: the same key lives once in each room, and a row with it from before blocks nobody."""
        adapter, work = Adapter(), Work()
        async with open_room(faulty, name="a") as a, open_room(faulty, name="b") as b:
            one = await adapter.start(a, work, key="k")
            two = await adapter.start(b, work, key="k")
            work.go_on.set()
            await one.outcome()
            await two.outcome()
        async with open_room(faulty, name="a") as a:
            assert find_job(a, "k") is None
            three = await adapter.start(a, park, key="k")
            three.cancel()
            await three.outcome()

        assert len({one.id, two.id, three.id}) == 3
