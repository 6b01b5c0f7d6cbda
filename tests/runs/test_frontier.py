"""Frontiers, and the waits that are refused because they could never end."""

from __future__ import annotations

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
