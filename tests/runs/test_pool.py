"""The worker pool: launches as tasks, their tickets, and who is believed about a family's return."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import RunAbandonedError
from spindel.ids import LaunchId
from spindel.operator import abandon_held, recover_launch
from spindel.runs import (
    FamilyReturned,
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
from spindel.store import AdmitRun, RunStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.runs import Executor, Finishing, Launch, Outcome
    from spindel.store import Store
    from spindel.testing.faults import FaultyStore

THREADS = 8
# A ticket only looks at its launch to be named.
LAUNCH: Any = None


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


def is_open(run: Run[Any]) -> bool:
    try:
        run.outcome_nowait()
    except trio.WouldBlock:
        return True
    return False


async def launches_of(room: Room, run: Run[Any]) -> tuple[LaunchFacts, ...]:
    return (await observe_settlement(room, run.id)).launches


# -- tickets ---------------------------------------------------------------------------------------------------------


def test_a_ticket_is_claimed_once_by_threads_that_race() -> None:
    """R-71: of all who claim a ticket, from whatever thread, one gets it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            ticket, won, start = Ticket(LAUNCH), list[bool](), threading.Barrier(THREADS)

            def claim(ticket: Ticket = ticket, won: list[bool] = won, start: threading.Barrier = start) -> None:
                start.wait()
                won.append(ticket.claim())

            threads = [threading.Thread(target=claim) for _ in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            assert sorted(won) == [False] * (THREADS - 1) + [True]
            assert ticket.state is TicketState.RUNNING
    finally:
        sys.setswitchinterval(interval)


def test_a_ticket_is_cancelled_only_while_it_is_new() -> None:
    """R-71: cancelled, it is never claimed; claimed, it is never cancelled; done, it stays so."""
    cancelled, claimed = Ticket(LAUNCH), Ticket(LAUNCH)

    assert cancelled.cancel()
    assert not cancelled.claim()
    assert not cancelled.cancel()
    assert cancelled.state is TicketState.CANCELLED
    assert claimed.claim()
    assert not claimed.cancel()
    claimed.finish()
    assert claimed.state is TicketState.DONE
    assert not claimed.claim()


def test_only_a_running_ticket_is_finished() -> None:
    """R-71: what never ran is never done."""
    ticket = Ticket(LAUNCH)
    ticket.finish()

    assert ticket.state is TicketState.NEW


# -- the order of a launch -------------------------------------------------------------------------------------------


@attrs.define
class Spy:
    """Notes what exists of a launch when the executor is called."""

    room: Room
    executor: Executor
    log: list[tuple[str, LaunchState, LaunchId, Ticket | None, bool]] = attrs.Factory(list)

    def note(self, what: str, launch: Launch) -> None:
        retained = launch in self.room.pool.launches.values()
        self.log.append((what, launch.state, launch.id, launch.ticket, retained))

    def construct(self, launch: Launch) -> Ticket:
        self.note("construct", launch)
        return self.executor.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        self.note("submit", ticket.launch)
        self.executor.submit(ticket)


async def test_a_launch_is_retained_constructed_registered_and_submitted_in_this_order(store: Store) -> None:
    """R-69: callback and id are kept before the ticket is made, and the very ticket is known before it is submitted."""
    admitted, done = trio.Event(), trio.Event()
    published: list[object] = []

    async def publish(_: Outcome[Any]) -> None:
        published.append(None)

    async def parent(run: Run[None]) -> None:
        await run.run_native(published.append, None)
        await run.start_child(wait_for, done, publish=publish)
        admitted.set()

    async with open_room(store, name="r") as room:
        spy, thread_spy = Spy(room, room.pool.tasks), Spy(room, room.pool.threads)
        room.pool.tasks, room.pool.threads = spy, thread_spy
        run = await room.start(parent)
        await admitted.wait()
        await wait_all_tasks_blocked()
        (join,) = await launches_of(room, run)
        done.set()
        await run.wait_returned()

    joins, publications, threads = spy.log[:2], spy.log[2:], thread_spy.log
    for (made, before, launch_id, no_ticket, kept), (submitted, after, same_id, ticket, still_kept) in (
        joins,
        publications,
        threads,
    ):
        assert (made, before, no_ticket, kept) == ("construct", LaunchState.RETAINED, None, True)
        assert (submitted, after, still_kept) == ("submit", LaunchState.SUBMITTING, True)
        assert ticket is not None
        assert launch_id == same_id == ticket.id
        assert ticket.state is TicketState.DONE
    assert (join.launch_id, join.kind, join.state) == (joins[0][2], LaunchKind.JOIN, LaunchState.RUNNING)
    assert published == [None, None]


async def test_an_executor_that_runs_a_ticket_twice_runs_its_launch_once(store: Store) -> None:
    """R-71: whoever submits how often, the ticket is claimed once."""
    published: list[object] = []

    @attrs.frozen
    class Twice:
        executor: Executor

        def construct(self, launch: Launch) -> Ticket:
            return self.executor.construct(launch)

        def submit(self, ticket: Ticket) -> None:
            self.executor.submit(ticket)
            self.executor.submit(ticket)

    async def publish(_: Outcome[Any]) -> None:
        published.append(None)

    async with open_room(store, name="r") as room:
        room.pool.tasks = Twice(room.pool.tasks)
        await room.start(give, publish=publish)

    assert published == [None]


# -- who is believed -------------------------------------------------------------------------------------------------


async def _raise() -> None:
    raise OSError("secret-token")


async def _none() -> None:
    pass


async def _true() -> bool:
    return True


async def _foreign_run() -> FamilyReturned:
    return FamilyReturned(UUID(int=7), UUID(int=8))  # type: ignore[arg-type]


class Lookalike(FamilyReturned):
    """Says that it equals whatever it is compared with, and yet was made by nobody who joined."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = FamilyReturned.__hash__


@attrs.define
class Substitute:
    """Runs another function instead of the first join, as a broken worker would."""

    executor: Executor
    answer: Callable[[Launch], Callable[[], Awaitable[object]]]
    used: bool = False

    def construct(self, launch: Launch) -> Ticket:
        return self.executor.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        launch = ticket.launch
        if launch.kind is LaunchKind.JOIN and not self.used:
            self.used = True
            original = launch.fn

            async def once() -> object:
                launch.fn = original
                return await self.answer(launch)()

            launch.fn = once
        self.executor.submit(ticket)


def _lookalike(launch: Launch) -> Callable[[], Awaitable[object]]:
    async def answer() -> FamilyReturned:
        return Lookalike(launch.entry.run_id, launch.room.incarnation)

    return answer


def _other_incarnation(launch: Launch) -> Callable[[], Awaitable[object]]:
    async def answer() -> FamilyReturned:
        return FamilyReturned(launch.entry.run_id, UUID(int=8))

    return answer


ANSWERS: dict[str, tuple[Callable[[Launch], Callable[[], Awaitable[object]]], str]] = {
    "raises": (lambda _: _raise, "OSError"),
    "None": (lambda _: _none, "TypeError"),
    "True": (lambda _: _true, "TypeError"),
    "of another run": (lambda _: _foreign_run, "TypeError"),
    "of another incarnation": (_other_incarnation, "TypeError"),
    "a lookalike": (_lookalike, "TypeError"),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_only_the_familys_own_sentinel_acknowledges_its_return(store: Store, answer: str) -> None:
    """R-49: anything else from a join worker is held, without a witness; recovered, the family has returned."""
    function, code = ANSWERS[answer]
    done = trio.Event()

    async def parent(run: Run[None]) -> None:
        await run.start_child(wait_for, done)

    async with open_room(store, name="r") as room:
        room.pool.tasks = Substitute(room.pool.tasks, function)
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        done.set()
        await wait_all_tasks_blocked()
        (held,) = room.held()
        (launch,) = await launches_of(room, run)
        open_before, before = is_open(run), await room.load(run.id)
        assert launch.revision is not None
        await recover_launch(room, launch.launch_id, revision=launch.revision)
        await run.wait_returned()
        after = await room.load(run.id)

    assert (held.run_id, held.launch_id, held.phase, held.code) == (run.id, launch.launch_id, "join", code)
    assert (launch.state, launch.held, launch.error) == (LaunchState.FAILED, True, code)
    assert open_before
    assert before is not None
    assert (before.status, before.family_return_ack) == (RunStatus.RUNNING, None)
    assert after is not None
    assert after.status is RunStatus.COMPLETED
    assert after.family_return_ack is not None


@pytest.mark.parametrize("answer", ["None", "raises"])
async def test_a_join_that_was_given_up_gives_no_witness_and_its_children_are_waited_for(
    store: Store, answer: str
) -> None:
    """R-20, R-49: abandoned, the row stays as it is; the children's tasks are still joined before the Run goes."""
    done = trio.Event()

    async def parent(run: Run[None]) -> None:
        await run.start_child(wait_for, done)

    async with open_room(store, name="r") as room:
        room.pool.tasks = Substitute(room.pool.tasks, ANSWERS[answer][0])
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        (given_up,) = abandon_held(room)
        await wait_all_tasks_blocked()
        open_before = is_open_or_abandoned(run)
        done.set()
        with pytest.raises(RunAbandonedError):
            await run.wait_returned()
        record = await room.load(run.id)

    assert given_up.run_id == run.id
    assert open_before == "open"
    assert record is not None
    assert (record.status, record.family_return_ack) == (RunStatus.RUNNING, None)


@attrs.frozen
class RefusesJoins:
    """No worker is to be had for a join."""

    executor: Executor

    def construct(self, launch: Launch) -> Ticket:
        if launch.kind is LaunchKind.JOIN:
            raise OSError("no memory")
        return self.executor.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        self.executor.submit(ticket)


async def test_a_join_is_given_up_while_a_child_is_on_its_way(faulty: FaultyStore) -> None:
    """R-20, R-18: a child whose row is being written then still starts, is waited for, and is joined by its parent."""
    children: list[Run[int]] = []

    async def admit(parent: Run[None]) -> None:
        children.append(await parent.start_child(give))

    async with open_room(faulty, name="r") as room, trio.open_nursery() as nursery:
        room.pool.tasks = RefusesJoins(room.pool.tasks)
        stop = trio.Event()
        run = await room.start(wait_for, stop)
        row = faulty.hold(of=AdmitRun)
        nursery.start_soon(admit, run)
        await row.wait_reached()
        stop.set()
        await wait_all_tasks_blocked()
        (given_up,) = abandon_held(room)
        await wait_all_tasks_blocked()
        before = (is_open_or_abandoned(run), list(children))
        row.release()
        with pytest.raises(RunAbandonedError):
            await run.wait_returned()
        (child,) = children
        value = (await child.outcome()).value
        records = [await room.load(run_id) for run_id in (run.id, child.id)]

        assert room.live() == ()
    assert (given_up.run_id, given_up.phase) == (run.id, "join")
    assert before == ("open", [])
    assert value == 1
    assert [(row.status, row.family_return_ack is None) for row in records if row is not None] == [
        (RunStatus.RUNNING, True),
        (RunStatus.COMPLETED, False),
    ]


@pytest.mark.parametrize("raises", [OSError, RunAbandonedError, None])
async def test_the_end_of_a_run_that_broke_down_is_given_up_and_its_children_are_waited_for(
    store: Store, raises: type[Exception] | None
) -> None:
    """R-20: a finisher that never joined is given up; nurseries, children and threads still come back, and all ends."""
    stop = trio.Event()

    class Breaks:
        async def finish(self, finishing: Finishing) -> None:
            if raises is not None:
                raise raises(finishing.run_id)

    async def parent(run: Run[None]) -> None:
        run.start_soon(trio.lowlevel.checkpoint)
        children.append(await run.start_child(wait_for, stop))

    children: list[Run[None]] = []
    async with open_room(store, name="r") as room:
        run = await room.start(parent, finisher=Breaks())
        await wait_all_tasks_blocked()
        abandon_held(room)
        await wait_all_tasks_blocked()
        open_before = is_open_or_abandoned(run)
        stop.set()
        with pytest.raises(RunAbandonedError):
            await run.wait_returned()
        record = await room.load(run.id)

    assert open_before == "open"
    assert children[0].outcome_nowait().status is RunStatus.COMPLETED
    assert record is not None
    assert (record.status, record.family_return_ack) == (RunStatus.RUNNING, None)


async def test_an_interrupt_in_a_publication_ends_the_room(store: Store) -> None:
    """R-29: nobody waits for a publication, so what is no `Exception` leaves through the room's block."""

    async def publish(_: Outcome[Any]) -> None:
        raise SystemExit(3)

    async def live() -> None:
        with pytest.raises(SystemExit) as caught:
            async with open_room(store, name="r") as room:
                rooms.append(room)
                await room.start(wait_for, trio.Event())
                await room.start(give, publish=publish)
                await trio.sleep_forever()
        codes.append(caught.value.code)

    rooms: list[Room] = []
    codes: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        await wait_all_tasks_blocked()
        (held,) = abandon_held(rooms[0])
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    rows = (await rooms[0].list_runs()).runs

    assert (held.phase, held.code) == ("publishing", "SystemExit")
    assert codes == [3]
    assert {(row.status, row.reason) for row in rows} == {
        (RunStatus.COMPLETED, None),
        (RunStatus.CANCELLED, "room-closing"),
    }


def is_open_or_abandoned(run: Run[Any]) -> str:
    try:
        return "open" if is_open(run) else "ended"
    except RunAbandonedError:
        return "abandoned"


# -- what a launch sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
async def test_a_launch_runs_in_a_fresh_context_bound_to_its_run(store: Store, fails: bool) -> None:
    """R-75: a launch sees no variable of its caller, its Run is current, and the caller has its own bindings back."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[object] = []

    async def callback() -> int:
        seen.append((variable.get(), current_run()))
        variable.set("the launch's")
        await trio.lowlevel.checkpoint()
        if fails:
            raise OSError
        return 7

    async def body(run: Run[None]) -> None:
        variable.set("the caller's")
        if fails:
            with pytest.raises(OSError):  # noqa: PT011  any message will do
                await room.pool.call(LaunchKind.CLEANUP, callback, run_id=run.id)
        else:
            assert await room.pool.call(LaunchKind.CLEANUP, callback, run_id=run.id) == 7
        seen.append((variable.get(), current_run()))

    async with open_room(store, name="r") as room:
        variable.set("the room's")
        run = await room.start(body)
        await run.result()

        assert seen == [("unset", run), ("the caller's", run)]
        assert (variable.get(), current_run()) == ("the room's", None)


async def test_a_recovered_launch_runs_in_a_fresh_context_bound_to_its_run(store: Store) -> None:
    """R-75: recovered from another task, with other bindings, a launch sees neither those nor the first caller's."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[object] = []

    async def publish(_: Outcome[Any]) -> None:
        seen.append((variable.get(), current_run()))

    @attrs.define
    class RefusesOnce:
        executor: Executor
        refused: bool = False

        def construct(self, launch: Launch) -> Ticket:
            return self.executor.construct(launch)

        def submit(self, ticket: Ticket) -> None:
            if not self.refused:
                self.refused = True
                raise OSError("no thread")
            self.executor.submit(ticket)

    async def body(run: Run[None]) -> None:
        variable.set("the body's")

    async with open_room(store, name="r") as room:
        room.pool.tasks = RefusesOnce(room.pool.tasks)
        run = await room.start(body, publish=publish)
        await run.wait_returned()
        variable.set("the operator's")
        (launch,) = await launches_of(room, run)
        assert launch.revision is not None
        await recover_launch(room, launch.launch_id, revision=launch.revision)
        await wait_all_tasks_blocked()

        assert seen == [("unset", run)]
        assert (variable.get(), current_run()) == ("the operator's", None)


async def test_a_launch_that_never_began_and_was_given_up_raises_to_its_caller(store: Store) -> None:
    """R-20: whoever waits for a launch that an operator abandoned learns that it did not happen."""

    @attrs.frozen
    class Refuses:
        def construct(self, launch: Launch) -> Ticket:
            raise OSError("no memory")

        def submit(self, ticket: Ticket) -> None:
            raise AssertionError("there is no ticket")

    called: list[str] = []

    async def callback() -> None:
        called.append("entered")

    async def body(run: Run[None]) -> None:
        await room.pool.call(LaunchKind.CLEANUP, callback, run_id=run.id)

    async with open_room(store, name="r") as room:
        executor, room.pool.tasks = room.pool.tasks, Refuses()
        run = await room.start(body)
        await wait_all_tasks_blocked()
        room.pool.tasks = executor
        (given_up,) = abandon_held(room)
        outcome = await run.outcome()

    assert (given_up.phase, given_up.code) == ("cleanup", "OSError")
    assert called == []
    assert outcome.status is RunStatus.FAILED
    assert isinstance(outcome.error, RunAbandonedError)
