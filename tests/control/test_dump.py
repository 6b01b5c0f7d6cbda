"""What the door tells of very much: bounded, and never without saying that something was left out."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.control import _dump as dumping
from spindel.control import _holds, _server, describe_dump, open_client, take_dump
from spindel.errors import ControlRefusedError
from spindel.jobs import start_job
from tests.control.test_door import served, sleep

if TYPE_CHECKING:
    from pathlib import Path

    from spindel.control import Dump
    from spindel.runs import Outcome, Run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "door"


async def test_a_thread_of_a_run_is_named_by_it(path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def crunch() -> None:
        entered.set()
        leave.wait(30)

    async def work(run: Run[Any]) -> None:
        await run.run_native(crunch)

    async with served(path) as (room, client):
        run = await room.start(work)
        await trio.to_thread.run_sync(entered.wait)
        dump = await client.dump()
        leave.set()

        (thread,) = (thread for thread in dump.threads if thread.name == f"run {run.id}")
        assert any("crunch" in frame for frame in thread.frames)
        assert f"    thread run {run.id}\n" in describe_dump(dump)


async def test_of_a_deep_stack_both_ends_are_told_and_how_much_is_between(path: Path) -> None:
    async def descend(depth: int) -> None:
        if depth:
            await descend(depth - 1)
        else:
            await trio.sleep_forever()

    async def work(run: Run[Any]) -> None:
        await descend(200)

    async with served(path) as (room, _):
        run = await room.start(work)
        await wait_all_tasks_blocked()
        (shown,) = take_dump(room).runs
        run.cancel()

        frames = shown.tasks[0].frames
        assert len(frames) == 41
        (gap,) = (frame for frame in frames if frame.startswith("…"))
        depth = sum("descend" in frame for frame in frames)
        assert gap == f"… {201 - depth:,} frames"
        assert any("sleep_forever" in frame for frame in frames[-5:])
        assert "run_to_end" in frames[0]


async def test_tasks_and_threads_that_are_left_out_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumping, "_THREADS_MAX", 0)
    async with served(path) as (room, _):
        run = await room.start(sleep)
        for _ in range(10):
            run.start_soon(trio.sleep_forever)
        await wait_all_tasks_blocked()
        whole, short = take_dump(room), take_dump(room, tasks_max=3)
        run.cancel()

        def count(dump: Dump) -> int:
            return len(dump.tasks) + sum(len(run.tasks) for run in dump.runs)

        assert (whole.omitted_tasks, count(short)) == (0, 3)
        assert short.omitted_tasks == count(whole) - 3
        assert f"… {short.omitted_tasks} more tasks" in describe_dump(short)
        assert "more tasks" not in describe_dump(whole)
        assert (len(short.threads), short.omitted_threads) == (0, threading.active_count())
        assert f"… {short.omitted_threads} more threads" in describe_dump(short)


async def test_holds_that_are_left_out_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(outcome: Outcome[Any]) -> None:
        raise OSError("no")

    async def work(run: Run[Any]) -> None:
        pass

    async with served(path) as (room, client):
        for _ in range(3):
            await start_job(room, work, before_finish=broken)
        await wait_all_tasks_blocked()
        monkeypatch.setattr(_holds, "_HOLDS_MAX", 2)
        listed = await client.list_held()
        given_up = await client.abandon()

        assert (len(listed.held), listed.omitted) == (2, 1)
        assert (len(given_up.held), given_up.omitted) == (2, 1)
        assert room.held() == ()


async def test_what_is_being_recovered_is_not_said_to_be_given_up(path: Path) -> None:
    going, mended = trio.Event(), trio.Event()
    calls = 0

    async def adapter(outcome: Outcome[Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("no")
        going.set()
        await mended.wait()

    async def work(run: Run[Any]) -> None:
        pass

    async with served(path) as (room, client), trio.open_nursery() as nursery:
        job = await start_job(room, work, on_settled=adapter)
        await wait_all_tasks_blocked()
        (hold,) = (await client.list_held()).held
        async with open_client(path) as second:
            nursery.start_soon(second.recover, job.id, "adapter", hold.revision, "retry")
            await going.wait()
            (claimed,) = (await client.list_held()).held
            given_up = await client.abandon()
            mended.set()
            await job.outcome()
            await wait_all_tasks_blocked()

        assert (claimed.revision, claimed.claimed) == (hold.revision, True)
        assert given_up.held == ()
        assert job.view().settled


async def test_an_answer_that_no_client_takes_is_refused_by_a_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_server, "RESPONSE_BYTES_MAX", 200)
    async with served(path) as (_, client):
        with pytest.raises(ControlRefusedError) as caught:
            await client.dump()
        assert (await client.list_held()).held == ()

    assert caught.value.code == "too-long"
