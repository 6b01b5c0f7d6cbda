"""Cancel requests: sticky, in one turn, for a Run and everything below it; flags, then callbacks, then scopes."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import FamilyCancelledError
from spindel.observe import RunCancelRequested, RunFinished, RunStarted
from spindel.runs import Room, Run, current_run, held_frontier, open_room
from spindel.store import AdmitRun, FinishRun, RunStatus
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from spindel.observe import RoomEvent
    from spindel.store import Store


async def park(_: Run[None]) -> None:
    await trio.sleep_forever()


async def give(_: Run[int], value: int) -> int:
    return value


async def collect(
    room: Room, events: list[RoomEvent], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with room.watch(buffer=10_000) as watch:
        task_status.started()
        async for event in watch:
            events.append(event)  # noqa: PERF401  seen as it comes, not at the end


class Tree:
    """A root with two children and a grandchild, all parked, and what happens to them, in order."""

    def __init__(self) -> None:
        self.runs: dict[str, Run[Any]] = {}
        self.order: list[str] = []

    async def node(self, run: Run[None], name: str, below: dict[str, Any]) -> None:
        self.runs[name] = run
        for child, further in below.items():
            await run.start_child(self.node, child, further)
        try:
            await trio.sleep_forever()
        finally:
            self.order.append(f"scope {name}")

    async def grow(self, room: Room) -> Run[None]:
        root = await room.start(self.node, "root", {"left": {"leaf": {}}, "right": {}})
        await wait_all_tasks_blocked()
        return root

    def note(self, name: str) -> None:
        def called(reason: str) -> None:
            flags = all(run.cancel_requested for run in self.runs.values())
            self.order.append(f"{name} {reason} {'flagged' if flags else 'unflagged'}")

        self.runs[name].add_cancel_callback(name, called)


async def test_flags_come_before_callbacks_parents_first_and_scopes_last(store: Store, nursery: trio.Nursery) -> None:
    """R-25: one request: all flags, then the parent's callbacks before the children's, then scopes; one event each."""
    tree = Tree()
    events: list[RoomEvent] = []

    async with open_room(store, name="r") as room:
        root = await tree.grow(room)
        await nursery.start(collect, room, events)
        for name in ("leaf", "right", "root", "left"):
            tree.note(name)
        answer = root.cancel("enough")
        now = list(tree.order)
        statuses = {run.status for run in tree.runs.values()}

    assert answer is True
    assert now[0] == "root enough flagged"
    assert sorted(now) == [f"{name} enough flagged" for name in ("leaf", "left", "right", "root")]
    assert now.index("left enough flagged") < now.index("leaf enough flagged")
    assert statuses == {RunStatus.CANCELLING}
    assert {run.cancel_reason for run in tree.runs.values()} == {"enough"}
    assert sorted(tree.order[4:]) == ["scope leaf", "scope left", "scope right", "scope root"]
    requested = [event.run_id for event in events if isinstance(event, RunCancelRequested)]
    assert requested[0] == root.id
    assert sorted(requested) == sorted(run.id for run in tree.runs.values())


async def test_a_second_request_calls_the_callbacks_again_and_changes_nothing(
    store: Store, nursery: trio.Nursery
) -> None:
    """R-25: asked twice: the first reason stays, there is one event, every callback is called twice."""
    tree = Tree()
    events: list[RoomEvent] = []

    async with open_room(store, name="r") as room:
        root = await tree.grow(room)
        await nursery.start(collect, room, events)
        for name in tree.runs:
            tree.note(name)
        answers = [root.cancel("first"), root.cancel("second")]
        called = list(tree.order)

    assert answers == [True, True]
    assert len(called) == 8
    assert all("first flagged" in line for line in called)
    assert len([event for event in events if isinstance(event, RunCancelRequested)]) == 4
    assert root.outcome_nowait().reason == "first"


@pytest.mark.parametrize("error", [ValueError("bad"), trio.WouldBlock()])
async def test_a_callback_that_raises_keeps_nobody_from_stopping(
    store: Store, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """R-25: one raising: it is logged, the others are called, the scopes are cancelled."""
    called: list[str] = []

    def broken(_: str) -> None:
        raise error

    async with open_room(store, name="r") as room:
        run = await room.start(park)
        run.add_cancel_callback("a", called.append)
        run.add_cancel_callback("b", broken)
        run.add_cancel_callback("c", called.append)
        run.cancel("enough")
        outcome = await run.outcome()

    assert called == ["enough", "enough"]
    assert outcome.status is RunStatus.CANCELLED
    assert [record.message for record in caplog.records if type(error).__name__ in record.message]


async def test_what_is_no_exception_in_a_callback_ends_the_room(store: Store) -> None:
    """R-25, R-29: a callback's SystemExit cancels all Runs, those it was asked for as well, and leaves by the block."""
    error = SystemExit(3)
    called: list[str] = []

    def leave(_: str) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        async with open_room(store, name="r") as room:
            runs = [await room.start(park), await room.start(park)]
            runs[0].add_cancel_callback("a", leave)
            runs[0].add_cancel_callback("b", called.append)
            assert runs[0].cancel("enough")
            await trio.sleep_forever()

    assert caught.value is error
    assert called == ["enough"]
    assert [run.outcome_nowait().reason for run in runs] == ["enough", "room-closing"]


async def test_a_late_callback_is_called_at_once_and_raises_to_its_registrar(store: Store) -> None:
    """R-25: one added late is called at once, and what it raises is the registrar's."""
    called: list[str] = []

    def broken(reason: str) -> None:
        raise ValueError(reason)

    async def body(run: Run[None]) -> None:
        run.cancel("enough")
        assert run.add_cancel_callback("late", called.append)
        called.append("registered")
        with pytest.raises(ValueError, match="enough"):
            run.add_cancel_callback("broken", broken)

    async with open_room(store, name="r") as room:
        await (await room.start(body)).outcome()

    assert called == ["enough", "registered"]


async def test_the_same_key_replaces_a_callback(store: Store) -> None:
    called: list[str] = []

    async with open_room(store, name="r") as room:
        run = await room.start(park)
        run.add_cancel_callback("key", lambda reason: called.append(f"old {reason}"))
        run.add_cancel_callback("key", lambda reason: called.append(f"new {reason}"))
        run.cancel("enough")

    assert called == ["new enough"]


async def test_a_callback_runs_as_its_run_and_under_no_frontier(store: Store) -> None:
    seen: list[tuple[bool, str | None]] = []

    async with open_room(store, name="r") as room:
        run = await room.start(park)
        run.add_cancel_callback("key", lambda _: seen.append((current_run() is run, held_frontier())))
        run.cancel()

    assert seen == [(True, None)]


@pytest.mark.parametrize("late", [False, True])
async def test_callbacks_that_ask_each_other_to_stop_come_to_an_end(store: Store, late: bool) -> None:
    """A callback may ask for itself, its parent, its siblings: nobody is told twice in one turn because of it."""
    counts: dict[int, int] = {}

    async def child(run: Run[None], number: int, parent: Run[None]) -> None:
        def called(_: str) -> None:
            counts[number] = counts.get(number, 0) + 1
            parent.cancel()
            run.cancel()

        if not late:
            run.add_cancel_callback("key", called)
        try:
            await trio.sleep_forever()
        finally:
            if late:
                run.add_cancel_callback("key", called)

    async def body(run: Run[None]) -> None:
        for number in range(12):
            await run.start_child(child, number, run)
        await trio.sleep_forever()

    async with open_room(store, name="r") as room:
        run = await room.start(body)
        await wait_all_tasks_blocked()
        run.cancel()

    assert counts == dict.fromkeys(range(12), 1)


async def test_a_callback_may_cancel_somebody_else(store: Store) -> None:
    async with open_room(store, name="r") as room:
        first, second = await room.start(park), await room.start(park)
        called: list[str] = []
        first.add_cancel_callback("key", lambda reason: called.append(str(second.cancel(f"{reason}-too"))))
        second.add_cancel_callback("key", called.append)
        first.cancel("enough")

    assert called == ["enough-too", "True"]
    assert second.outcome_nowait().reason == "enough-too"


async def test_a_decided_run_keeps_its_outcome_and_its_children_are_asked(store: Store, nursery: trio.Nursery) -> None:
    """R-26: cancelled after its decision: False, the outcome stands, the children are cancelled, no event of its own."""
    events: list[RoomEvent] = []
    called: list[str] = []
    children: list[Run[None]] = []

    async def body(run: Run[str]) -> str:
        children.append(await run.start_child(park))
        return "decided"

    async with open_room(store, name="r") as room:
        run = await room.start(body)
        run.add_cancel_callback("early", called.append)
        await nursery.start(collect, room, events)
        await wait_all_tasks_blocked()
        added = run.add_cancel_callback("late", called.append)
        answer = run.cancel("too-late")
        outcome = await run.outcome()
        after = run.cancel("much-too-late")

    assert (added, answer, after) == (False, False, False)
    assert outcome.value == "decided"
    assert called == []
    assert not run.cancel_requested
    assert children[0].outcome_nowait().reason == "too-late"
    assert [event.run_id for event in events if isinstance(event, RunCancelRequested)] == [children[0].id]


async def test_a_request_while_the_outcome_is_written_comes_too_late(
    faulty: FaultyStore, nursery: trio.Nursery
) -> None:
    """R-26: nothing touches a finishing that has begun."""
    async with open_room(faulty, name="r") as room:
        held = faulty.hold(of=FinishRun)
        run = await room.start(give, 1)
        await held.wait_reached()
        answer = run.cancel()
        held.release()
        value = await run.result()

    assert answer is False
    assert value == 1


async def test_a_cancelled_run_takes_no_children(store: Store) -> None:
    """R-42: cancelled before the reservation: refused, whatever the caller's scope."""
    async with open_room(store, name="r") as room:
        run = await room.start(park)
        run.cancel("enough")
        with pytest.raises(FamilyCancelledError, match="enough"):
            await run.start_child(park)
        with pytest.raises(FamilyCancelledError, match="enough"), run.reserve():
            raise AssertionError("nothing was reserved")
        live = room.live()

    assert len(live) == 1


async def test_a_child_whose_row_is_in_flight_starts_cancelled(faulty: FaultyStore, nursery: trio.Nursery) -> None:
    """R-42: asked while its first row was written: admitted, and it meets the request at its first checkpoint."""
    seen: list[tuple[bool, str | None]] = []
    started: list[Run[None]] = []
    events: list[RoomEvent] = []

    async def child(run: Run[None]) -> None:
        seen.append((run.cancel_requested, run.cancel_reason))
        await trio.lowlevel.checkpoint()
        seen.append((False, "went on"))

    async def start(parent: Run[None]) -> None:
        started.append(await parent.start_child(child))

    async with open_room(faulty, name="r") as room:
        await nursery.start(collect, room, events)
        parent = await room.start(park)
        held = faulty.hold(of=AdmitRun)
        nursery.start_soon(start, parent)
        await held.wait_reached()
        parent.cancel("enough")
        held.release()
        await wait_all_tasks_blocked()

    assert seen == [(True, "enough")]
    assert started[0].outcome_nowait().reason == "enough"
    told = [type(event) for event in events if getattr(event, "run_id", None) == started[0].id]
    assert told == [RunStarted, RunCancelRequested, RunFinished]


@pytest.mark.parametrize("through", ["itself", "parent", "room"])
async def test_a_value_completes_a_run_whose_plain_tasks_are_cancelled(store: Store, through: str) -> None:
    """R-24: a body's value is the outcome also after a request, whichever scope the request reaches the tasks through."""
    go_on = trio.Event()
    children: list[Run[str]] = []

    async def deaf(run: Run[str]) -> str:
        run.start_soon(trio.sleep_forever)
        with trio.CancelScope(shield=True):
            await go_on.wait()
        return "done"

    async def parent(run: Run[None]) -> None:
        children.append(await run.start_child(deaf))
        await trio.sleep_forever()

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        match through:
            case "itself":
                children[0].cancel()
            case "parent":
                run.cancel()
            case _:
                room.cancel_all()
        await wait_all_tasks_blocked()
        go_on.set()
        outcome = await children[0].outcome()
        run.cancel()

    assert (outcome.status, outcome.value) == (RunStatus.COMPLETED, "done")


async def test_a_request_reaches_the_plain_tasks_whatever_the_body_does(store: Store) -> None:
    """R-25: plain tasks are cancelled in the same turn, also when the body has ended or doesn't listen."""
    ends: list[str] = []
    go_on = trio.Event()

    async def plain(name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ends.append(name)

    async def deaf(run: Run[str]) -> str:
        run.start_soon(plain, "under a deaf body")
        with trio.CancelScope(shield=True):
            await go_on.wait()
        return "done"

    async def over(run: Run[str]) -> str:
        run.start_soon(plain, "after the body")
        return "done"

    async with open_room(store, name="r") as room:
        runs = [await room.start(deaf), await room.start(over)]
        await wait_all_tasks_blocked()
        room.cancel_all()
        await wait_all_tasks_blocked()
        cancelled = sorted(ends)
        go_on.set()
        outcomes = [await run.outcome() for run in runs]

    assert cancelled == ["after the body", "under a deaf body"]
    # Both returned a value; their plain tasks had nothing but Cancelled to say.
    assert [outcome.status for outcome in outcomes] == [RunStatus.COMPLETED, RunStatus.COMPLETED]


async def test_a_value_returned_after_a_request_counts(store: Store) -> None:
    """R-24: a Run that was asked to stop and returns a value is completed."""

    async def body(run: Run[str]) -> str:
        asked = trio.Event()
        run.add_cancel_callback("stop", lambda _: asked.set())
        with trio.CancelScope(shield=True):
            await asked.wait()
        return "saved what there was"

    async with open_room(store, name="r") as room:
        run = await room.start(body)
        await wait_all_tasks_blocked()
        run.cancel()
        outcome = await run.outcome()

    assert (outcome.status, outcome.value) == (RunStatus.COMPLETED, "saved what there was")


async def test_the_state_of_a_request_is_readable_from_a_thread(store: Store) -> None:
    async def body(run: Run[Any]) -> Any:
        def look() -> tuple[RunStatus, bool, str | None]:
            trio.from_thread.run_sync(run.cancel, "from-a-thread")
            return run.status, run.cancel_requested, run.cancel_reason

        with trio.CancelScope(shield=True):
            return await run.run_native(look)

    async with open_room(store, name="r") as room:
        outcome = await (await room.start(body)).outcome()

    assert outcome.value == (RunStatus.CANCELLING, True, "from-a-thread")


async def test_a_reason_may_be_a_member_of_an_enumeration(store: Store) -> None:
    class Reason(StrEnum):
        OUT_OF_TIME = "out-of-time"

    async with open_room(store, name="r") as room:
        run = await room.start(park, kind=Reason.OUT_OF_TIME)
        run.cancel(Reason.OUT_OF_TIME)
        await run.wait_returned()
        row = await room.load(run.id)

    assert row is not None
    assert (row.kind, row.reason) == ("out-of-time", "out-of-time")


@pytest.mark.slow
async def test_children_of_a_deep_tree_are_reached_without_recursion() -> None:
    ended: list[int] = []

    async def node(run: Run[None], depth: int) -> None:
        if depth:
            await run.start_child(node, depth - 1)
        try:
            await trio.sleep_forever()
        finally:
            ended.append(depth)

    async with open_room(name="r", durable=False) as room:
        run = await room.start(node, 1500)
        await wait_all_tasks_blocked()
        asked = room.cancel_all()

    assert asked == 1501
    assert len(ended) == 1501
    assert run.outcome_nowait().status is RunStatus.CANCELLED


async def test_a_plain_task_that_waits_for_its_nursery_is_cancelled_with_its_run(store: Store) -> None:
    """R-25: a task started in the turn of the request has no nursery yet; it is cancelled as soon as it has one."""
    let_go = trio.Event()
    noted: list[str] = []

    async def plain() -> None:
        try:
            await let_go.wait()
        except trio.Cancelled:
            noted.append("cancelled")
            raise

    async def body(run: Run[int]) -> int:
        run.start_soon(plain)
        run.cancel()
        return 7

    async with open_room(store, name="r") as room:
        run = await room.start(body)
        await wait_all_tasks_blocked()
        let_go.set()
        outcome = await run.outcome()

    assert noted == ["cancelled"]
    assert (outcome.status, outcome.value) == (RunStatus.COMPLETED, 7)
