"""Frontiers, and the waits that are refused because they could never end."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import InvalidRecordError, WaitRefusedError
from spindel.runs import (
    Finishing,
    Outcome,
    Room,
    RoomState,
    Run,
    current_run,
    frontier,
    held_frontier,
    observe_settlement,
    open_room,
)
from spindel.runs._frontier import Block
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from spindel.store import Store

REASONS = ("run-frontier", "room-gate", "host-line")


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


async def refusal(wait: Callable[[], Awaitable[object]]) -> str | None:
    """Give the reason for which a wait is refused at once, None if it begins."""
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await wait()
        except WaitRefusedError as error:
            return error.reason
    return None


def stepped(wait: Callable[[], Coroutine[Any, Any, object]]) -> str | None:
    """As `refusal`, for code that is no task: the wait is begun by hand, and not gone on with."""
    attempt = wait()
    try:
        attempt.send(None)
    except WaitRefusedError as error:
        return error.reason
    finally:
        attempt.close()
    return None


@attrs.frozen
class Stage:
    """A room with a live Run and one of its children, in which anybody may try to wait."""

    room: Room
    run: Run[None]
    child: Run[None]

    def waits(self) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
        lease_id = self.child._entry.lease_id
        return {
            "wait_returned": self.run.wait_returned,
            "outcome": self.run.outcome,
            "result": self.run.result,
            "wait_started": self.run.wait_started,
            "wait_lease": lambda: self.run.wait_lease(lease_id),
            "close": self.room.close,
        }

    async def refusals(self) -> dict[str, str | None]:
        return {name: await refusal(wait) for name, wait in self.waits().items()}

    def all_refused(self, reason: str | None) -> dict[str, str | None]:
        return dict.fromkeys(self.waits(), reason)


@pytest.fixture
async def stage(store: Store) -> AsyncIterator[Stage]:
    stop = trio.Event()
    async with open_room(store, name="r") as room:
        run = await room.start(wait_for, stop)
        yield Stage(room, run, await run.start_child(wait_for, stop))
        stop.set()


# -- under a frontier ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", REASONS)
async def test_the_holder_of_a_frontier_waits_for_nobody(stage: Stage, reason: str) -> None:
    """R-47: every wait of the holder is refused at once, with the frontier's reason, and changes nothing."""
    with frontier(reason):
        inside = await stage.refusals()
        told = held_frontier()
    after = await stage.refusals()

    assert inside == stage.all_refused(reason)
    assert told == reason
    assert after == stage.all_refused(None)
    assert held_frontier() is None
    assert stage.room.state is RoomState.OPEN
    assert not stage.run.cancel_requested


async def test_a_frontier_refuses_the_wait_for_a_run_that_has_ended_as_well(stage: Stage) -> None:
    """R-47: whether the wait would be short is not looked at: the refusal must not depend on a race."""
    ended = await stage.room.start(give)
    await ended.wait_returned()
    with frontier("host-line"):
        assert await refusal(ended.result) == "host-line"


async def test_the_innermost_frontier_gives_the_reason(stage: Stage) -> None:
    """R-47: frontiers nest; each ends with its block, an error included."""
    told: list[str | None] = []

    def fail_inside() -> None:
        with frontier("host-line"):
            told.append(held_frontier())
            raise KeyError

    with frontier("room-gate"):
        with pytest.raises(KeyError):
            fail_inside()
        told.append(held_frontier())

    assert (*told, held_frontier()) == ("host-line", "room-gate", None)


async def test_a_nursery_opened_under_a_frontier_is_covered_at_any_depth(stage: Stage) -> None:
    """R-47: the holder can't leave before its nursery's tasks, so they may wait for nobody either."""
    seen: list[dict[str, str | None]] = []

    async def deep(levels: int) -> None:
        seen.append(await stage.refusals())
        if levels:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deep, levels - 1)

    with frontier("host-line"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deep, 2)

    assert seen == [stage.all_refused("host-line")] * 3


async def test_tasks_that_were_merely_started_elsewhere_are_not_covered(stage: Stage) -> None:
    """R-47: in an older nursery, as a plain task, as a child: the holder waits for none of these."""
    seen: dict[str, object] = {}
    over = trio.Event()

    async def note(name: str) -> None:
        seen[name] = (await refusal(stage.child.wait_returned), held_frontier())

    async def child(_: Run[None], name: str) -> None:
        await note(name)

    async with trio.open_nursery() as older:
        with frontier("host-line"):
            older.start_soon(note, "older nursery")
            stage.run.start_soon(note, "plain task")
            stage.run.start_soon(note, "a second plain task")
            await stage.run.start_child(child, "child")
            await stage.room.start(child, "root")
            await wait_all_tasks_blocked()
            over.set()

    assert seen == dict.fromkeys(("older nursery", "plain task", "a second plain task", "child", "root"), (None, None))


async def test_a_room_opened_under_a_frontier_has_runs_that_are_covered(store: Store) -> None:
    """R-47: all of a room's tasks live in a nursery that its opener can't leave."""
    seen: list[object] = []

    async def note(_: Run[None]) -> None:
        seen.append(held_frontier())

    with frontier("host-line"):
        async with open_room(store, name="inner") as room:
            await room.start(note)

    assert seen == ["host-line"]


@pytest.mark.parametrize("by_token", [False, True])
async def test_a_thread_that_the_holder_entered_is_covered(stage: Stage, by_token: bool) -> None:
    """R-47: what a native launch of the holder does in the loop is refused, also in a task that is not the holder's."""
    seen: list[dict[str, str | None]] = []
    token = trio.lowlevel.current_trio_token()

    async def note() -> None:
        seen.append(await stage.refusals())

    def thread() -> None:
        if by_token:
            trio.from_thread.run(note, trio_token=token)
        else:
            trio.from_thread.run(note)

    with frontier("host-line"):
        await stage.run.run_native(thread)
    await stage.child.run_native(thread)

    assert seen[0] == stage.all_refused("host-line")
    # Outside the frontier only what is the launch's own is refused: its Run, that Run's room, and what is above it.
    assert seen[1] == stage.all_refused("self") | {"wait_lease": None}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("nested", [False, True])
async def test_a_thread_entered_under_a_frontier_waits_for_nobody(
    stage: Stage, native: bool, by_token: bool, nested: bool
) -> None:
    """R-47: entered by the holder, or by a task of a nursery in it; natively or plainly; with a token or without."""
    seen: list[dict[str, str | None]] = []
    token = trio.lowlevel.current_trio_token() if by_token else None

    async def note() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(note_there)

    async def note_there() -> None:
        seen.append(await stage.refusals())

    def thread() -> None:
        trio.from_thread.run(note, trio_token=token)

    async def enter() -> None:
        await (stage.run.run_native(thread) if native else trio.to_thread.run_sync(thread))

    with frontier("host-line"):
        if nested:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(enter)
        else:
            await enter()

    assert seen == [stage.all_refused("host-line")]


async def test_a_finisher_joins_under_no_frontier_of_a_thread_either(store: Store) -> None:
    """R-47: the join is refused in a thread that was entered under one, called back by token."""
    seen: list[str | None] = []
    token = trio.lowlevel.current_trio_token()

    class Careless:
        async def finish(self, finishing: Finishing) -> None:
            async def join() -> None:
                seen.append(await refusal(finishing.join))

            with frontier("host-line"):
                await trio.to_thread.run_sync(lambda: trio.from_thread.run(join, trio_token=token))
            await finishing.join()
            await finishing.persist_outcome()
            finishing.release_lease()

    async def parent(run: Run[None]) -> None:
        await run.start_child(give)

    async with open_room(store, name="r") as room:
        run = await room.start(parent, finisher=Careless())
        await run.result()

    assert seen == ["host-line"]


@pytest.mark.parametrize("native", [False, True])
async def test_a_thread_entered_after_a_frontier_may_wait(stage: Stage, native: bool) -> None:
    """R-47: what was left covers nobody, whoever's context it was in."""
    seen: list[str | None] = []
    token = trio.lowlevel.current_trio_token()

    async def note() -> None:
        seen.append(await refusal(stage.child.wait_returned))

    def thread() -> None:
        trio.from_thread.run(note, trio_token=token)

    with frontier("room-gate"), frontier("host-line"):
        pass
    await (stage.run.run_native(thread) if native else trio.to_thread.run_sync(thread))

    assert seen == [None]


async def test_a_thread_that_outlives_its_frontier_may_wait(stage: Stage) -> None:
    """R-47: abandoned by whoever entered it, a thread waits again once the frontier is left, and not before."""
    seen: list[str | None] = []
    token, left, over = trio.lowlevel.current_trio_token(), threading.Event(), trio.Event()

    async def note() -> None:
        seen.append(await refusal(stage.child.wait_returned))

    def thread() -> None:
        trio.from_thread.run(note, trio_token=token)
        trio.from_thread.run_sync(entered.cancel, trio_token=token)
        left.wait()
        trio.from_thread.run(note, trio_token=token)
        trio.from_thread.run_sync(over.set, trio_token=token)

    with frontier("host-line"), trio.CancelScope() as entered:
        await trio.to_thread.run_sync(thread, abandon_on_cancel=True)
    left.set()
    await over.wait()

    assert seen == ["host-line", None]


async def test_a_launch_that_outlives_its_frontier_may_wait(stage: Stage) -> None:
    """R-47: the same for a native launch of somebody in a nursery of the holder's, whose frontier ends meanwhile."""
    seen: list[str | None] = []
    token, left = trio.lowlevel.current_trio_token(), threading.Event()

    async def note() -> None:
        seen.append(await refusal(stage.child.wait_returned))

    def thread() -> None:
        trio.from_thread.run(note, trio_token=token)
        trio.from_thread.run_sync(entered.set)
        left.wait()
        trio.from_thread.run(note, trio_token=token)

    entered = trio.Event()
    async with trio.open_nursery() as nursery:
        # A block may end before what it covers does, if its holder leaves it by hand.
        block = frontier("host-line")
        block.__enter__()
        async with trio.open_nursery() as inner:
            inner.start_soon(stage.run.run_native, thread)
            await entered.wait()
            block.__exit__(None, None, None)
            left.set()
        nursery.cancel_scope.cancel()

    assert seen == ["host-line", None]


async def test_what_a_holder_starts_as_part_of_a_run_may_enter_threads_that_wait(stage: Stage) -> None:
    """R-47: children, roots and plain tasks leave the stretches of whoever started them behind, threads included."""
    seen: list[str | None] = []
    token, other = trio.lowlevel.current_trio_token(), await stage.room.start(wait_for, trio.Event())

    async def note() -> None:
        seen.append(await refusal(other.wait_returned))

    async def enter(*_: object) -> None:
        await trio.to_thread.run_sync(lambda: trio.from_thread.run(note, trio_token=token))
        if len(seen) == 4:
            over.set()

    over = trio.Event()
    with frontier("host-line"):
        await stage.room.start(enter)
        await stage.run.start_child(enter)
        stage.run.start_soon(enter)
        stage.run.start_soon(enter)
        await over.wait()
    other.cancel()

    assert seen == [None] * 4


async def test_plain_tasks_of_a_run_whose_body_holds_a_frontier_may_enter_threads_that_wait(stage: Stage) -> None:
    """R-47: started by the body itself, they leave its frontier behind as well."""
    seen: list[str | None] = []
    token = trio.lowlevel.current_trio_token()

    async def note() -> None:
        seen.append(held_frontier())

    async def enter() -> None:
        await trio.to_thread.run_sync(lambda: trio.from_thread.run(note, trio_token=token))
        if len(seen) == 2:
            over.set()

    async def body(run: Run[None]) -> None:
        run.start_soon(trio.sleep, 0)
        await trio.lowlevel.checkpoint()
        with frontier("host-line"):
            run.start_soon(enter)
            await trio.lowlevel.checkpoint()
            run.start_soon(enter)
            await over.wait()

    over = trio.Event()
    await (await stage.room.start(body)).result()

    assert seen == [None, None]


def test_what_the_main_task_starts_elsewhere_is_not_covered() -> None:
    """R-47: a frontier of the outermost task covers by its nurseries only, though its context is everybody's."""
    seen: list[str | None] = []

    async def note() -> None:
        seen.append(held_frontier())

    async def main() -> None:
        async with trio.open_nursery() as older:
            with frontier("host-line"):
                older.start_soon(note)
                await wait_all_tasks_blocked()
                async with trio.open_nursery() as inner:
                    inner.start_soon(note)

    trio.run(main)

    assert seen == [None, "host-line"]


async def test_nothing_of_a_stretch_is_kept_once_it_is_over(stage: Stage) -> None:
    """R-86: a task that reserves again and again carries none of it on."""

    async def reserve_again(left: int) -> None:
        with stage.run.reserve():
            if left:
                older.start_soon(reserve_again, left - 1)
                await trio.lowlevel.checkpoint()
        last.append(sum(1 for thing in gc.get_objects() if isinstance(thing, Block)))

    last: list[int] = []
    async with trio.open_nursery() as older:
        older.start_soon(reserve_again, 20)
    with stage.run.reserve():
        pass
    gc.collect()

    assert last[-1] <= 2
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Block)]


async def test_what_trio_does_not_tell_of_plain_threads_native_launches_get_right(stage: Stage) -> None:
    """R-47: tasks that a holder started elsewhere, and tasks that somebody else started in the holder's nursery.

    By its context alone a system task can't be told from one of the holder's, or from none: a plain thread of the first
    is refused, though nobody waits for it, and one of the second isn't.
    """
    seen: dict[str, str | None] = {}
    token = trio.lowlevel.current_trio_token()

    async def enter(name: str, native: bool) -> None:
        async def note() -> None:
            seen[f"{name}, {'native' if native else 'plain'}"] = await refusal(stage.child.wait_returned)

        def thread() -> None:
            trio.from_thread.run(note, trio_token=token)

        await (stage.run.run_native(thread) if native else trio.to_thread.run_sync(thread))

    async def enter_both(name: str) -> None:
        await enter(name, native=True)
        await enter(name, native=False)
        over[name].set()

    async def start_in(nurseries: list[trio.Nursery]) -> None:
        await opened.wait()
        nurseries[0].start_soon(enter_both, "in the holder's nursery")

    over = {name: trio.Event() for name in ("elsewhere", "in the holder's nursery")}
    opened, nurseries = trio.Event(), list[trio.Nursery]()
    async with trio.open_nursery() as older:
        older.start_soon(start_in, nurseries)
        with frontier("host-line"):
            older.start_soon(enter_both, "elsewhere")
            async with trio.open_nursery() as inner:
                nurseries.append(inner)
                opened.set()
                for event in over.values():
                    await event.wait()

    assert seen == {
        "elsewhere, native": None,
        "elsewhere, plain": "host-line",
        "in the holder's nursery, native": "host-line",
        "in the holder's nursery, plain": None,
    }


@pytest.mark.parametrize("native", [False, True])
async def test_a_thread_entered_inside_a_reserve_block_does_not_wait_for_that_parent(
    stage: Stage, native: bool
) -> None:
    """R-47: called back by token too, it waits neither for the parent nor for the block's own lease."""
    seen: list[str | None] = []
    token = trio.lowlevel.current_trio_token()

    async def note(lease_id: Any) -> None:
        seen.append(await refusal(stage.run.wait_returned))
        seen.append(await refusal(lambda: stage.run.wait_lease(lease_id)))
        seen.append(await refusal(stage.child.wait_returned))
        seen.append(held_frontier())

    def thread(lease_id: Any) -> None:
        trio.from_thread.run(note, lease_id, trio_token=token)

    enter = stage.child.run_native if native else trio.to_thread.run_sync
    with stage.run.reserve() as reserved:
        lease_id: Any = reserved.lease_id
        if native:
            await stage.child.run_native(thread, lease_id)
        else:
            await trio.to_thread.run_sync(thread, lease_id)
    await enter(thread, lease_id)

    # A native launch of the child is the child's, so its waits for itself and for its parent are refused everywhere.
    own = "self" if native else None
    assert seen == ["self", "self", own, None, own, None, own, None]


# -- callbacks under a frontier --------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
async def test_a_cancel_callback_runs_under_no_frontier(stage: Stage, late: bool) -> None:
    """R-47, R-25: whoever cancels may hold one; the callback meets none but its own, and afterwards all is as before."""
    seen: list[str | None] = []

    def callback(_: str) -> None:
        runs.append(current_run())
        seen.append(held_frontier())
        with frontier("room-gate"):
            seen.append(held_frontier())
        seen.append(held_frontier())
        older.start_soon(enter)

    async def enter() -> None:
        await trio.to_thread.run_sync(lambda: trio.from_thread.run(note, trio_token=token))
        over.set()

    async def note() -> None:
        seen.append(held_frontier())

    runs: list[Run[Any] | None] = []
    token, over = trio.lowlevel.current_trio_token(), trio.Event()
    async with trio.open_nursery() as older:
        with frontier("host-line"):
            if late:
                stage.run.cancel()
            stage.run.add_cancel_callback("note", callback)
            if not late:
                stage.run.cancel()
            after = (held_frontier(), await refusal(stage.child.wait_returned))
            await over.wait()

    # Last, a task that it started in a nursery of its own choice, and that one's thread.
    assert seen == [None, "room-gate", None, None]
    assert runs == [stage.run]
    assert after == ("host-line", "host-line")


async def test_a_callback_that_raises_leaves_the_frontiers_as_they_were(stage: Stage) -> None:
    """R-47: late and raising to its registrar, or logged: the holder's frontier is there again."""

    def callback(_: str) -> None:
        raise KeyError

    with frontier("host-line"):
        stage.run.add_cancel_callback("loud", callback)
        stage.run.cancel()
        first = held_frontier()
        with pytest.raises(KeyError):
            stage.run.add_cancel_callback("louder", callback)
        second = held_frontier()

    assert (first, second, held_frontier()) == ("host-line", "host-line", None)


# -- threads that start others ---------------------------------------------------------------------------------------


async def test_tasks_that_a_covered_thread_starts_elsewhere_are_not_covered(stage: Stage) -> None:
    """R-47: a child or plain task started from the thread is free, though its context came from there."""
    seen: dict[str, object] = {}

    async def note(name: str) -> None:
        seen[name] = (await refusal(stage.child.wait_returned), held_frontier())

    async def child(_: Run[None], name: str) -> None:
        await note(name)

    async def start(run: Run[None]) -> None:
        run.start_soon(note, "plain task")
        await run.start_child(child, "child")
        await wait_all_tasks_blocked()

    async def holder(run: Run[None]) -> None:
        run.start_soon(trio.lowlevel.checkpoint)
        with frontier("host-line"):
            await run.run_native(trio.from_thread.run, start, run)
            seen["holder"] = held_frontier()

    run = await stage.room.start(holder)
    await run.result()

    assert seen == {"plain task": (None, None), "child": (None, None), "holder": "host-line"}


async def test_a_finisher_joins_its_family_under_no_frontier(store: Store) -> None:
    """R-47: the join is a wait like the others; refused, it can be asked for again outside."""
    seen: list[str | None] = []

    class Careless:
        async def finish(self, finishing: Finishing) -> None:
            with frontier("host-line"):
                seen.append(await refusal(finishing.join))
            await finishing.join()
            with frontier("host-line"):
                await finishing.persist_outcome()
            finishing.release_lease()

    async def parent(run: Run[None]) -> None:
        await run.start_child(give)

    async with open_room(store, name="r") as room:
        run = await room.start(parent, finisher=Careless())
        await run.result()

    assert seen == ["host-line"]


async def test_parent_and_child_that_share_a_frontier_both_finish(store: Store) -> None:
    """R-46: a parent that waits holds no frontier, so its child can pass the same one meanwhile."""
    line = trio.Lock()
    order: list[str] = []

    class OnTheLine:
        def __init__(self, name: str) -> None:
            self.name = name

        async def finish(self, finishing: Finishing) -> None:
            async with line:
                with frontier("run-frontier"):
                    order.append(f"{self.name} seals")
            await finishing.join()
            async with line:
                with frontier("run-frontier"):
                    await finishing.persist_outcome()
                    order.append(f"{self.name} ends")
            finishing.release_lease()

    done = trio.Event()

    async def parent(run: Run[None]) -> None:
        await run.start_child(wait_for, done, finisher=OnTheLine("child"))

    async with open_room(store, name="r") as room:
        run = await room.start(parent, finisher=OnTheLine("parent"))
        await wait_all_tasks_blocked()
        done.set()
        await run.wait_returned()

    assert order == ["parent seals", "child seals", "child ends", "parent ends"]


# -- without a task --------------------------------------------------------------------------------------------------


async def test_loop_callbacks_and_foreign_threads_wait_for_nobody(stage: Stage) -> None:
    """R-47: where no task could be suspended, the refusal says `no-task`."""
    seen: dict[str, object] = {}
    called = trio.Event()

    def step_all(name: str) -> None:
        seen[name] = ({key: stepped(wait) for key, wait in stage.waits().items()}, held_frontier())

    def callback() -> None:
        step_all("callback")
        called.set()

    trio.lowlevel.current_trio_token().run_sync_soon(callback)
    await called.wait()
    await trio.to_thread.run_sync(step_all, "thread")
    await stage.run.run_native(step_all, "native launch")

    assert seen == dict.fromkeys(("callback", "thread", "native launch"), (stage.all_refused("no-task"), "no-task"))


# -- for oneself -----------------------------------------------------------------------------------------------------


async def test_a_run_waits_neither_for_itself_nor_for_what_is_above_it_nor_for_its_room(store: Store) -> None:
    """R-47: body, plain task, callback, launch, publication of a grandchild: none may wait for Run, parent, root, room."""
    seen: dict[str, set[str | None]] = {}
    line: list[Run[None]] = []

    async def ask(name: str) -> None:
        waits = [wait for run in line for wait in (run.wait_returned, run.outcome, run.result, run.wait_started)]
        seen[name] = {await refusal(wait) for wait in (*waits, room.close)}
        assert current_run() == line[-1]

    def ask_by_hand(_: str) -> None:
        waits = [wait for run in line for wait in (run.wait_returned, run.outcome, run.result, run.wait_started)]
        seen["cancel callback"] = {stepped(wait) for wait in (*waits, room.close)}
        assert current_run() == line[-1]

    async def publish(_: Outcome[Any]) -> None:
        await ask("publication")

    async def descend(run: Run[None], levels: int) -> None:
        line.append(run)
        if levels:
            await run.start_child(descend, levels - 1, publish=publish if levels == 1 else _published)
            return
        await ask("body")
        run.start_soon(ask, "plain task")
        await run.run_native(trio.from_thread.run, ask, "launch")
        run.add_cancel_callback("ask", ask_by_hand)
        run.cancel()

    async with open_room(store, name="r") as room:
        root = await room.start(descend, 2)
        await root.wait_returned()

    assert set(seen) == {"body", "plain task", "launch", "cancel callback", "publication"}
    assert set().union(*seen.values()) == {"self"}
    assert room.state is RoomState.CLOSED


async def _published(_: Outcome[Any]) -> None:
    pass


async def test_descendants_siblings_and_strangers_may_be_waited_for(store: Store) -> None:
    """R-47: a wait down or across the tree can end, so it begins."""
    stop = trio.Event()
    seen: list[str | None] = []

    async def parent(run: Run[None], other: Run[None]) -> None:
        child = await run.start_child(wait_for, stop)
        grandchild = await child.start_child(wait_for, stop)
        sibling = await run.start_child(ask, (child, grandchild, other))
        await sibling.wait_returned()
        for target in (child, grandchild, other):
            seen.append(await refusal(target.wait_returned))  # noqa: PERF401  a comprehension can't await in order
        seen.append(await refusal(lambda: run.wait_lease(child._entry.lease_id)))

    async def ask(_: Run[None], targets: tuple[Run[None], ...]) -> None:
        for target in targets:
            seen.append(await refusal(target.result))  # noqa: PERF401  as above

    async with open_room(store, name="a") as room, open_room(store, name="b") as elsewhere:
        other = await elsewhere.start(wait_for, stop)
        run = await room.start(parent, other)
        await wait_all_tasks_blocked()
        stop.set()
        await run.result()

    assert seen == [None] * 7


async def test_a_run_may_close_another_room(store: Store) -> None:
    """R-47: only its own room could never become idle."""

    async def close(_: Run[None], other: Room) -> None:
        await other.close()

    async with open_room(store, name="a") as room, open_room(store, name="b") as other:
        await (await room.start(close, other)).result()

        assert other.state is RoomState.CLOSED
        assert room.state is RoomState.OPEN


# -- inside a reserve block ------------------------------------------------------------------------------------------


async def test_a_task_inside_a_reserve_block_does_not_wait_for_that_parent(stage: Stage) -> None:
    """R-47: the parent can't return before the block is left, nor may a task of a nursery inside it wait for it."""
    other: list[str | None] = []

    async def ask() -> None:
        other.append(await refusal(stage.run.wait_returned))

    with stage.run.reserve() as token:
        inside = {name: await refusal(getattr(stage.run, name)) for name in ("wait_returned", "outcome", "result")}
        child = await stage.run.admit(token, give)
        consumed = await refusal(stage.run.wait_returned)
        of_child = await child.result()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
    after = await refusal(stage.run.wait_returned)

    assert inside == dict.fromkeys(inside, "self")
    assert consumed == "self"
    assert of_child == 1
    assert other == ["self"]
    assert after is None


async def test_a_lease_is_not_waited_for_inside_its_own_block(stage: Stage) -> None:
    """R-47: `wait_lease` is refused inside the block of that very lease only, and waits until it is released."""
    released: list[str] = []

    async def wait(lease_id: Any) -> None:
        await stage.run.wait_lease(lease_id)
        released.append("own")

    async with trio.open_nursery() as nursery:
        with stage.run.reserve() as token, stage.run.reserve() as second:
            own = await refusal(lambda: stage.run.wait_lease(token.lease_id))
            of_second = await refusal(lambda: stage.run.wait_lease(second.lease_id))
            of_child = await refusal(lambda: stage.run.wait_lease(stage.child._entry.lease_id))
            nursery.start_soon(wait, token.lease_id)
            await wait_all_tasks_blocked()
            inside = list(released)

    assert (own, of_second, of_child) == ("self", "self", None)
    assert inside == []
    assert released == ["own"]


async def test_blocks_of_one_parent_count_until_the_last_is_left(stage: Stage) -> None:
    """R-47: nested, and left in any order, each refuses until it is left; then nothing of it remains."""
    parent = stage.run.wait_returned

    async def refusals(*lease_ids: Any) -> list[str | None]:
        waits: list[Callable[[], Awaitable[object]]] = [
            parent,
            *(partial(stage.run.wait_lease, lease_id) for lease_id in lease_ids),
        ]
        return [await refusal(wait) for wait in waits]

    with stage.run.reserve() as first, stage.run.reserve() as second:
        inside = await refusals(first.lease_id, second.lease_id)
    after = await refusals(first.lease_id, second.lease_id)
    outer, inner = stage.run.reserve(), stage.run.reserve()
    third, fourth = outer.__enter__(), inner.__enter__()
    outer.__exit__(None, None, None)
    without_outer = await refusals(third.lease_id, fourth.lease_id)
    inner.__exit__(None, None, None)

    assert inside == ["self"] * 3
    assert after == [None] * 3
    assert without_outer == ["self", None, "self"]
    assert await refusals(third.lease_id, fourth.lease_id) == [None] * 3


async def test_a_block_of_another_parent_refuses_no_wait_for_this_one(stage: Stage) -> None:
    """R-47: a block inside the other's says nothing about its parent."""
    other = await stage.room.start(wait_for, trio.Event())
    with other.reserve() as token:
        with stage.run.reserve():
            both = (await refusal(stage.run.wait_returned), await refusal(other.wait_returned))
        one = (await refusal(stage.run.wait_returned), await refusal(other.wait_returned))
        of_lease = await refusal(lambda: other.wait_lease(token.lease_id))
    other.cancel()

    assert both == ("self", "self")
    assert one == (None, "self")
    assert of_lease == "self"


async def test_after_its_block_a_task_waits_for_its_lease(stage: Stage) -> None:
    """R-47: what refuses the wait is the block; once the callback has exited, the lease is waited for till its end."""
    stop = trio.Event()
    order: list[str] = []

    async def child(_: Run[None]) -> None:
        await stop.wait()
        order.append("child")

    async def release() -> None:
        await wait_all_tasks_blocked()
        stop.set()

    with stage.run.reserve() as token:
        await stage.run.admit(token, child)
        inside = await refusal(lambda: stage.run.wait_lease(token.lease_id))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(release)
        await stage.run.wait_lease(token.lease_id)
        order.append("lease")

    assert inside == "self"
    assert order == ["child", "lease"]


async def test_a_lease_of_nobody_is_not_waited_for(stage: Stage) -> None:
    """R-47: an unknown or released lease needs no wait."""
    with stage.run.reserve() as token:
        pass
    await stage.run.wait_lease(token.lease_id)

    assert all(
        lease.lease_id != token.lease_id for lease in (await observe_settlement(stage.room, stage.run.id)).leases
    )


# -- the frontier itself ---------------------------------------------------------------------------------------------


async def test_a_frontier_has_a_portable_reason() -> None:
    """R-47: a reason is one that a record could hold."""
    with pytest.raises(InvalidRecordError, match="reason"), frontier("My Line"):
        pass

    assert held_frontier() is None


async def test_a_frontier_belongs_to_a_task() -> None:
    """R-47: a thread holds none."""

    def hold() -> None:
        with frontier("host-line"):
            pass

    with pytest.raises(RuntimeError):
        await trio.to_thread.run_sync(hold)


def test_outside_trio_there_is_no_task() -> None:
    """R-47: outside the loop a wait would meet `no-task`, and no Run is current."""
    assert held_frontier() == "no-task"
    assert current_run() is None


async def test_frontiers_of_two_tasks_do_not_meet(stage: Stage) -> None:
    """R-47: a frontier refuses its holder's waits and nobody else's."""
    seen: dict[str, str | None] = {}
    opened = trio.Event()
    over = trio.Event()

    async def hold(reason: str) -> None:
        with frontier(reason):
            opened.set()
            await over.wait()
            seen[reason] = await refusal(stage.run.result)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, "room-gate")
        nursery.start_soon(hold, "host-line")
        await opened.wait()
        await wait_all_tasks_blocked()
        seen["nobody"] = await refusal(stage.run.result)
        over.set()

    assert seen == {"room-gate": "room-gate", "host-line": "host-line", "nobody": None}
    assert stage.run.status is RunStatus.RUNNING
