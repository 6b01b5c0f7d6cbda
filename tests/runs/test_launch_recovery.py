"""Launches whose construction or submission failed, and joins that failed: held, and taken up where they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import ForeignRoomError, LaunchNotRecoverableError, NotHeldError, StaleRevisionError
from spindel.ids import LaunchId, Revision
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
    observe_settlement,
    open_room,
)
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.runs import Launch


@attrs.define
class FlakyExecutor:
    """Fails constructions and submissions when told to, and notes what it was asked."""

    inner: Executor
    fail_construct: int = 0
    fail_submit: int = 0
    lose_reply: int = 0
    result: Any = None
    results: int = 0
    report_exit: bool = True
    finish_ticket: bool = True
    constructed: list[LaunchId] = attrs.Factory(list)
    submitted: list[Ticket | None] = attrs.Factory(list)
    launches: list[Launch] = attrs.Factory(list)

    def construct(self, launch: Launch) -> Ticket:
        self.constructed.append(launch.id)
        if self.fail_construct:
            self.fail_construct -= 1
            raise OSError("no worker can be made")
        return self.inner.construct(launch)

    def submit(self, launch: Launch, run: Callable[[Launch], Awaitable[None]]) -> None:
        self.submitted.append(launch.ticket)
        self.launches.append(launch)
        if self.fail_submit:
            self.fail_submit -= 1
            raise OSError("not accepted")
        if self.results:
            self.results -= 1
            result = self.result

            async def scripted() -> Any:
                if isinstance(result, Exception):
                    raise result
                return result

            original, launch.fn = launch.fn, scripted

            async def run_scripted(launch: Launch) -> None:
                await run(launch)
                launch.fn = original

            self.inner.submit(launch, run_scripted)
        else:
            self.inner.submit(launch, run)
        if self.lose_reply:
            self.lose_reply -= 1
            raise OSError("accepted, but the reply was lost")


async def slow_leaf(run: Run[None]) -> None:
    await wait_all_tasks_blocked()


async def parent_of_one(run: Run[None]) -> None:
    await run.start_child(slow_leaf)


def install(room: Room, **plan: Any) -> FlakyExecutor:
    flaky = FlakyExecutor(room.pool.tasks, **plan)
    room.pool.tasks = flaky
    return flaky


async def held_launch(room: Room, run: Run[Any]) -> LaunchFacts:
    await wait_all_tasks_blocked()
    (facts,) = (await observe_settlement(room, run.id)).launches
    assert facts.held
    return facts


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
    assert one is not None
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
    accepted: list[Launch] = []

    class Forgetful:
        """Accepts, and loses its first reply."""

        def construct(self, launch: Launch) -> Ticket:
            return Ticket(launch.id)

        def submit(self, launch: Launch, run: Callable[[Launch], Awaitable[None]]) -> None:
            accepted.append(launch)
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
        for launch in accepted:
            inner.submit(launch, room.pool.run_ticket)

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
        taken: list[Launch] = []

        class Keeps:
            def construct(self, launch: Launch) -> Ticket:
                return Ticket(launch.id)

            def submit(self, launch: Launch, run: Callable[[Launch], Awaitable[None]]) -> None:
                taken.append(launch)

        inner, room.pool.tasks = room.pool.tasks, Keeps()
        run = await room.start(parent_of_one)
        await wait_all_tasks_blocked()
        (launch,) = taken
        with pytest.raises(NotHeldError):
            await recover_launch(room, launch.id, revision=Revision(run.id))
        inner.submit(launch, room.pool.run_ticket)
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
        launch.exited = False
        with pytest.raises(LaunchNotRecoverableError):
            await recover(room, facts)
        launch.exited = True
        launch.ticket = Ticket(launch.id)
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
