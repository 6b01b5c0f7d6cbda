"""Launches whose construction or submission failed, and joins that failed: held, and taken up where they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.clock import foreign_work
from spindel.errors import (
    ForeignRoomError,
    LaunchNotRecoverableError,
    NotHeldError,
    RunAbandonedError,
    StaleRevisionError,
)
from spindel.ids import LaunchId, Revision
from spindel.observe import RoomEvent, RunFinished, RunHeld, RunRecovered
from spindel.operator import abandon_held, recover_launch
from spindel.runs import (
    Executor,
    LaunchFacts,
    LaunchKind,
    LaunchState,
    Room,
    Run,
    Ticket,
    TicketState,
    current_run,
    observe_settlement,
    open_room,
)
from spindel.store import RunStatus

if TYPE_CHECKING:
    from spindel.runs import Launch, RoomWatch

Port: TypeAlias = Literal["tasks", "threads"]


@attrs.define
class FlakyExecutor:
    """Fails constructions and submissions when told to, and notes what it was asked."""

    inner: Executor
    fail_construct: int = 0
    fail_submit: int = 0
    lose_reply: int = 0
    result: Any = None
    results: int = 0
    constructed: list[LaunchId] = attrs.Factory(list)
    submitted: list[Ticket] = attrs.Factory(list)
    launches: list[Launch] = attrs.Factory(list)

    def construct(self, launch: Launch) -> Ticket:
        self.constructed.append(launch.id)
        if self.fail_construct:
            self.fail_construct -= 1
            raise OSError("no worker can be made")
        return self.inner.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        launch = ticket.launch
        self.submitted.append(ticket)
        self.launches.append(launch)
        if self.fail_submit:
            self.fail_submit -= 1
            raise OSError("not accepted")
        if self.results:
            self.results -= 1
            original, result = launch.fn, self.result

            async def scripted() -> Any:
                launch.fn = original
                if isinstance(result, Exception):
                    raise result
                return result

            launch.fn = scripted
        self.inner.submit(ticket)
        if self.lose_reply:
            self.lose_reply -= 1
            raise OSError("accepted, but the reply was lost")


async def slow_leaf(run: Run[None]) -> None:
    await wait_all_tasks_blocked()


async def parent_of_one(run: Run[None]) -> None:
    await run.start_child(slow_leaf)


def install(room: Room, port: Port = "tasks", **plan: Any) -> FlakyExecutor:
    flaky = FlakyExecutor(getattr(room.pool, port), **plan)
    setattr(room.pool, port, flaky)
    return flaky


@attrs.define
class Worker:
    """A callback that the body of a Run has run by the pool, as a task or in a thread."""

    port: Port
    entered: list[Run[Any] | None] = attrs.Factory(list)
    raises: BaseException | None = None

    def __call__(self) -> str:
        self.entered.append(current_run())
        if self.raises is not None:
            raise self.raises
        return self.port

    async def as_task(self) -> str:
        return self()

    async def body(self, run: Run[str]) -> str:
        if self.port == "threads":
            return await run.run_native(self)
        return await run._entry.room.pool.call(LaunchKind.CLEANUP, self.as_task, run_id=run.id)


@attrs.define
class Keeps:
    """Takes tickets and doesn't run them, as an executor whose workers are all busy."""

    lose_reply: bool = False
    taken: list[Ticket] = attrs.Factory(list)

    def construct(self, launch: Launch) -> Ticket:
        return Ticket(launch)

    def submit(self, ticket: Ticket) -> None:
        self.taken.append(ticket)
        if self.lose_reply:
            raise OSError("accepted, but the reply was lost")


@pytest.fixture(params=["tasks", "threads"])
def worker(request: pytest.FixtureRequest) -> Worker:
    """A callback for each of the two executors."""
    return Worker(request.param)


async def held_launch(room: Room, run: Run[Any]) -> LaunchFacts:
    await wait_all_tasks_blocked()
    (facts,) = (await observe_settlement(room, run.id)).launches
    assert facts.held
    return facts


async def events_until(watch: RoomWatch, run: Run[Any]) -> list[RoomEvent]:
    events: list[RoomEvent] = []
    async for event in watch:
        events.append(event)
        if isinstance(event, RunFinished) and event.run_id == run.id:
            break
    return events


async def recover(room: Room, facts: LaunchFacts) -> LaunchFacts:
    assert facts.revision is not None
    return await recover_launch(room, facts.launch_id, revision=facts.revision)


async def test_a_failed_construction_is_constructed_again_under_its_id() -> None:
    """R-70: of two launches, the one whose construction failed is held alone; recovered, it keeps its id."""
    async with open_room(name="main") as room:
        flaky = install(room, fail_construct=1)
        first = await room.start(parent_of_one)
        facts = await held_launch(room, first)
        second = await room.start(parent_of_one)
        assert (await second.outcome()).status is RunStatus.COMPLETED
        assert (facts.kind, facts.state, facts.error) == (LaunchKind.JOIN, LaunchState.RETAINED, "OSError")
        assert first.status is RunStatus.RUNNING
        after = await recover(room, facts)
        await first.result()

    assert after.launch_id == facts.launch_id
    assert flaky.constructed.count(facts.launch_id) == 2


async def test_a_rejected_submission_submits_the_same_ticket() -> None:
    """R-71: a submission that was rejected is held; recovered, the same ticket is submitted and runs once."""
    async with open_room(name="main") as room:
        flaky = install(room, fail_submit=1)
        run = await room.start(parent_of_one)
        facts = await held_launch(room, run)
        await recover(room, facts)
        await run.result()

    assert facts.state is LaunchState.SUBMITTING
    one, two = flaky.submitted
    assert one is two
    assert one.state is TicketState.DONE


async def test_an_accepted_submission_with_a_lost_reply_runs_once() -> None:
    """R-71: a submission that was accepted though its reply was lost runs once, and its hold ends by itself."""
    async with open_room(name="main") as room:
        flaky = install(room, lose_reply=1)
        run = await room.start(parent_of_one)
        await run.result()

        assert room.held() == ()
    assert len(flaky.submitted) == 1


async def test_submitting_an_accepted_ticket_again_changes_nothing() -> None:
    """R-71: a ticket that was accepted, and is submitted again by a recovery, is claimed once."""
    entered: list[int] = []
    accepted: list[Ticket] = []

    class Forgetful:
        """Accepts, and loses its first reply."""

        def construct(self, launch: Launch) -> Ticket:
            return Ticket(launch)

        def submit(self, ticket: Ticket) -> None:
            accepted.append(ticket)
            if len(accepted) == 1:
                raise OSError("accepted, but the reply was lost")

    async def publish(_: object) -> None:
        entered.append(1)

    async with open_room(name="main") as room:
        inner, room.pool.tasks = room.pool.tasks, Forgetful()
        run = await room.start(slow_leaf, publish=publish)
        await run.wait_returned()
        facts = await held_launch(room, run)
        await recover(room, facts)
        one, two = accepted
        for ticket in accepted:
            inner.submit(ticket)

    assert one is two
    assert entered == [1]


async def test_what_can_not_be_recovered_is_refused_by_its_reason() -> None:
    """R-72: a stale revision, a running or a consumed launch is refused; there is no callback to pass."""
    async with open_room(name="main") as room:
        install(room, fail_construct=1)
        run = await room.start(parent_of_one)
        facts = await held_launch(room, run)
        with pytest.raises(StaleRevisionError):
            await recover_launch(room, facts.launch_id, revision=Revision(run.id))
        with pytest.raises(ForeignRoomError):
            await recover_launch(room, LaunchId(run.id), revision=Revision(run.id))
        room.pool.tasks = room.pool.tasks.inner  # type: ignore[attr-defined]
        await recover(room, facts)
        await run.result()

        async def held_open(run: Run[None]) -> None:
            await run.start_child(wait_for_cancel)

        busy = await room.start(held_open)
        await wait_all_tasks_blocked()
        (running,) = (await observe_settlement(room, busy.id)).launches
        with pytest.raises(LaunchNotRecoverableError) as caught:
            await recover_launch(room, running.launch_id, revision=Revision(run.id))
        busy.cancel()
        await busy.outcome()

    assert caught.value.code == "launch-running"
    assert "fn" not in recover_launch.__annotations__
    assert "callback" not in recover_launch.__annotations__


async def wait_for_cancel(run: Run[None]) -> None:
    await trio.sleep_forever()


async def test_a_launch_that_is_not_held_is_named_as_such() -> None:
    """R-72: a launch that was submitted and has not begun is not held."""
    async with open_room(name="main") as room:
        taken: list[Ticket] = []

        class Keeps:
            def construct(self, launch: Launch) -> Ticket:
                return Ticket(launch)

            def submit(self, ticket: Ticket) -> None:
                taken.append(ticket)

        inner, room.pool.tasks = room.pool.tasks, Keeps()
        run = await room.start(parent_of_one)
        await wait_all_tasks_blocked()
        (ticket,) = taken
        with pytest.raises(NotHeldError):
            await recover_launch(room, ticket.id, revision=Revision(run.id))
        inner.submit(ticket)
        await run.result()


@pytest.mark.parametrize("result", [RuntimeError("the worker broke"), None, True, "returned"])
async def test_a_failed_join_gets_one_new_attempt_once_it_is_over(result: object) -> None:
    """R-73: a failed join is attempted anew only when its exit was reported and its ticket is done; then once."""
    async with open_room(name="main") as room:
        flaky = install(room, result=result, results=1)
        run = await room.start(parent_of_one)
        facts = await held_launch(room, run)
        launch = flaky.launches[0]
        old = launch.ticket
        assert old is not None
        old.exited = False
        with pytest.raises(LaunchNotRecoverableError):
            await recover(room, facts)
        old.exited = True
        launch.ticket = Ticket(launch)
        with pytest.raises(LaunchNotRecoverableError):
            await recover(room, facts)
        launch.ticket = old
        assert facts.state is LaunchState.FAILED
        await recover(room, facts)
        await run.result()
        report = await observe_settlement(room, run.id)

    assert len(flaky.submitted) == 2
    assert report.settled


async def test_an_entered_callback_is_never_entered_again() -> None:
    """R-74: a publication that entered and failed is not replayed by launch recovery: its own hold has rules."""
    entered: list[int] = []

    async def publish(_: object) -> None:
        entered.append(1)
        raise ValueError("no listener")

    async with open_room(name="main") as room:
        flaky = install(room)
        run = await room.start(slow_leaf, publish=publish)
        await run.wait_returned()
        await wait_all_tasks_blocked()
        (launch,) = flaky.launches
        (hold,) = room.held()
        room.pool.launches[id(launch)] = launch
        with pytest.raises(LaunchNotRecoverableError) as caught:
            await recover_launch(room, launch.id, revision=Revision(run.id))
        del room.pool.launches[id(launch)]
        abandon_held(room)

    assert caught.value.code == "consumed"
    assert (hold.phase, hold.launch_id) == ("publishing", None)
    assert entered == [1]


# -- launches of either executor ------------------------------------------------------------------------------------


async def test_a_launch_that_could_not_be_constructed_is_held_alone(worker: Worker) -> None:
    """R-70: task or thread, the one launch is held before it has a ticket; recovered, it is constructed under its id."""
    async with open_room(name="main") as room:
        flaky = install(room, worker.port, fail_construct=1)
        run = await room.start(worker.body)
        facts = await held_launch(room, run)
        other = await room.start(Worker(worker.port).body)
        of_other = await other.result()
        before = (run.status, list(worker.entered), list(flaky.submitted[1:]))
        after = await recover(room, facts)
        value = await run.result()

        assert room.held() == ()
        assert room.pool.launches == {}
    assert (facts.state, facts.error) == (LaunchState.RETAINED, "OSError")
    assert (of_other, value) == (worker.port, worker.port)
    assert before == (RunStatus.RUNNING, [], [])
    assert after.launch_id == facts.launch_id
    assert flaky.constructed.count(facts.launch_id) == 2
    assert worker.entered == [run]


async def test_a_submission_that_was_rejected_submits_the_same_ticket(worker: Worker) -> None:
    """R-71: task or thread, a rejected ticket is the one that is submitted again, and runs once."""
    async with open_room(name="main") as room:
        flaky = install(room, worker.port, fail_submit=2)
        run = await room.start(worker.body)
        facts = await held_launch(room, run)
        await recover(room, facts)
        again = await held_launch(room, run)
        await recover(room, again)
        await run.result()

    assert facts.state is LaunchState.SUBMITTING
    assert again.launch_id == facts.launch_id
    assert again.revision != facts.revision
    assert len(flaky.constructed) == 1
    assert len({id(ticket) for ticket in flaky.submitted}) == 1
    assert flaky.submitted[0].state is TicketState.DONE
    assert worker.entered == [run]


async def test_an_accepted_ticket_whose_reply_was_lost_runs_once(worker: Worker) -> None:
    """R-71: task or thread, it was accepted, so its hold ends by itself."""
    async with open_room(name="main") as room, room.watch() as watch:
        flaky = install(room, worker.port, lose_reply=1)
        run = await room.start(worker.body)
        await run.result()
        held = room.held()
        told = [type(event) for event in await events_until(watch, run)]

    assert held == ()
    assert [kind for kind in told if kind in (RunHeld, RunRecovered)] == [RunHeld, RunRecovered]
    assert len(flaky.submitted) == 1
    assert worker.entered == [run]


async def test_a_ticket_that_is_submitted_over_and_over_runs_once(worker: Worker) -> None:
    """R-71: task or thread, accepted with its reply lost, recovered, submitted again and late: it is claimed once."""
    async with open_room(name="main") as room:
        inner, keeps = getattr(room.pool, worker.port), Keeps(lose_reply=True)
        setattr(room.pool, worker.port, keeps)
        run = await room.start(worker.body)
        await recover(room, await held_launch(room, run))
        first, second = keeps.taken
        inner.submit(first)
        inner.submit(second)
        value = await run.result()
        held = room.held()
        inner.submit(first)
        await wait_all_tasks_blocked()

    assert first is second
    assert (value, held) == (worker.port, ())
    assert worker.entered == [run]


async def test_a_ticket_that_its_executor_used_up_is_never_submitted_again(worker: Worker) -> None:
    """R-72, R-76: whoever cancelled it while it was new, recovery is refused; only giving it up ends the hold."""

    class Spoils:
        def construct(self, launch: Launch) -> Ticket:
            return Ticket(launch)

        def submit(self, ticket: Ticket) -> None:
            submitted.append(ticket)
            ticket.cancel()
            raise OSError("shutting down")

    submitted: list[Ticket] = []
    async with open_room(name="main") as room:
        setattr(room.pool, worker.port, Spoils())
        run = await room.start(worker.body)
        facts = await held_launch(room, run)
        code = None
        try:
            await recover(room, facts)
        except LaunchNotRecoverableError as error:
            code = error.code
        still = await held_launch(room, run)
        abandon_held(room)
        outcome = await run.outcome()

    assert code == "consumed"
    assert still.revision == facts.revision
    assert len(submitted) == 1
    assert isinstance(outcome.error, RunAbandonedError)
    assert worker.entered == []


async def test_a_stale_revision_takes_no_launch_up(worker: Worker) -> None:
    """R-72: the revision of a hold's earlier form is refused, and the launch stays where it is."""
    async with open_room(name="main") as room:
        flaky = install(room, worker.port, fail_submit=2)
        run = await room.start(worker.body)
        facts = await held_launch(room, run)
        await recover(room, facts)
        again = await held_launch(room, run)
        with pytest.raises(StaleRevisionError):
            await recover(room, facts)
        submitted = len(flaky.submitted)
        await recover(room, again)
        await run.result()

    assert submitted == 2
    assert worker.entered == [run]


async def test_a_launch_that_was_given_up_never_runs(worker: Worker) -> None:
    """R-20, R-76: the waiter learns that it didn't happen, and a ticket that was accepted after all is used up."""
    async with open_room(name="main") as room:
        inner, keeps = getattr(room.pool, worker.port), Keeps(lose_reply=True)
        setattr(room.pool, worker.port, keeps)
        run = await room.start(worker.body)
        await held_launch(room, run)
        (given_up,) = abandon_held(room)
        outcome = await run.outcome()
        (ticket,) = keeps.taken
        inner.submit(ticket)
        await wait_all_tasks_blocked()
        record = await room.load(run.id)

    assert given_up.launch_id == ticket.id
    assert ticket.state is TicketState.CANCELLED
    assert isinstance(outcome.error, RunAbandonedError)
    assert worker.entered == []
    # Nothing ran, so nothing is unknown: the Run failed by what its body raised.
    assert record is not None
    assert record.status is RunStatus.FAILED
    assert record.family_return_ack is not None


async def test_a_callback_that_raised_is_not_entered_again(worker: Worker) -> None:
    """R-74: its error is its caller's, and nothing is left that could be taken up."""
    worker.raises = ValueError("entered")
    async with open_room(name="main") as room:
        flaky = install(room, worker.port)
        run = await room.start(worker.body)
        outcome = await run.outcome()
        (launch,) = flaky.launches
        with pytest.raises(ForeignRoomError):
            await recover_launch(room, launch.id, revision=Revision(run.id))

        assert room.held() == ()
    assert outcome.error is worker.raises
    assert worker.entered == [run]


async def test_a_recovered_launch_is_bound_to_its_run_whoever_recovers_it(worker: Worker) -> None:
    """R-75: recovered by another Run, it sees the Run that it belongs to, and the other one has its bindings back."""

    async def operate(run: Run[None]) -> None:
        await recover(room, facts)
        seen.append(current_run())

    seen: list[Run[Any] | None] = []
    async with open_room(name="main") as room:
        install(room, worker.port, fail_submit=1)
        run = await room.start(worker.body)
        facts = await held_launch(room, run)
        operator = await room.start(operate)
        await run.result()
        await operator.result()

    assert worker.entered == [run]
    assert seen == [operator]


# -- launches that end with their waiter -----------------------------------------------------------------------------


async def wait_on_the_pool(run: Run[str], worker: Worker) -> str:
    return await run._entry.room.pool.call(LaunchKind.WAIT, worker.as_task, run_id=run.id)


@pytest.mark.parametrize("plan", [{"fail_construct": 1}, {"fail_submit": 1}, "kept"])
@pytest.mark.parametrize("port", ["tasks", "threads"])
async def test_a_wait_or_thread_that_has_not_begun_ends_with_its_waiter(port: Port, plan: dict[str, int] | str) -> None:
    """R-76: held or only submitted, it is cancelled with its Run; its ticket is used up, and its hold ends."""
    worker = Worker(port)
    async with open_room(name="main") as room, room.watch() as watch:
        inner = getattr(room.pool, port)
        executor: Any = Keeps() if isinstance(plan, str) else install(room, port, **plan)
        setattr(room.pool, port, executor)
        run: Run[str] = await (room.start(worker.body) if port == "threads" else room.start(wait_on_the_pool, worker))
        await wait_all_tasks_blocked()
        (launch,) = room.pool.launches.values()
        ticket, held = launch.ticket, room.held()
        run.cancel()
        outcome = await run.outcome()
        events = await events_until(watch, run)
        actions = [event.action for event in events if isinstance(event, RunRecovered)]
        if ticket is not None:
            inner.submit(ticket)
            await wait_all_tasks_blocked()
        with pytest.raises(ForeignRoomError):
            await recover_launch(room, launch.id, revision=Revision(run.id))

        assert room.held() == ()
    assert outcome.status is RunStatus.CANCELLED
    assert actions == ["withdraw"] * len(held)
    assert (ticket is None) == (plan == {"fail_construct": 1})
    assert ticket is None or ticket.state is TicketState.CANCELLED
    assert worker.entered == []


@pytest.mark.parametrize("ends", ["cancelled", "with a value", "with an error"])
async def test_a_wait_that_runs_is_cancelled_with_its_waiter_and_waited_for(ends: str) -> None:
    """R-76: what it does on its way out is waited for, and what it comes to in spite of it is its caller's."""
    steps: list[str] = []
    blocked, go_on = trio.Event(), trio.Event()

    async def callback() -> str:
        try:
            await trio.sleep_forever()
        finally:
            steps.append("told")
            with trio.CancelScope(shield=True):
                blocked.set()
                await go_on.wait()
            steps.append("over")
            if ends == "with a value":
                return "value"  # noqa: B012  what is tested
            if ends == "with an error":
                raise KeyError

    async def body(run: Run[None]) -> None:
        try:
            steps.append(await room.pool.call(LaunchKind.WAIT, callback, run_id=run.id))
        except trio.Cancelled:
            steps.append("cancelled")
            raise
        except KeyError:
            steps.append("error")

    async with open_room(name="main") as room:
        run = await room.start(body)
        await wait_all_tasks_blocked()
        run.cancel()
        await blocked.wait()
        await wait_all_tasks_blocked()
        before = list(steps)
        go_on.set()
        outcome = await run.outcome()

    assert before == ["told"]
    assert steps == [
        "told",
        "over",
        {"cancelled": "cancelled", "with a value": "value", "with an error": "error"}[ends],
    ]
    assert outcome.status is (RunStatus.CANCELLED if ends == "cancelled" else RunStatus.COMPLETED)


async def test_only_waits_and_threads_end_with_their_waiter() -> None:
    """R-76: whatever else the pool does for a Run is done, though the Run is cancelled."""
    over = trio.Event()

    async def callback() -> None:
        await over.wait()

    async def body(run: Run[None]) -> None:
        await room.pool.call(LaunchKind.CLEANUP, callback, run_id=run.id)

    async with open_room(name="main") as room:
        run = await room.start(body)
        await wait_all_tasks_blocked()
        run.cancel()
        await wait_all_tasks_blocked()
        before = run.status
        over.set()
        outcome = await run.outcome()

    assert before is RunStatus.CANCELLING
    assert outcome.status is RunStatus.COMPLETED


async def test_a_thread_that_can_not_be_started_holds_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-71: that shows only once a thread is free; the same ticket is submitted again."""
    worker = Worker("threads")
    run_sync = trio.to_thread.run_sync
    refusals = [RuntimeError("can't start new thread")]

    async def refuse_once(*args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await run_sync(*args, **options)

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse_once)
    async with open_room(name="main") as room:
        run = await room.start(worker.body)
        facts = await held_launch(room, run)
        busy = foreign_work().count
        before = list(worker.entered)
        await recover(room, facts)
        value = await run.result()

    assert (facts.kind, facts.state, facts.error) == (LaunchKind.NATIVE, LaunchState.SUBMITTING, "RuntimeError")
    assert (busy, before) == (0, [])
    assert (value, worker.entered) == ("threads", [run])
