"""A real process that owns a room is killed, or interrupted, and the next owner finds the truth."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spindel.errors import RoomInUseError, SchemaError
from spindel.runs import open_reader, open_room
from spindel.store import RunStatus, SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spindel.ids import RunId
    from spindel.store import RunRecord

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.crash, pytest.mark.slow]

PROGRAM = """
import os, signal, sys
import trio, trio.testing
from spindel.runs import Child, open_room
from spindel.testing import Steps

async def leaf(run):
    await trio.lowlevel.checkpoint()

async def parked(run):
    await trio.sleep_forever()

async def parent(run):
    await (await run.start_child(leaf)).result()
    await run.start_children([Child.of(parked), Child.of(leaf), Child.of(parked)])
    run.start_soon(trio.sleep_forever)
    if int(sys.argv[2]):
        run.cancel()
    await trio.sleep_forever()

async def main(path, step):
    if step:
        steps = Steps(step)
        trio.lowlevel.add_instrument(steps)
        steps.arm(lambda: os.kill(os.getpid(), signal.SIGKILL))
    async with trio.open_nursery() as outside, open_room(path, name="main") as room:
        await (await room.start(leaf)).result()
        await room.start(parent)
        if not step:
            while len(room.live()) < 3:
                await trio.testing.wait_all_tasks_blocked()
            outside.start_soon(tell_when_the_block_waits, room)

async def tell_when_the_block_waits(room):
    await room.wait_sealed()
    await trio.testing.wait_all_tasks_blocked()
    print("ready", flush=True)

try:
    trio.run(main, sys.argv[1], int(sys.argv[2]))
except* KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start the program over `rooms.db`; a step other than 0 is the one after which it kills itself."""
    started: list[subprocess.Popen[str]] = []

    def run(step: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "rooms.db"), str(step)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def rows_of(path: Path) -> dict[RunId, RunRecord]:
    async with open_reader(path, name="main") as reader:
        return {row.id: row for row in (await reader.list_runs(limit=100)).runs}


async def check(path: Path) -> None:
    async with SqliteStore(path, read_only=True) as store:
        report = await store.check()

    assert report.ok, report.findings


async def reopen(path: Path) -> tuple[dict[RunId, RunRecord], int]:
    """Open the room as its next owner; gives the rows after the adoption, and the room's epoch."""
    async with SqliteStore(path) as store:
        async with open_room(store, name="main") as room:
            rows = {row.id: row for row in (await room.list_runs(limit=100)).runs}
            assert room.live() == ()
            assert room.held() == ()
        (record,) = await store.list_rooms()
    return rows, record.epoch


def check_adopted(before: dict[RunId, RunRecord], after: dict[RunId, RunRecord]) -> None:
    assert before.keys() == after.keys()
    for run_id, row in before.items():
        if row.status is RunStatus.RUNNING:
            assert (after[run_id].status, after[run_id].reason) == (RunStatus.FAILED, "orphaned")
            assert after[run_id].family_return_ack is None
            assert (after[run_id].ended_at or 0) >= row.started_at
        else:
            assert after[run_id] == row


async def test_a_room_in_use_is_refused_and_its_killed_owners_runs_are_orphaned(
    start: Callable[[int], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """R-11, R-13: refused while the owner lives, by name; after kill -9 its running rows are orphaned, nothing else."""
    path = tmp_path / "rooms.db"
    process = start(0)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(RoomInUseError, match=str(process.pid)):
        async with open_room(path, name="main"):
            pass
    process.kill()
    process.wait()
    before = await rows_of(path)
    after, epoch = await reopen(path)

    assert sorted(row.status for row in before.values()) == ["completed"] * 3 + ["running"] * 3
    assert epoch == 2
    check_adopted(before, after)
    await check(path)


async def test_killed_after_any_step_it_leaves_what_the_next_owner_can_adopt(
    start: Callable[[int], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """R-13: wherever the process is killed, the file is in order and the next opening fences every orphan."""
    path = tmp_path / "rooms.db"
    killed = adopted = 0
    # A prime distance, so that the points don't fall into step with the program.
    for step in count(3, 7):
        code = start(step).wait()
        if code == 0:
            break
        killed += 1
        before: dict[RunId, RunRecord] = {}
        # It may have been killed before there was a file, or before there was anything in it.
        with suppress(SchemaError):
            before = await rows_of(path)
        after, _ = await reopen(path)
        check_adopted(before, after)
        adopted += sum(row.reason == "orphaned" for row in after.values())
        await check(path)

        assert code == -signal.SIGKILL
        assert all(row.status.terminal for row in after.values())
        path.unlink()

    assert killed > 5
    assert adopted > 5


async def test_ctrl_c_while_the_block_waits_asks_every_run_and_is_raised_after_the_last_return(
    start: Callable[[int], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """R-15: an interrupt that meets the wait of the block cancels all Runs first, and then goes on."""
    path = tmp_path / "rooms.db"
    process = start(0)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    said = process.stdout.read()
    code = process.wait()
    rows = await rows_of(path)

    assert (code, said) == (0, "interrupted\n")
    assert (
        sorted((row.status, row.reason) for row in rows.values() if row.reason) == [("cancelled", "room-closing")] * 3
    )
    assert sum(row.status is RunStatus.COMPLETED for row in rows.values()) == 3
    await check(path)
