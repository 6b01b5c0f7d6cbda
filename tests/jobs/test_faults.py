"""Each write of a Job's end fails in each way, it is cancelled at each step, and operators race it and each other.

Whatever happens: callbacks are entered exactly as often as somebody asked for, every write is sent again as it was
frozen, and a stored outcome never becomes another one.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AcknowledgeRefusedError,
    AdmissionError,
    JobNotFoundError,
    NotHeldError,
    RecoveryInProgressError,
    RunAbandonedError,
    SpindelError,
    StageHeldError,
    StaleRevisionError,
)
from spindel.jobs import Job, Stage, observe_settlement, start_job
from spindel.operator import abandon_held, recover, recovery_state
from spindel.runs import open_room
from spindel.store import AdmitRun, AppendWitnesses, FinishRun, MemoryStore, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.runs import Outcome, Room, Run
    from spindel.store import Store
    from spindel.testing.sweep import Steps
    from tests.conftest import Sweep

Action = Literal["retry", "acknowledge"]
ACTIONS: tuple[Action, ...] = ("acknowledge", "retry")
PIPELINE = (AppendWitnesses, FinishRun)


@attrs.define
class Program:
    """A Job with a Job as its child; counts what is entered, and fails a callback when told to."""

    entered: Counter[str] = attrs.Factory(Counter)
    outcomes: dict[str, set[RunStatus]] = attrs.Factory(dict)
    fail: dict[str, int] = attrs.Factory(dict)
    jobs: list[Job[Any]] = attrs.Factory(list)

    def callback(self, name: str) -> Any:
        async def call(outcome: Outcome[Any]) -> None:
            self.entered[name] += 1
            self.outcomes.setdefault(name.split(maxsplit=1)[0], set()).add(outcome.status)
            await trio.lowlevel.checkpoint()
            if self.fail.get(name, 0):
                self.fail[name] -= 1
                raise ValueError(name)

        return call

    async def start(self, owner: Room | Run[Any], name: str, fn: Any) -> Job[Any]:
        job: Job[Any] = await start_job(
            owner,
            fn,
            key=name,
            before_finish=self.callback(f"{name} core"),
            on_settled=self.callback(f"{name} adapter"),
        )
        self.jobs.append(job)
        return job

    async def child(self, _: Run[str]) -> str:
        self.entered["child work"] += 1
        await trio.lowlevel.checkpoint()
        return "child"

    async def parent(self, run: Run[str]) -> str:
        self.entered["parent work"] += 1
        await self.start(run, "child", self.child)
        await trio.lowlevel.checkpoint()
        return "parent"

    def check_entered(self, **more: int) -> None:
        """Check that each work was entered once, and each callback once, or as often as it was asked for again."""
        started = ["parent"] if len(self.jobs) == 1 else ["parent", "child"]
        expected = Counter({f"{name} {what}": 1 for name in started for what in ("work", "core", "adapter")})
        expected.update({name.replace("_", " "): times for name, times in more.items()})
        assert self.entered == expected


async def operate(room: Room, job: Job[Any], action: Action = "retry") -> list[tuple[Stage, str]]:
    """Take up whatever is held until the Job is done; where an attestation is refused, retry. Gives what was done."""
    done: list[tuple[Stage, str]] = []
    while not (view := await job.wait_done_or_held()).settled:
        if view.stage is Stage.DONE:
            return done
        held = view.blocked_by[0] if view.blocked_by else job.id
        locator = recovery_state(room, held).locator
        try:
            await recover(room, locator, action)
        except AcknowledgeRefusedError:
            done.append((locator.stage, "refused"))
            await recover(room, recovery_state(room, held).locator, "retry")
        done.append((locator.stage, action))
        assert len(done) < 50, "the operator gets nowhere"
    return done


async def check_rows(store: FaultyStore, program: Program) -> None:
    """Check that each Job's frozen writes were always the same, and that its row says what its owner decided."""
    for job in program.jobs:
        outcome = await job.outcome()
        row = await store.load_run("main", job.id)
        assert row is not None
        assert (row.status, row.reason) == (outcome.status, outcome.reason)
        writes = store.written(PIPELINE)
        ends = [write for write in writes if isinstance(write, FinishRun) and write.id == job.id]
        assert all(end == ends[0] for end in ends), "an outcome was frozen twice"
        appended = [write for write in writes if isinstance(write, AppendWitnesses) and write.id == job.id]
        assert len({(write.core, write.adapter) for write in appended}) == len(set(map(repr, appended))) == 2
        assert row.ended_at == ends[0].ended_at == job.view().ended_at


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("fault", "readable"),
    [
        (Fault.REFUSED, True),
        (Fault.BEFORE, True),
        (Fault.LATE, True),
        (Fault.LOST_REPLY, True),
        (Fault.LOST_REPLY, False),
    ],
)
async def test_every_write_of_the_end_may_fail(
    fresh: Callable[[], Store], action: Action, fault: Fault, readable: bool
) -> None:
    """J-23, J-24, J-26, J-27: each write fails in each way; held unless it can be read; no callback runs twice."""
    number = 0
    stages: list[tuple[Stage, str]] = []
    while True:
        number += 1
        program = Program()
        async with FaultyStore(fresh()) as store, open_room(store, name="main") as room:
            plan = store.fail(number, fault, of=PIPELINE)
            if not readable:
                store.fail_confirm(1, of=PIPELINE)
            job = await program.start(room, "parent", program.parent)
            done = await operate(room, job, action)
            assert await job.result() == "parent"
            for started in program.jobs:
                assert (await observe_settlement(room, started.id)).settled
            program.check_entered()
            # Sent a second time meanwhile, so whatever arrives now changes nothing any more.
            assert not [late for late in await store.arrive() if isinstance(late, Exception)]
            await check_rows(store, program)
        if not plan.fired:
            break
        stages.extend(done)
        repeated = action == "retry" or fault is not Fault.LOST_REPLY
        writes = [seen.mutation for seen in store.writes if seen.mutation in plan.met]
        assert len(writes) == (2 if repeated and done else 1)

    assert number == 7, "two Jobs make three writes each at their end"
    if fault is Fault.LOST_REPLY and readable:
        assert stages == []
    elif action == "retry" or fault is Fault.LOST_REPLY:
        assert Counter(stages) == {(stage, action): 2 for stage in (Stage.CORE_ACK, Stage.TERMINAL, Stage.ADAPTER_ACK)}
    else:
        assert Counter(what for _, what in stages) == {"refused": 6, "acknowledge": 6}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ["parent core", "parent adapter", "child core", "child adapter"])
async def test_every_callback_may_fail(faulty: FaultyStore, name: str, action: Action) -> None:
    """J-17, J-19, J-20: a failed callback is called again only by a retry, and everything else runs once."""
    program = Program(fail={name: 2})
    async with open_room(faulty, name="main") as room:
        job = await program.start(room, "parent", program.parent)
        held = await job.wait_done_or_held()
        target = held.blocked_by[0] if held.blocked_by else job.id
        first = recovery_state(room, target)
        if action == "retry":
            with pytest.raises(StageHeldError) as again:
                await recover(room, first.locator, action)
            with pytest.raises(StaleRevisionError):
                await recover(room, first.locator, action)
            assert recovery_state(room, target).locator == again.value.locator
        await operate(room, job, action)
        assert await job.result() == "parent"
        for started in program.jobs:
            assert (await observe_settlement(room, started.id)).settled
        program.check_entered(**({name.replace(" ", "_"): 2} if action == "retry" else {}))
        await check_rows(faulty, program)


@pytest.mark.slow
@pytest.mark.parametrize("fresh", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize("target", ["parent", "room", "child"])
@pytest.mark.parametrize("fault", [None, Fault.BEFORE])
async def test_a_job_may_be_cancelled_at_every_step(
    sweep: Sweep, fresh: Callable[[], Store], target: str, fault: Fault | None
) -> None:
    """J-11, J-12, J-18: cancelled after any step, with a write that fails on the way, every stage follows, once."""

    async def scenario(steps: Steps) -> None:
        program = Program()
        with trio.CancelScope() as scope:
            # Closing what the room is in may not be cancelled, or no room could be closed.
            async with FaultyStore(fresh()) as store, open_room(store, name="main") as room:
                if fault is not None:
                    store.fail(2, fault, of=AppendWitnesses)
                job = await program.start(room, "parent", program.parent)

                def act() -> None:
                    if target == "room":
                        scope.cancel()
                    elif target == "parent":
                        job.cancel()
                    elif len(program.jobs) > 1:
                        program.jobs[1].cancel()

                steps.arm(act)
                with trio.CancelScope(shield=True):
                    await operate(room, job)
                    steps.disarm()
                    for started in program.jobs:
                        assert (await observe_settlement(room, started.id)).settled
                        # It ends at once, whatever is cancelled: the Job is done.
                        await started.outcome()
                    await check_rows(store, program)
        started_works = [name for name in ("parent", "child") if program.entered[f"{name} work"]]
        assert started_works[0] == "parent"
        assert len(program.jobs) >= len(started_works)
        for name in ("parent", "child")[: len(program.jobs)]:
            assert program.entered[f"{name} core"] == program.entered[f"{name} adapter"] == 1
            assert program.entered[f"{name} work"] == 1
            assert len(program.outcomes[name]) == 1, "the callbacks saw two outcomes"

    assert await sweep(scenario) > 20


@pytest.mark.slow
@pytest.mark.parametrize("fresh", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize("stage", ["core", "core-ack", "terminal", "adapter", "adapter-ack"])
async def test_two_recoveries_race_at_every_step(sweep: Sweep, fresh: Callable[[], Store], stage: str) -> None:
    """J-21: a second recovery of the same hold, begun after any step of the first, repeats nothing once more."""
    written = {"core-ack": 1, "terminal": 2, "adapter-ack": 3}.get(stage)

    async def scenario(steps: Steps) -> None:
        program = Program(fail={f"parent {stage}": 1})
        refusals: list[type[BaseException]] = []
        async with FaultyStore(fresh()) as store, open_room(store, name="main") as room:
            if written is not None:
                store.fail(written, Fault.LOST_REPLY, of=PIPELINE)
                store.fail_confirm(1, of=PIPELINE)
            job = await program.start(room, "parent", program.child)
            await job.wait_done_or_held()
            locator = recovery_state(room, job.id).locator

            async def second() -> None:
                await go.wait()
                for action in ACTIONS:
                    try:
                        await recover(room, locator, action)
                    except SpindelError as error:
                        refusals.append(type(error))

            go = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(second)
                await wait_all_tasks_blocked()
                steps.arm(go.set)
                try:
                    await recover(room, locator, "retry")
                except SpindelError as error:
                    refusals.append(type(error))
                await job.outcome()
                go.set()
            assert job.view().stage is Stage.DONE
            assert (await observe_settlement(room, job.id)).settled
            await check_rows(store, program)
        # The second one may have come first, and then it only attested.
        again = (len(store.written(PIPELINE)) - 3) if written is not None else program.entered[f"parent {stage}"] - 1
        assert again in (0, 1)
        assert program.entered["parent core"] + program.entered["parent adapter"] == 2 + (
            again if written is None else 0
        )
        assert set(refusals) <= {RecoveryInProgressError, StaleRevisionError, NotHeldError, JobNotFoundError}
        assert len(refusals) == 2, "one of three claimed it"

    assert await sweep(scenario) > 5


@pytest.mark.slow
@pytest.mark.parametrize("fresh", ["memory", "sqlite"], indirect=True)
async def test_a_recovery_meets_the_walk_at_every_step(sweep: Sweep, fresh: Callable[[], Store]) -> None:
    """J-21, J-22: an operator who acts on what was held, after any later step of the walk, is refused without effect."""

    async def scenario(steps: Steps) -> None:
        program = Program(fail={"parent core": 1})
        refused: list[type[BaseException]] = []
        async with FaultyStore(fresh()) as store, open_room(store, name="main") as room:
            job = await program.start(room, "parent", program.child)
            await job.wait_done_or_held()
            old = recovery_state(room, job.id).locator

            async def meddle() -> None:
                await go.wait()
                for stage in Stage:
                    for action in ACTIONS:
                        try:
                            await recover(room, attrs.evolve(old, stage=stage), action)
                        except SpindelError as error:
                            refused.append(type(error))

            go = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(meddle)
                await wait_all_tasks_blocked()
                nursery.start_soon(recover, room, old, "retry")
                await trio.lowlevel.checkpoint()
                while job.view().cleanup_required:  # noqa: ASYNC110  there is no event for it
                    await trio.lowlevel.checkpoint()
                steps.arm(go.set)
                await job.outcome()
                go.set()
            assert (await observe_settlement(room, job.id)).settled
            assert len(store.written(PIPELINE)) == 3
        assert len(refused) == 2 * len(Stage)
        assert set(refused) <= {RecoveryInProgressError, StaleRevisionError, NotHeldError, JobNotFoundError}
        assert program.entered == {"child work": 1, "parent core": 2, "parent adapter": 1}

    assert await sweep(scenario) > 5


@pytest.mark.slow
async def test_no_hold_is_missed_by_a_wait(sweep: Sweep) -> None:
    """J-31: a wait for done-or-held sees a hold below it, after whatever step of the wait that comes."""

    async def scenario(steps: Steps) -> None:
        gate = trio.Event()

        async def core(_: Outcome[None]) -> None:
            await gate.wait()
            raise ValueError("stuck")

        async def child(_: Run[None]) -> None:
            await trio.lowlevel.checkpoint()

        async def top(run: Run[None]) -> None:
            await start_job(run, child, before_finish=core)

        async with open_room(MemoryStore(), name="main") as room:
            job = await start_job(room, top)
            await wait_all_tasks_blocked()
            steps.arm(gate.set)
            async with trio.open_nursery() as nursery:

                async def wait() -> None:
                    view = await job.wait_done_or_held()
                    assert len(view.blocked_by) == 1

                nursery.start_soon(wait)
                await wait_all_tasks_blocked()
                gate.set()
                await wait_all_tasks_blocked()
                waiting = bool(nursery.child_tasks)
                steps.disarm()
                nursery.cancel_scope.cancel()
            abandon_held(room)
        assert not waiting, "the wait missed the hold"

    assert await sweep(scenario) > 3


@pytest.mark.slow
async def test_giving_up_meets_an_operator_at_every_step(sweep: Sweep) -> None:
    """J-46: given up after any step of a recovery, a Job ends once: recovered and settled, or abandoned without trace."""
    ends: set[bool] = set()

    async def scenario(steps: Steps) -> None:
        program = Program(fail={"parent core": 1, "parent adapter": 1})
        given_up: list[object] = []
        told: list[type[BaseException]] = []
        async with open_room(MemoryStore(), name="main") as room:
            job = await program.start(room, "parent", program.child)
            await job.wait_done_or_held()
            steps.arm(lambda: given_up.extend(abandon_held(room)))
            try:
                await operate(room, job)
                await job.outcome()
            except SpindelError as error:
                told.append(type(error))
            steps.disarm()
            report = await observe_settlement(room, job.id)
        assert report.settled == (not given_up)
        assert len(given_up) <= 1
        if given_up:
            assert set(told) <= {RunAbandonedError, NotHeldError, JobNotFoundError}
        ends.add(bool(given_up))
        assert program.entered["parent core"] <= 2
        assert program.entered["parent adapter"] <= 2

    await sweep(scenario)

    assert ends == {True, False}


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.BEFORE, Fault.LOST_REPLY])
async def test_a_start_that_failed_calls_nothing(faulty: FaultyStore, fault: Fault) -> None:
    """J-01, J-04: with the first row refused, unknown or unreadable neither work nor callbacks are ever called."""
    program = Program()
    faulty.fail(1, fault, of=AdmitRun)
    faulty.fail_confirm(1, of=AdmitRun)
    async with open_room(faulty, name="main") as room:
        with pytest.raises(AdmissionError):
            await program.start(room, "parent", program.parent)
        await wait_all_tasks_blocked()
        assert room.held() == ()
        assert room.live() == ()

    assert program.entered == {}
