"""Watching a room: a snapshot, then every event, without a gap; whoever falls behind ends alone."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import InvalidRecordError, WatchLaggedError
from spindel.observe import RunCancelRequested, RunFinished, RunProgress, RunStarted
from spindel.runs import Child, Room, RoomWatch, Run, open_room
from spindel.store import MemoryStore, RunStatus

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.observe import RoomEvent
    from spindel.store import Store


async def park(_: Run[None]) -> None:
    await trio.sleep_forever()


async def give(_: Run[int], value: int) -> int:
    return value


async def busy(run: Run[None], depth: int) -> None:
    """Make traffic: children and grandchildren that end in every way."""
    if depth:
        children = await run.start_children([Child.of(busy, depth - 1) for _ in range(3)])
        for child in children[:1]:
            assert isinstance(child, Run)
            child.cancel()
    await trio.lowlevel.checkpoint()


class Follower:
    """Rebuilds the live Runs of a room from a snapshot and the events after it."""

    def __init__(self) -> None:
        self.statuses: dict[RunId, str] = {}
        self.sequences: list[int] = []
        self.ended = False

    async def follow(self, room: Room, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with room.watch(buffer=100_000) as watch:
            self.statuses = {run.id: run.status for run in watch.snapshot.runs}
            self.sequences.append(watch.snapshot.sequence)
            task_status.started()
            async for event in watch:
                self.apply(event)
        self.ended = True

    def apply(self, event: RoomEvent) -> None:
        self.sequences.append(event.sequence)
        if isinstance(event, RunStarted):
            assert event.run_id not in self.statuses
            self.statuses[event.run_id] = RunStatus.RUNNING
        if isinstance(event, RunCancelRequested):
            assert self.statuses[event.run_id] == RunStatus.RUNNING
            self.statuses[event.run_id] = RunStatus.CANCELLING
        if isinstance(event, RunFinished):
            del self.statuses[event.run_id]


async def test_snapshot_and_events_are_the_history_whenever_one_begins_to_watch(
    store: Store, nursery: trio.Nursery
) -> None:
    """R-21: a watch begun at any turn of a busy room knows, with its snapshot, exactly what lives; no number is missing."""
    followers: list[Follower] = []

    async with open_room(store, name="r") as room:
        run = await room.start(busy, 4)
        while room.find(run.id) is not None:
            follower = Follower()
            followers.append(follower)
            await nursery.start(follower.follow, room)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
        parked = [await room.start(park) for _ in range(3)]
        await wait_all_tasks_blocked()
        # Whoever has read all that came knows what the room knows.
        live: dict[RunId, str] = {snapshot.id: snapshot.status for snapshot in room.live()}
        known = [dict(follower.statuses) for follower in followers]
        room.cancel_all()
    await wait_all_tasks_blocked()

    assert len(followers) > 5
    assert len(live) == len(parked)
    assert all(statuses == live for statuses in known)
    assert all(follower.ended for follower in followers)
    for follower in followers:
        assert follower.statuses == {}
        assert follower.sequences == list(range(follower.sequences[0], room.events.sequence + 1))


async def test_a_snapshot_names_parents_before_children_and_tells_who_was_asked_to_stop(store: Store) -> None:
    async def parent(run: Run[None]) -> None:
        await run.start_child(park, kind="child", actor="somebody")
        await trio.sleep_forever()

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        run.cancel("enough")
        async with room.watch() as watch:
            snapshot = watch.snapshot

    assert snapshot.sequence == 4
    first, second = snapshot.runs
    assert (first.id, first.parent_id, first.status, first.cancel_reason) == (run.id, None, "cancelling", "enough")
    assert (second.parent_id, second.kind, second.actor) == (run.id, "child", "somebody")
    assert second.started_at >= first.started_at


async def test_a_stalled_watch_ends_alone_and_publishing_never_waits_for_it(
    store: Store, nursery: trio.Nursery
) -> None:
    """R-21: a watch that falls behind its buffer gets what it has, then WatchLaggedError; others see everything."""
    follower = Follower()
    seen: list[int] = []

    async with open_room(store, name="r") as room:
        await nursery.start(follower.follow, room)
        async with room.watch(buffer=3) as stalled:
            run = await room.start(busy, 2)
            await run.result()
            with pytest.raises(WatchLaggedError, match="3 events behind") as caught:
                while True:
                    seen.append((await anext(stalled)).sequence)
            with pytest.raises(WatchLaggedError):
                await anext(stalled)
        total = room.events.sequence
    await wait_all_tasks_blocked()

    assert seen == [1, 2, 3]
    assert (caught.value.room, caught.value.buffer) == ("r", 3)
    assert follower.sequences[: total + 1] == list(range(total + 1))


async def test_a_buffer_that_is_just_full_has_not_lagged() -> None:
    """R-21: exactly as many events as the buffer holds are no lag; one more is."""
    async with open_room(name="r", durable=False) as room, room.watch(buffer=2) as watch:
        run = await room.start(give, 1)
        await run.result()
        events = [await anext(watch), await anext(watch)]
        with trio.move_on_after(0) as waiting:
            await anext(watch)

    assert [type(event) for event in events] == [RunStarted, RunFinished]
    assert waiting.cancelled_caught


async def test_a_cancelled_reader_loses_no_event(store: Store, nursery: trio.Nursery) -> None:
    async with open_room(store, name="r") as room, room.watch() as watch:
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel_when_blocked, scope)
            await anext(watch)
        run = await room.start(give, 1)
        with trio.CancelScope() as other:
            other.cancel()
            await anext(watch)
        first = await anext(watch)
        await run.result()
        second = await anext(watch)

    assert scope.cancelled_caught
    assert other.cancelled_caught
    assert (first.sequence, second.sequence) == (1, 2)


async def cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


@pytest.mark.parametrize("end", ["block", "close", "error"])
async def test_a_watch_ends_with_its_room_after_the_last_event(store: Store, nursery: trio.Nursery, end: str) -> None:
    follower = Follower()

    with suppress(ZeroDivisionError):
        async with open_room(store, name="r") as room:
            await nursery.start(follower.follow, room)
            await room.start(park)
            if end == "close":
                await room.close()
            room.cancel_all()
            assert 1 // (end != "error")
    await wait_all_tasks_blocked()

    assert follower.ended
    assert follower.sequences == list(range(room.events.sequence + 1))
    assert follower.statuses == {}


async def test_a_watch_of_a_room_that_has_ended_is_at_its_end() -> None:
    async with open_room(name="r") as room:
        pass
    async with room.watch() as watch:
        events = [event async for event in watch]

    assert events == []
    assert watch.snapshot.runs == ()


@pytest.mark.parametrize("buffer", [0, -1])
async def test_a_buffer_for_nothing_is_refused(buffer: int) -> None:
    async with open_room(name="r") as room:
        with pytest.raises(InvalidRecordError, match="buffer"):
            async with room.watch(buffer=buffer):
                raise AssertionError("there is nothing to watch with")


async def test_events_hold_nothing_but_scalars(store: Store, nursery: trio.Nursery) -> None:
    """R-66: an event carries copies of facts, never a function, a handle, an error or its message."""
    events: list[RoomEvent] = []

    async def listen(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with room.watch() as watch:
            task_status.started()
            async for event in watch:
                events.append(event)  # noqa: PERF401  seen as it comes, not at the end

    async def body(run: Run[None]) -> None:
        run.report_progress(1, 2, "half")
        raise ValueError("a secret")

    async with open_room(store, name="r") as room:
        await nursery.start(listen)
        run = await room.start(body)
        await run.wait_returned()
        run = await room.start(park)
        run.cancel()
    await wait_all_tasks_blocked()

    assert {type(event) for event in events} >= {RunStarted, RunProgress, RunFinished, RunCancelRequested}
    values = [getattr(event, name) for event in events for name in slots_of(event)]
    assert {type(value).__name__ for value in values} <= {"int", "float", "str", "UUID", "NoneType"}
    assert "a secret" not in repr(events)


def slots_of(event: Any) -> list[str]:
    return [field.name for field in type(event).__attrs_attrs__]


async def test_many_runs_are_followed_without_a_gap(nursery: trio.Nursery) -> None:
    """R-21: under load, too."""
    follower = Follower()

    async def wide(run: Run[None]) -> None:
        for _ in range(20):
            await run.start_children([Child.of(give, n) for n in range(100)])

    async with open_room(MemoryStore(), name="r") as room:
        await nursery.start(follower.follow, room)
        await (await room.start(wide)).result()
    await wait_all_tasks_blocked()

    assert len(follower.sequences) == 1 + 2 * 2001 + 1
    assert follower.sequences == list(range(len(follower.sequences)))


def test_a_watch_is_an_iterator_of_itself() -> None:
    assert RoomWatch.__aiter__(watch := RoomWatch("r", None, None)) is watch  # type: ignore[arg-type]
