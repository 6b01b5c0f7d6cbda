"""Admission tokens: the single-use marker of one reservation, for the parent and the task that reserved."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio

from spindel.errors import AdmissionTokenError, InvalidRecordError
from spindel.ids import RunId
from spindel.runs import AdmissionToken, Room, Run, observe_settlement, open_room

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from spindel.store import Store

THREADS = 8
ROUNDS = 50


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


class Stage:
    """A room with two parents that live until the test is over."""

    def __init__(self, room: Room, parent: Run[None], other: Run[None]) -> None:
        self.room = room
        self.parent = parent
        self.other = other

    async def leases(self) -> int:
        return len((await observe_settlement(self.room, self.parent.id)).leases)


@pytest.fixture
async def stage(store: Store) -> AsyncIterator[Stage]:
    stop = trio.Event()
    async with open_room(store, name="r") as room:
        yield Stage(room, await room.start(wait_for, stop), await room.start(wait_for, stop))
        stop.set()


async def reason_of(parent: Run[Any], token: AdmissionToken) -> str:
    with pytest.raises(AdmissionTokenError) as caught:
        await parent.admit(token, give)
    assert caught.value.run_id == token.run_id
    return caught.value.reason


def reason_in_thread(parent: Run[Any], token: AdmissionToken) -> str:
    """Step the admission in a thread that has no task."""
    attempt = parent.admit(token, give)
    with pytest.raises(AdmissionTokenError) as caught:
        attempt.send(None)
    return caught.value.reason


async def test_a_token_admits_the_child_that_was_reserved(stage: Stage) -> None:
    """R-38: the admitted child has the id of the token, and its lease is the token's."""
    with stage.parent.reserve() as token:
        child = await stage.parent.admit(token, give, 7)
        lease_ids = [lease.lease_id for lease in (await observe_settlement(stage.room, stage.parent.id)).leases]

    assert child.id == token.run_id
    assert child.parent_id == stage.parent.id
    assert lease_ids == [token.lease_id]
    assert await child.result() == 7


async def test_a_chosen_id_is_the_tokens(stage: Stage) -> None:
    """R-38: the id given to `reserve` is the child's, and `admit` takes no other."""
    chosen = RunId(stage.room.next_uuid())
    with stage.parent.reserve(run_id=chosen) as token:
        with pytest.raises(InvalidRecordError, match="run_id"):
            await stage.parent.admit(token, give, run_id=stage.other.id)
        child = await stage.parent.admit(token, give)

    assert token.run_id == child.id == chosen


async def test_a_token_is_used_once(stage: Stage) -> None:
    """R-38: a second use is refused as consumed, inside the block and after it, and admits nobody."""
    with stage.parent.reserve() as token:
        child = await stage.parent.admit(token, give)
        inside = await reason_of(stage.parent, token)
    after = await reason_of(stage.parent, token)
    await child.wait_returned()

    assert (inside, after) == ("consumed", "consumed")
    assert len((await stage.room.list_runs(parent=stage.parent.id)).runs) == 1


async def test_an_admission_that_fails_uses_the_token_up(stage: Stage) -> None:
    """R-38: whatever becomes of the admission, its token is consumed."""
    with stage.parent.reserve() as token:
        with pytest.raises(InvalidRecordError):
            await stage.parent.admit(token, give, kind="")
        again = await reason_of(stage.parent, token)

    assert again == "consumed"
    assert await stage.leases() == 0


async def test_foreign_use_is_refused_by_its_reason_and_consumes_nothing(stage: Stage) -> None:
    """R-38: another parent, another task and another thread are refused; then the token still admits one child."""
    in_task: list[str] = []

    async def use_elsewhere(token: AdmissionToken) -> None:
        in_task.append(await reason_of(stage.parent, token))

    with stage.parent.reserve() as token:
        foreign = await reason_of(stage.other, token)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(use_elsewhere, token)
        in_thread = await trio.to_thread.run_sync(reason_in_thread, stage.parent, token)
        child = await stage.parent.admit(token, give)
    await child.wait_returned()

    assert foreign == "foreign-parent"
    assert in_task == ["foreign-context"]
    assert in_thread == "foreign-context"
    assert [run.id for run in (await stage.room.list_runs(parent=stage.parent.id)).runs] == [child.id]


@pytest.mark.parametrize("native", [False, True])
async def test_a_thread_is_the_task_that_it_calls_back_into(stage: Stage, native: bool) -> None:
    """R-38: Trio runs what a thread calls back in the task that entered it, and by `trio_token` in one of its own."""
    loop = trio.lowlevel.current_trio_token()
    told: list[str] = []
    children: list[Run[int]] = []

    async def foreign() -> None:
        told.append(await reason_of(stage.parent, token))

    async def own() -> None:
        children.append(await stage.parent.admit(token, give))
        told.append(await reason_of(stage.parent, token))

    def thread() -> None:
        trio.from_thread.run(foreign, trio_token=loop)
        trio.from_thread.run(own)

    with stage.parent.reserve() as token:
        await (stage.other.run_native(thread) if native else trio.to_thread.run_sync(thread))
        (child,) = children
        value = await child.result()

    assert told == ["foreign-context", "consumed"]
    assert (child.id, value) == (token.run_id, 1)


async def test_a_late_token_is_expired(stage: Stage) -> None:
    """R-38: an unused token admits nothing once its block was left."""
    with stage.parent.reserve() as token:
        pass

    assert await reason_of(stage.parent, token) == "expired"
    assert await stage.leases() == 0


async def test_of_several_reasons_the_first_is_told(stage: Stage) -> None:
    """R-38: the order is consumed, foreign parent, foreign context, expired."""

    async def note(parent: Run[None], token: AdmissionToken) -> None:
        reasons.append(await reason_of(parent, token))

    reasons: list[str] = []
    with stage.parent.reserve() as used:
        await stage.parent.admit(used, give)
    with stage.parent.reserve() as unused:
        pass
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, stage.other, used)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, stage.other, unused)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, stage.parent, unused)
    await note(stage.parent, unused)

    assert reasons == ["consumed", "foreign-parent", "foreign-context", "expired"]


async def test_threads_that_race_without_a_task_admit_nobody(stage: Stage) -> None:
    """R-38: a conveyed token admits no child from any thread, however many try, and stays good for its own task."""
    reasons: list[str] = []

    def race(token: AdmissionToken) -> None:
        start = threading.Barrier(THREADS)

        def use() -> None:
            start.wait()
            reasons.append(reason_in_thread(stage.parent, token))

        _in_threads(use)

    with stage.parent.reserve() as token:
        await trio.to_thread.run_sync(race, token)
        child = await stage.parent.admit(token, give)
    await child.wait_returned()

    assert reasons == ["foreign-context"] * THREADS
    assert len((await stage.room.list_runs(parent=stage.parent.id)).runs) == 1


async def test_of_threads_that_race_for_one_token_one_wins(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-38: using it up is a compare-and-set between threads, even for threads that pass for the right task."""
    task = trio.lowlevel.current_task()
    monkeypatch.setattr(sys.modules["spindel.runs._admission"].trio.lowlevel, "current_task", lambda: task)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wins: list[int] = []
    losses: list[str] = []
    try:
        for _ in range(ROUNDS):
            with stage.parent.reserve() as token:
                wins.append(_race(stage.parent, token, losses))
    finally:
        sys.setswitchinterval(interval)
        monkeypatch.undo()

    assert wins == [1] * ROUNDS
    assert losses == ["consumed"] * (ROUNDS * (THREADS - 1))


def _race(parent: Run[None], token: AdmissionToken, losses: list[str]) -> int:
    start = threading.Barrier(THREADS)
    won: list[object] = []

    def use() -> None:
        start.wait()
        try:
            won.append(token.consume(parent._entry))
        except AdmissionTokenError as error:
            losses.append(error.reason)

    _in_threads(use)
    return len(won)


def _in_threads(fn: Any) -> None:
    threads = [threading.Thread(target=fn) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_a_token_can_be_neither_copied_nor_pickled(stage: Stage, make: Any) -> None:
    """R-38: there is one token a reservation."""
    with stage.parent.reserve() as token, pytest.raises(TypeError, match="admission token"):
        make(token)


async def test_a_block_that_raises_drops_its_lease(stage: Stage) -> None:
    """R-39: an error in the block is the caller's, and the unused lease goes."""
    with pytest.raises(KeyError), stage.parent.reserve():
        raise KeyError

    assert await stage.leases() == 0


async def test_blocks_may_be_nested_and_left_in_any_order(stage: Stage) -> None:
    """R-38: reservations of one task are independent of each other."""
    first, second = stage.parent.reserve(), stage.parent.reserve()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    child = await stage.parent.admit(two, give)
    late = await reason_of(stage.parent, one)
    second.__exit__(None, None, None)
    await child.wait_returned()

    assert late == "expired"
    assert await stage.leases() == 0


async def test_reserving_outside_trio_leaves_no_trace(stage: Stage) -> None:
    """R-39: a thread has no context to bind a token to."""

    def reserve() -> None:
        with stage.parent.reserve():
            pass

    with pytest.raises(RuntimeError, match="async context"):
        await trio.to_thread.run_sync(reserve)

    assert await stage.leases() == 0
