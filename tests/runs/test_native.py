"""Native launches: threads that a Run waits for, whatever is cancelled, and which it never abandons."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from spindel.clock import foreign_work
from spindel.errors import FamilySealedError, InvalidRecordError, RoomCloseRefusedError, RunFailedError
from spindel.runs import (
    LaunchKind,
    LaunchState,
    Room,
    RoomState,
    Run,
    current_run,
    observe_settlement,
    open_room,
)
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spindel.runs import Launch, Outcome, Ticket
    from spindel.store import Store


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


def is_open(run: Run[Any]) -> bool:
    try:
        run.outcome_nowait()
    except trio.WouldBlock:
        return True
    return False


class Deaf:
    """A function that a thread stays in until the test lets it go."""

    def __init__(self) -> None:
        self.entered = trio.Event()
        self.threads = 0
        self._released = threading.Event()

    def __call__(self) -> str:
        trio.from_thread.run_sync(self._enter)
        self._released.wait()
        return "heard"

    def release(self) -> None:
        self._released.set()

    def _enter(self) -> None:
        self.threads += 1
        self.entered.set()


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    """A deaf function, let go at the end whatever becomes of the test."""
    deaf = Deaf()
    yield deaf
    deaf.release()


# -- what a thread gives back ----------------------------------------------------------------------------------------


async def test_a_native_launch_gives_the_value_of_its_function(store: Store) -> None:
    """R-76: it runs in another thread, with its arguments."""

    async def body(run: Run[tuple[int, bool]]) -> tuple[int, bool]:
        return await run.run_native(lambda a, b: (a * b, threading.get_ident() != here), 6, 7)

    here = threading.get_ident()
    async with open_room(store, name="r") as room:
        assert await (await room.start(body)).result() == (42, True)


async def test_an_error_of_a_thread_is_raised_where_it_is_awaited(store: Store) -> None:
    """R-76: the body may handle it; else it is the Run's."""

    def fail() -> None:
        raise ValueError("from the thread")

    async def handle(run: Run[str]) -> str:
        with pytest.raises(ValueError, match="from the thread"):
            await run.run_native(fail)
        return "handled"

    async def let_go(run: Run[None]) -> None:
        await run.run_native(fail)

    async with open_room(store, name="r") as room:
        handled = await (await room.start(handle)).result()
        failed = await room.start(let_go)
        with pytest.raises(RunFailedError) as caught:
            await failed.result()
        record = await room.load(failed.id)
        busy = foreign_work().count

    assert handled == "handled"
    assert isinstance(caught.value.__cause__, ValueError)
    assert record is not None
    assert record.error == "ValueError: from the thread"
    assert busy == 0


async def test_an_interrupt_in_a_thread_ends_the_room(store: Store) -> None:
    """R-29: what is no `Exception` leaves through the room's block, after every Run has its row."""
    rooms: list[Room] = []

    async def body(run: Run[None]) -> None:
        await run.run_native(sys.exit, 3)

    async def other(_: Run[None]) -> None:
        await trio.sleep_forever()

    async def live() -> None:
        async with open_room(store, name="r") as room:
            rooms.append(room)
            await room.start(other)
            await room.start(body)

    with pytest.raises(SystemExit) as caught:
        await live()
    rows = (await rooms[0].list_runs()).runs

    assert caught.value.code == 3
    assert {(row.status, row.reason) for row in rows} == {
        (RunStatus.FAILED, "interrupted"),
        (RunStatus.CANCELLED, "room-closing"),
    }


async def test_a_thread_calls_back_into_the_loop(store: Store) -> None:
    """R-76: `trio.from_thread` works in a native launch: it may start children, cancel, and see that it is cancelled."""

    async def double(_: Run[int], value: int) -> int:
        return value * 2

    def thread(run: Run[Any]) -> tuple[int, bool, bool]:
        child = trio.from_thread.run(run.start_child, double, 21)
        value = trio.from_thread.run(child.result)
        before = run.cancel_requested
        trio.from_thread.run_sync(run.cancel)
        with pytest.raises(trio.Cancelled):
            trio.from_thread.check_cancelled()
        return value, before, run.cancel_requested

    async def body(run: Run[tuple[int, bool, bool]]) -> tuple[int, bool, bool]:
        return await run.run_native(thread, run)

    async with open_room(store, name="r") as room:
        run = await room.start(body)
        children = await run.result()
        page = await room.list_runs(parent=run.id)
        record = await room.load(run.id)

    assert children == (42, False, True)
    assert [row.status for row in page.runs] == [RunStatus.COMPLETED]
    assert record is not None
    assert record.caused_by == (page.runs[0].id,)


async def test_a_thread_reads_the_request_and_stops_by_itself(store: Store) -> None:
    """R-76: a thread that listens ends early, and its Run is cancelled with its reason."""
    asked = threading.Event()

    def listen(run: Run[Any]) -> str | None:
        trio.from_thread.run_sync(entered.set)
        asked.wait()
        return run.cancel_reason if run.cancel_requested else None

    async def body(run: Run[None]) -> None:
        seen.append(await run.run_native(listen, run))
        await trio.lowlevel.checkpoint()

    entered = trio.Event()
    seen: list[str | None] = []
    async with open_room(store, name="r") as room:
        run = await room.start(body)
        await entered.wait()
        run.cancel("enough")
        asked.set()
        await run.wait_returned()

    assert seen == ["enough"]
    assert run.outcome_nowait().status is RunStatus.CANCELLED


# -- never abandoned -------------------------------------------------------------------------------------------------


async def test_a_deaf_thread_keeps_its_run_and_its_room(store: Store, deaf: Deaf, mock_clock: MockClock) -> None:
    """R-76: cancelled while a thread is deaf for 30 s, `close` refuses and names the Run, and the block waits."""
    after: list[str] = []
    left = trio.Event()

    async def body(run: Run[None]) -> None:
        after.append(await run.run_native(deaf))
        await trio.lowlevel.checkpoint()
        after.append("after its next checkpoint")

    async def close(room: Room) -> None:
        with pytest.raises(RoomCloseRefusedError) as caught:
            await room.close(grace_seconds=5)
        refusals.append((trio.current_time(), caught.value.remaining))

    async def live() -> None:
        async with open_room(store, name="r") as room:
            rooms.append(room)
            runs.append(await room.start(body))
            await deaf.entered.wait()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(close, room)
                await wait_all_tasks_blocked()
                mock_clock.jump(5)
        left.set()

    rooms: list[Room] = []
    runs: list[Run[None]] = []
    refusals: list[tuple[float, object]] = []
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        while not refusals:
            await wait_all_tasks_blocked()
        mock_clock.jump(25)
        await wait_all_tasks_blocked()
        waited = (left.is_set(), is_open(runs[0]), rooms[0].state, runs[0].status)
        deaf.release()
    record = await rooms[0].load(runs[0].id)

    assert refusals == [(start + 5, (runs[0].id,))]
    assert waited == (False, True, RoomState.FENCED, RunStatus.CANCELLING)
    assert after == ["heard"]
    assert left.is_set()
    assert record is not None
    assert (record.status, record.reason) == (RunStatus.CANCELLED, "room-closing")
    assert record.family_return_ack is not None


async def test_a_launch_that_has_not_begun_is_cancelled_and_never_submitted(store: Store, deaf: Deaf) -> None:
    """R-76: waiting for a thread, a launch is cancelled at once; its function is never called, nor its ticket used."""
    called: list[str] = []

    async def hog(run: Run[None]) -> None:
        await run.run_native(deaf)

    async def body(run: Run[None]) -> None:
        await run.run_native(called.append, "called")

    async with open_room(store, name="r", threads_max=1) as room:
        await room.start(hog)
        await deaf.entered.wait()
        waiting = await room.start(body)
        await wait_all_tasks_blocked()
        (launch,) = [launch for launch in room.pool.launches.values() if launch.entry.run_id == waiting.id]
        ticket = launch.ticket
        before = (await observe_settlement(room, waiting.id)).launches
        waiting.cancel()
        await waiting.wait_returned()
        outcome = waiting.outcome_nowait()
        deaf.release()

    assert [(facts.kind, facts.state) for facts in before] == [(LaunchKind.NATIVE, LaunchState.SUBMITTING)]
    assert outcome.status is RunStatus.CANCELLED
    assert ticket is not None
    assert not ticket.claim()
    assert called == []


async def test_whoever_is_cancelled_already_launches_nothing(store: Store) -> None:
    """R-76: the cancellation is met before anything exists."""
    called: list[str] = []
    begun: list[Launch] = []

    class Notes:
        def construct(self, launch: Launch) -> Ticket:
            begun.append(launch)
            raise OSError

        def submit(self, ticket: Ticket) -> None:
            raise AssertionError("there is none")

    async def body(run: Run[None]) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await run.run_native(called.append, "called")

    async with open_room(store, name="r") as room:
        room.pool.threads = Notes()
        await (await room.start(body)).result()

    assert (called, begun) == ([], [])


async def test_a_launch_that_runs_is_seen_and_then_gone(store: Store, deaf: Deaf) -> None:
    """R-76: a running thread is a fact of its Run, and counts as work that a virtual clock can't see."""

    async def body(run: Run[None]) -> None:
        await run.run_native(deaf)

    async with open_room(store, name="r") as room:
        run = await room.start(body)
        await deaf.entered.wait()
        (facts,) = (await observe_settlement(room, run.id)).launches
        busy = foreign_work().count
        deaf.release()
        await run.wait_returned()
        idle = foreign_work().count

        assert (facts.kind, facts.state, facts.held) == (LaunchKind.NATIVE, LaunchState.RUNNING, False)
        assert facts.run_id == run.id
        assert (busy, idle) == (1, 0)
        assert room.pool.launches == {}


async def test_a_thread_that_somebody_else_launched_for_a_run_is_the_runs(store: Store, deaf: Deaf) -> None:
    """R-76: whoever asked for the launch, its Run stays live until the thread is back, and has no witness before."""
    stop = trio.Event()
    async with open_room(store, name="r") as room, trio.open_nursery() as nursery:
        run = await room.start(wait_for, stop)
        nursery.start_soon(run.run_native, deaf)
        await deaf.entered.wait()
        stop.set()
        await wait_all_tasks_blocked()
        open_before, before = is_open(run), await room.load(run.id)
        deaf.release()
        await run.wait_returned()
        after = await room.load(run.id)

    assert open_before
    assert before is not None
    assert (before.status, before.family_return_ack) == (RunStatus.RUNNING, None)
    assert after is not None
    assert after.family_return_ack is not None


async def test_a_waiter_that_is_cancelled_stays_until_the_thread_is_back(store: Store, deaf: Deaf) -> None:
    """R-76: a scope around the wait doesn't abandon the thread."""
    over: list[str] = []

    async def body(run: Run[None]) -> None:
        with trio.CancelScope() as scope:
            trio.lowlevel.current_trio_token().run_sync_soon(scope.cancel)
            over.append(await run.run_native(deaf))
        over.append("past the scope")

    async with open_room(store, name="r") as room:
        run = await room.start(body)
        await deaf.entered.wait()
        await wait_all_tasks_blocked()
        before = list(over)
        deaf.release()
        await run.result()

    assert before == []
    assert over == ["heard", "past the scope"]


async def test_a_run_waits_for_all_its_threads(store: Store) -> None:
    """R-76: two threads that others launched for a Run come back one after the other; it ends after the last."""
    first, second, stop = Deaf(), Deaf(), trio.Event()
    try:
        async with open_room(store, name="r") as room, trio.open_nursery() as nursery:
            run = await room.start(wait_for, stop)
            for deaf in (first, second):
                nursery.start_soon(run.run_native, deaf)
                await deaf.entered.wait()
            stop.set()
            await wait_all_tasks_blocked()
            first.release()
            while len((await observe_settlement(room, run.id)).launches) > 1:
                await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            open_before = is_open(run)
            second.release()
            await run.wait_returned()

            assert room.pool.launches == {}
    finally:
        first.release()
        second.release()
    assert open_before


async def test_an_ended_run_launches_no_thread(store: Store) -> None:
    """R-76: nobody would wait for it; where an id may come again, nor does it become another Run's thread."""
    called: list[str] = []
    over, stop = trio.Event(), trio.Event()
    over.set()
    async with open_room(store, name="r") as room, open_room(name="fleeting", durable=False) as fleeting:
        for place in (room, fleeting):
            ended = await place.start(wait_for, over)
            await ended.wait_returned()
            if place is fleeting:
                await place.start(wait_for, stop, run_id=ended.id)
            with pytest.raises(FamilySealedError):
                await ended.run_native(called.append, "called")
        stop.set()

    assert called == []


# -- how many --------------------------------------------------------------------------------------------------------


async def test_threads_are_bounded_and_all_launches_come_to_run(store: Store, deaf: Deaf) -> None:
    """R-76: no more than `threads_max` run at once; the others wait for a free thread, in a limiter of the room's."""

    async def body(run: Run[str]) -> str:
        return await run.run_native(deaf)

    async with open_room(store, name="r", threads_max=3) as room:
        runs = [await room.start(body) for _ in range(10)]
        while deaf.threads < 3 or room.pool.limiter.statistics().tasks_waiting < 7:
            await wait_all_tasks_blocked()
        statistics = room.pool.limiter.statistics()
        at_once = deaf.threads
        deaf.release()
        values = [await run.result() for run in runs]

    assert (statistics.borrowed_tokens, statistics.tasks_waiting) == (3, 7)
    assert at_once == 3
    assert values == ["heard"] * 10
    assert deaf.threads == 10


async def test_the_rooms_threads_are_not_trios_own(store: Store) -> None:
    """R-48: native launches go on while Trio's own limiter is exhausted."""
    limiter = trio.to_thread.current_default_thread_limiter()
    borrowers = [object() for _ in range(int(limiter.total_tokens))]
    for borrower in borrowers:
        limiter.acquire_on_behalf_of_nowait(borrower)

    async def body(run: Run[int]) -> int:
        return await run.run_native(lambda: 7)

    try:
        async with open_room(store, name="r") as room:
            value = await (await room.start(body)).result()
            total = room.pool.limiter.total_tokens
    finally:
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)

    assert value == 7
    assert total == 64


@pytest.mark.parametrize("threads_max", [0, -1])
def test_a_room_has_at_least_one_thread(threads_max: int) -> None:
    """R-76: a bound below one is refused before anything is opened."""
    with pytest.raises(InvalidRecordError, match="threads_max"):
        open_room(name="r", threads_max=threads_max)


# -- which Run it is -------------------------------------------------------------------------------------------------


async def test_the_current_run_is_known_wherever_its_code_runs(store: Store) -> None:
    """R-75: body, nursery, plain task, thread, the loop from a thread, callback, publication: all know whose they are."""
    seen: dict[str, Run[object] | None] = {}

    def note(where: str) -> None:
        seen[where] = current_run()

    async def note_soon(where: str) -> None:
        await trio.lowlevel.checkpoint()
        note(where)

    async def publish(_: Outcome[Any]) -> None:
        note("publication")

    async def body(run: Run[None]) -> None:
        note("body")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(note_soon, "nursery")
        run.start_soon(note_soon, "plain task")
        await run.run_native(note, "thread")
        await run.run_native(trio.from_thread.run, note_soon, "loop, from the thread")
        await run.run_native(trio.from_thread.run_sync, note, "loop at once, from the thread")
        run.add_cancel_callback("note", lambda _: note("callback"))
        run.cancel()

    async with open_room(store, name="r") as room:
        note("the room's block")
        stop = trio.Event()
        parent = await room.start(wait_for, stop)
        child = await parent.start_child(body, publish=publish)
        # Called from another Run's task, a callback still belongs to the Run that was asked.
        await child.wait_returned()
        stop.set()
        note("the room's block, afterwards")

    outside = {where for where, run in seen.items() if run is None}
    assert outside == {"the room's block", "the room's block, afterwards"}
    assert {where for where, run in seen.items() if run is child} == {
        "body",
        "nursery",
        "plain task",
        "thread",
        "loop, from the thread",
        "loop at once, from the thread",
        "callback",
        "publication",
    }


async def test_a_callback_knows_its_run_whoever_asked(store: Store) -> None:
    """R-75: a cancel callback is bound to its own Run, and the asker has its bindings back."""
    seen: list[Run[object] | None] = []
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    def callback(_: str) -> None:
        seen.append(current_run())
        variable.set("the callback's")

    async def asker(run: Run[None], other: Run[None]) -> None:
        other.cancel()
        seen.append(current_run())
        assert run is current_run()

    async with open_room(store, name="r") as room:
        other = await room.start(wait_for, trio.Event())
        other.add_cancel_callback("note", callback)
        run = await room.start(asker, other)
        await run.result()

        assert seen == [other, run]
        assert variable.get() == "unset"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_thread_sees_no_variable_of_its_caller_and_leaves_none_behind(store: Store, fails: bool) -> None:
    """R-75: a launch's context is fresh, in a thread that was used before as well; the caller has its own back."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[tuple[str, object]] = []

    def thread(write: Callable[[str], object]) -> None:
        seen.append((variable.get(), current_run()))
        write("the thread's")
        if fails:
            raise OSError

    async def body(run: Run[None]) -> None:
        variable.set("the caller's")
        for _ in range(3):
            try:
                await run.run_native(thread, variable.set)
            except OSError:
                assert fails
        seen.append((variable.get(), current_run()))

    async with open_room(store, name="r", threads_max=1) as room:
        run = await room.start(body)
        await run.result()

    assert seen == [("unset", run)] * 3 + [("the caller's", run)]
