"""The operators' door over real sockets: what it shows, what it does, and who can't disturb it."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.control import describe_dump, open_client, open_control, take_dump
from spindel.errors import ControlLostError, ControlRefusedError, RunAbandonedError
from spindel.jobs import Stage, start_job
from spindel.runs import open_room
from spindel.store import RunStatus
from tests.runs.test_launch_recovery import FlakyExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from spindel.control import ControlClient
    from spindel.runs import Outcome, Room, Run

NOBODY = UUID(int=7)


async def nothing(run: Run[Any]) -> None:
    pass


async def sleep(run: Run[Any]) -> None:
    await trio.sleep_forever()


# Not in the async tests themselves: a linter can't know that nobody else waits for this loop.
def is_there(path: Path) -> bool:
    return path.exists()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def text_of(path: Path) -> str:
    return path.read_text()


def put_file(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def put_folder(path: Path) -> None:
    path.mkdir()


async def wait_held(room: Room) -> None:
    changed = room.holds.changed
    if not room.held():
        await changed.wait()


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Room, ControlClient]]:
    async with open_room(name="main") as room, open_control(room, path), open_client(path) as client:
        yield room, client


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "door"


class Adapter:
    """Retires whoever started a Job, once it has been mended."""

    def __init__(self) -> None:
        self.broken = True
        self.calls = 0

    async def __call__(self, outcome: Outcome[Any]) -> None:
        self.calls += 1
        if self.broken:
            raise OSError("a secret of the adapter")


async def test_a_held_stage_is_shown_with_its_locator_and_retried(path: Path) -> None:
    adapter = Adapter()
    async with served(path) as (room, client):
        job = await start_job(room, nothing, kind="letter", on_settled=adapter)
        await job.wait_done_or_held()
        (hold,) = (await client.list_held()).held
        details = await client.show_job(job.id)
        waited = await client.wait_job(job.id)
        adapter.broken = False
        done = await client.recover(job.id, "adapter", hold.revision, "retry")
        await job.outcome()
        after = await client.show_job(job.id)

        assert (hold.what, hold.run_id, hold.kind, hold.stage, hold.code) == (
            "stage",
            job.id,
            "letter",
            "adapter",
            "OSError",
        )
        assert waited.cleanup_stage is Stage.ADAPTER
        assert (details.settlement.core, details.settlement.adapter, details.settlement.owner) == (
            "valid",
            "absent",
            "present",
        )
        assert done.held is None
        assert adapter.calls == 2
        assert after.job.settled
        assert (await client.list_held()).held == ()


async def test_an_attested_stage_is_not_repeated(path: Path) -> None:
    adapter = Adapter()
    async with served(path) as (room, client):
        job = await start_job(room, nothing, on_settled=adapter)
        await job.wait_done_or_held()
        (hold,) = (await client.list_held()).held
        await client.recover(job.id, "adapter", hold.revision, "acknowledge")

        assert (await job.outcome()).status is RunStatus.COMPLETED
        assert adapter.calls == 1


async def test_a_refusal_travels_as_code_and_sentence_and_nothing_private_travels(path: Path) -> None:
    adapter = Adapter()
    async with served(path) as (room, client):
        job = await start_job(room, nothing, on_settled=adapter)
        await job.wait_done_or_held()
        (first,) = (await client.list_held()).held
        codes: list[tuple[str, str]] = []
        for run_id, stage, revision in (
            (job.id, "adapter", first.revision),  # fails again
            (job.id, "adapter", first.revision),
            (job.id, "core", first.revision),
            (job.id, "no-such-stage", first.revision),
            (NOBODY, "adapter", first.revision),
        ):
            with pytest.raises(ControlRefusedError) as caught:
                await client.recover(run_id, stage, revision, "retry")
            codes.append((caught.value.code, str(caught.value)))
        with pytest.raises(ControlRefusedError) as absent:
            await client.show_job(NOBODY)
        await client.abandon()

        assert [code for code, _ in codes] == ["stage-held", *["stale-revision"] * 3, "foreign-room"]
        assert absent.value.code == "job-not-found"
        assert not any("secret" in sentence for _, sentence in codes)


async def test_a_stage_that_is_being_recovered_is_refused_to_the_second(path: Path) -> None:
    going, mended = trio.Event(), trio.Event()
    calls = 0

    async def adapter(outcome: Outcome[Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError
        going.set()
        await mended.wait()

    async with served(path) as (room, client), open_client(path) as second:
        job = await start_job(room, nothing, on_settled=adapter)
        await job.wait_done_or_held()
        (hold,) = (await client.list_held()).held
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.recover, job.id, "adapter", hold.revision, "retry")
            await going.wait()
            with pytest.raises(ControlRefusedError) as caught:
                await second.recover(job.id, "adapter", hold.revision, "retry")
            mended.set()

        assert caught.value.code == "recovery-in-progress"
        assert calls == 2


async def test_a_held_lease_is_recovered_by_the_same_command(path: Path) -> None:
    async def publish(outcome: Outcome[Any]) -> None:
        raise OSError("nobody takes it")

    async def parent(run: Run[Any]) -> None:
        await run.start_child(nothing, kind="letter", publish=publish)

    async with served(path) as (room, client):
        job = await start_job(room, parent)
        await wait_held(room)
        (hold,) = (await client.list_held()).held
        blocked = await client.wait_job(job.id)
        again = await client.recover(hold.run_id, hold.stage, hold.revision, "retry")
        assert again.held is not None
        done = await client.recover(hold.run_id, hold.stage, again.held.revision, "acknowledge")
        await job.outcome()

        assert (hold.what, hold.kind, hold.stage) == ("lease", "letter", "publishing")
        assert hold.lease_id == again.held.lease_id
        assert blocked.blocked_by == (hold.run_id,)
        assert done.held is None


async def test_the_held_join_of_a_plain_run_is_a_launch_and_that_of_a_job_a_stage(path: Path) -> None:
    going_on = trio.Event()

    async def child(run: Run[Any]) -> None:
        await going_on.wait()

    async def parent(run: Run[Any]) -> None:
        await run.start_child(child)

    async with served(path) as (room, client):
        room.pool.tasks = FlakyExecutor(room.pool.tasks, fail_submit=1)
        run = await room.start(parent)
        await wait_held(room)
        (launch,) = (await client.list_held()).held
        with pytest.raises(ControlRefusedError) as caught:
            await client.recover(run.id, launch.stage, launch.revision, "acknowledge")
        await client.recover(run.id, launch.stage, launch.revision, "retry")
        going_on.set()
        await run.wait_returned()
        room.pool.tasks = FlakyExecutor(room.pool.tasks, fail_submit=1)
        going_on = trio.Event()
        job = await start_job(room, parent)
        await job.wait_done_or_held()
        (stage,) = (await client.list_held()).held
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.recover, job.id, stage.stage, stage.revision, "retry")
            await wait_all_tasks_blocked()
            going_on.set()
        await job.outcome()

        assert (launch.what, launch.stage) == ("launch", "join")
        assert caught.value.code == "acknowledge-refused"
        assert (stage.what, stage.stage) == ("stage", "family-join")


async def test_jobs_are_paged_waited_for_and_cancelled(path: Path) -> None:
    async with served(path) as (room, client):
        jobs = [await start_job(room, nothing) for _ in range(3)]
        for job in jobs:
            await job.outcome()
        first = await client.list_jobs(limit=2)
        rest = await client.list_jobs(limit=2, before=first.next)
        sleeper = await start_job(room, sleep)
        await client.cancel_job(sleeper.id)
        ended = await client.wait_job(sleeper.id)

        assert [job.id for job in (*first.jobs, *rest.jobs)] == [job.id for job in reversed(jobs)]
        assert rest.next is None
        assert ended.status is RunStatus.CANCELLED
        assert ended.settled


async def test_the_door_stays_open_while_the_room_waits_for_what_is_held(path: Path) -> None:
    adapter = Adapter()

    async def recover_later() -> None:
        await room.wait_sealed()
        async with open_client(path) as client:
            (hold,) = (await client.list_held()).held
            adapter.broken = False
            await client.recover(hold.run_id, hold.stage, hold.revision, "retry")

    async with trio.open_nursery() as nursery, open_room(name="main") as room, open_control(room, path):
        job = await start_job(room, nothing, on_settled=adapter)
        await job.wait_done_or_held()
        nursery.start_soon(recover_later)

    assert job.view().settled
    assert not is_there(path)


async def test_a_cancelled_block_still_has_its_door(path: Path) -> None:
    adapter = Adapter()

    async def recover_later() -> None:
        await room.wait_sealed()
        async with open_client(path) as client:
            (hold,) = (await client.list_held()).held
            await client.recover(hold.run_id, hold.stage, hold.revision, "acknowledge")

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with open_room(name="main") as room, open_control(room, path):
                job = await start_job(room, nothing, on_settled=adapter)
                await job.wait_done_or_held()
                nursery.start_soon(recover_later)
                scope.cancel()
                await trio.sleep_forever()

    assert scope.cancelled_caught
    assert job.view().settled


async def test_who_gives_up_what_keeps_the_room_gets_the_answer_all_the_same(path: Path) -> None:
    async def give_up() -> None:
        await room.wait_sealed()
        async with open_client(path) as client:
            answers.append(await client.abandon())

    answers: list[Any] = []
    async with trio.open_nursery() as nursery, open_room(name="main") as room, open_control(room, path):
        job = await start_job(room, nothing, on_settled=Adapter())
        await job.wait_done_or_held()
        nursery.start_soon(give_up)

    assert [hold.run_id for hold in answers[0].held] == [job.id]
    with pytest.raises(RunAbandonedError):
        await job.outcome()


async def test_what_the_block_raises_leaves_as_it_is(path: Path) -> None:
    with pytest.raises(KeyError):
        async with open_room(name="main") as room, open_control(room, path):
            raise KeyError("x")

    assert not is_there(path)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"command": "format-disk"}',
        b'{"command": "dump", "more": 1}',
        b'{"command": "jobs", "limit": "x"}',
        b'{"command": "jobs", "limit": 1000}',
        b'{"command": "job", "job_id": "x"}',
        b'{"command": "wait", "job_id": "00000000-0000-0000-0000-000000000007"}',
    ],
)
async def test_a_garbage_line_is_told_so_and_the_next_one_is_answered(path: Path, line: bytes) -> None:
    async with open_room(name="main") as room, open_control(room, path), await trio.open_unix_socket(path) as stream:
        await stream.send_all(line + b'\n{"command": "held"}\n')
        received = b""
        while received.count(b"\n") < 2:
            received += await stream.receive_some()
        first, second, _ = received.split(b"\n")

        assert b'"code":"bad-request"' in first or b'"code":"invalid-record"' in first
        assert b'"held":[]' in second


async def test_an_endless_line_ends_its_connection_alone(path: Path) -> None:
    async with served(path) as (_, client), await trio.open_unix_socket(path) as stream:
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"x" * 10_000)

        assert (await client.list_held()).held == ()


async def test_a_client_that_stalls_in_a_line_is_dropped_and_an_idle_one_kept(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with served(path) as (_, client), await trio.open_unix_socket(path) as stream:
        await stream.send_all(b'{"command"')

        assert await stream.receive_some() == b""
        assert trio.current_time() >= 10
        assert (await client.list_held()).held == ()


async def test_a_client_that_takes_no_answer_does_not_keep_the_room(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_room(name="main") as room, open_control(room, path):
        stream = await trio.open_unix_socket(path)
        async with stream:
            with trio.move_on_after(1):
                while True:  # until neither direction takes any more
                    await stream.send_all(b'{"command": "dump"}\n' * 100)
            began = trio.current_time()
            await room.close()

    assert trio.current_time() - began <= 5


async def test_too_many_clients_are_told_so(path: Path) -> None:
    async with open_room(name="main") as room, open_control(room, path):
        streams = [await trio.open_unix_socket(path) for _ in range(64)]
        await wait_all_tasks_blocked()
        async with open_client(path) as client:
            with pytest.raises(ControlRefusedError) as caught:
                await client.list_held()
        for stream in streams:
            await stream.aclose()

    assert caught.value.code == "busy"


async def test_an_answer_that_nobody_knows_leaves_it_unknown(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        for answer in (b"HTTP/1.1 400 Bad Request\r\n", b'{"answer": {"another": 1}, "problem": null}\n', b"\xff\n"):
            async with open_client(path) as client:
                accepted, _ = listener.accept()
                accepted.sendall(answer)

                with pytest.raises(ControlLostError, match="may have been done"):
                    await client.abandon()
                accepted.close()


async def test_a_connection_that_ends_before_the_answer_leaves_it_unknown(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        async with open_client(path) as client:
            accepted, _ = listener.accept()
            accepted.close()

            with pytest.raises(ControlLostError):
                await client.abandon()
            with pytest.raises(ControlLostError):
                await client.abandon()


async def test_a_dump_has_the_tree_with_its_tasks_and_no_values(path: Path) -> None:
    ready = trio.Event()

    async def sleeper(run: Run[Any], secret: str) -> None:
        local_secret = secret + "!"
        ready.set()
        await trio.sleep_forever()
        del local_secret

    async def parent(run: Run[Any]) -> None:
        await run.start_child(sleeper, "hunter2", kind="sleeper")
        await trio.sleep_forever()

    async with served(path) as (room, client):
        job = await start_job(room, parent, kind="parent")
        await ready.wait()
        dump = await client.dump()
        short = take_dump(room, runs_max=1)
        job.cancel()

        top, below = dump.runs
        assert (top.kind, top.stage, below.kind, below.parent_id) == ("parent", Stage.WORK, "sleeper", top.id)
        assert any("in test_a_dump" in frame and "sleeper" in frame for frame in below.tasks[0].frames)
        assert any(thread.name == "MainThread" for thread in dump.threads)
        assert any(task.running for task in dump.tasks)
        text = describe_dump(dump)
        assert f"  run {below.id} sleeper running\n" in text
        assert "hunter2" not in text
        assert (len(short.runs), short.omitted) == (1, 1)
        assert "… 1 more Runs" in describe_dump(short)


class TestSocket:
    async def test_only_its_user_may_open_it_and_it_goes_with_its_block(self, path: Path) -> None:
        async with served(path):
            mode = mode_of(path)

        assert mode == 0o600
        assert not is_there(path)

    async def test_that_of_a_dead_process_is_replaced(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(os.fspath(path))
        async with served(path) as (_, client):
            assert (await client.list_held()).held == ()

    async def test_that_of_a_living_process_is_left_alone(self, path: Path) -> None:
        async with served(path) as (_, client):
            with pytest.raises(ControlRefusedError) as caught:
                async with open_room(name="other") as room, open_control(room, path):
                    pass

            assert caught.value.code == "in-use"
            assert (await client.list_held()).held == ()

    async def test_one_that_has_come_in_its_place_is_not_taken_away(self, path: Path) -> None:
        async with served(path):
            put_file(path, "somebody else's")

        assert text_of(path) == "somebody else's"

    @pytest.mark.parametrize("make", ["file", "folder"])
    async def test_what_is_no_socket_is_left_alone(self, path: Path, make: str) -> None:
        if make == "file":
            put_file(path, "kept")
        else:
            put_folder(path)
        with pytest.raises(ControlRefusedError, match="is no socket"):
            async with open_room(name="main") as room, open_control(room, path):
                pass

        assert is_there(path)

    async def test_a_path_that_is_too_long_is_told_with_its_length(self, tmp_path: Path) -> None:
        long = tmp_path / ("x" * 108)
        with pytest.raises(ControlRefusedError, match=f"has {len(os.fsencode(long))} bytes") as caught:
            async with open_client(long):
                pass

        assert caught.value.code == "bad-path"

    async def test_a_folder_that_others_may_write_to_is_refused_unless_it_is_sticky(self, tmp_path: Path) -> None:
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(ControlRefusedError) as caught:
            async with served(folder / "door"):
                pass
        folder.chmod(0o1777)
        async with served(folder / "door"):
            pass

        assert caught.value.code == "bad-folder"

    async def test_a_folder_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(ControlRefusedError, match="its folder can't be opened"):
            async with served(tmp_path / "absent" / "door"):
                pass

    async def test_nobody_there_is_told(self, path: Path) -> None:
        with pytest.raises(ControlRefusedError) as caught:
            async with open_client(path):
                pass

        assert caught.value.code == "unreachable"
