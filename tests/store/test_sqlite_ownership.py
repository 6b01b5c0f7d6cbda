"""Who owns a room: here, in another process, in a killed one, and when the lock file is taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import apsw
import attrs
import pytest
import trio

from spindel.codec import encode_json
from spindel.errors import RoomInUseError, WriteRefusedError
from spindel.process import current_process
from spindel.store import RunStatus, SqliteStore
from spindel.store._ownership import RoomLock, lock_path
from spindel.testing.store_contract import Commands, open_commands, refusal
from tests.store.conftest import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OWN = """
import sys, trio
from spindel.store import SqliteStore
from spindel.testing.store_contract import open_commands

async def main(path, room):
    async with SqliteStore(path) as store, open_commands(store, room) as commands:
        await store.write_each([commands.admit() for _ in range(3)])
        print(commands.epoch, flush=True)
        await trio.sleep_forever()

trio.run(main, *sys.argv[1:3])
"""

CLAIM = """
import sys, trio
from spindel.errors import RoomInUseError
from spindel.store import SqliteStore
from spindel.testing.store_contract import open_commands

async def main(path, room):
    async with SqliteStore(path) as store:
        try:
            async with open_commands(store, room) as commands:
                print("epoch", commands.epoch)
        except RoomInUseError as problem:
            print("in use by", problem.owner["pid"])

trio.run(main, *sys.argv[1:3])
"""


@contextmanager
def owning_process(path: Path, room: str = "main", *secrets: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns a room with three running rows, until it is killed."""
    command = [sys.executable, "-c", OWN, str(path), room, *secrets]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            yield process
        finally:
            process.kill()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


class TestRoomInUse:
    @pytest.mark.parametrize("same_store", [False, True])
    async def test_is_refused_to_a_second_opener_in_this_process(self, tmp_path: Path, *, same_store: bool) -> None:
        """R-11: an open room opened again in the same process is refused, and the error names this process."""
        async with SqliteStore(tmp_path / "runs.db") as store, SqliteStore(tmp_path / "runs.db") as other:
            async with open_commands(store):
                with pytest.raises(RoomInUseError, match=f"in use by process {os.getpid()} on") as refused:
                    async with open_commands(store if same_store else other):
                        pass
            async with open_commands(other) as commands:
                epoch = commands.epoch

        assert refused.value.owner["pid"] == os.getpid()
        assert epoch == 2

    @pytest.mark.crash
    @pytest.mark.slow
    async def test_is_refused_to_a_second_opener_elsewhere_until_the_first_is_killed(self, tmp_path: Path) -> None:
        """R-11, R-13: refused while the owner lives; after kill -9 the epoch is one more and its rows are orphans."""
        path = tmp_path / "runs.db"
        with owning_process(path, "main", "--password=secret") as process:
            async with SqliteStore(path) as store:
                with pytest.raises(RoomInUseError) as refused:
                    async with open_commands(store):
                        pass
                async with open_commands(store, "another") as commands:
                    another = commands.epoch
                while_owned = await store.check()
                kill(process)
                killed = await store.check()
                async with open_commands(store) as commands:
                    epoch = commands.epoch
                    adopted: int = await store.write(commands.adopt())
                    rows = (await store.list_runs(commands.query())).runs
                    report = await store.check()

        assert refused.value.owner["pid"] == process.pid
        assert "secret" not in str(refused.value)
        assert "secret" not in str(refused.value.owner)
        assert (another, epoch, adopted) == (1, 2, 3)
        assert {(row.status, row.reason, row.family_return_ack) for row in rows} == {
            (RunStatus.FAILED, "orphaned", None)
        }
        assert (while_owned.orphans, killed.orphans, report.orphans) == (0, 3, 0)
        assert while_owned.ok
        assert killed.ok
        assert report.ok

    @pytest.mark.crash
    @pytest.mark.slow
    async def test_whose_lock_file_was_removed_is_still_refused(self, tmp_path: Path) -> None:
        """R-11: a free lock is not believed while the recorded process lives."""
        path = tmp_path / "runs.db"
        with owning_process(path) as process:
            lock_path(str(path), "main").unlink()
            async with SqliteStore(path) as store:
                with pytest.raises(RoomInUseError) as refused:
                    async with open_commands(store):
                        pass
                kill(process)
                async with open_commands(store) as commands:
                    epoch = commands.epoch

        assert refused.value.owner["pid"] == process.pid
        assert epoch == 2

    @pytest.mark.slow
    async def test_is_refused_to_another_process_by_the_file_s_other_names(self, tmp_path: Path) -> None:
        """R-11: a link to the file leads to the same lock."""
        path, link = tmp_path / "runs.db", tmp_path / "link.db"
        link.symlink_to(path)
        async with SqliteStore(path) as store, open_commands(store, "some/room.v1"):
            done = await trio.run_process(
                [sys.executable, "-c", CLAIM, str(link), "some/room.v1"], cwd=REPOSITORY, capture_stdout=True
            )

        assert done.stdout.decode() == f"in use by {os.getpid()}\n"


class TestRecordedOwner:
    @pytest.mark.parametrize(
        "owner",
        [
            {"pid": os.getpid()},
            {"pid": 2**22 + 1, "started": 1, "boot": current_process().boot, "host": "here"},
            {"pid": 1, "started": 2**60, "boot": current_process().boot, "host": "a pid that was given again"},
            {"pid": 1, "started": 1, "boot": "of another machine", "host": "elsewhere"},
            {"no": "pid"},
            [],
        ],
    )
    async def test_that_is_not_known_to_live_does_not_keep_a_room_whose_lock_is_free(
        self, tmp_path: Path, owner: Any
    ) -> None:
        path = tmp_path / "runs.db"
        async with SqliteStore(path) as store:
            async with open_commands(store):
                pass
            plain = apsw.Connection(str(path))
            plain.execute("UPDATE rooms SET owner = ?, closed_at = NULL", (encode_json(owner),))
            plain.close()
            async with open_commands(store) as commands:
                epoch = commands.epoch

        assert epoch == 2

    async def test_names_pid_host_time_and_program_and_is_gone_after_the_block(self, tmp_path: Path) -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            async with open_commands(store, at=1_800_000_000_000_000):
                [owned] = await store.list_rooms()
            [left] = await store.list_rooms()

        assert owned.owner is not None
        assert set(owned.owner) == {"pid", "started", "boot", "host", "since", "command"}
        assert owned.owner["pid"] == os.getpid()
        assert owned.owner["since"] == "2027-01-15T08:00:00Z"
        assert (left.owner, left.closed_at is not None) == (None, True)


class TestClaim:
    async def test_silences_the_older_owner(self, tmp_path: Path) -> None:
        """R-12: a mutation with an older epoch is refused as `not-owner`."""
        async with SqliteStore(tmp_path / "runs.db") as store:
            async with open_commands(store) as old:
                pass
            async with open_commands(store) as new:
                codes = {
                    await refusal(store, old.admit()),
                    await refusal(store, old.adopt()),
                    await refusal(store, attrs.evolve(new, epoch=new.epoch + 1).admit()),
                    await refusal(store, Commands("nowhere", 1, new.incarnation).admit()),
                }

        assert codes == {"not-owner"}

    async def test_never_sets_a_room_s_time_back(self, tmp_path: Path) -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            async with open_commands(store, at=1000) as commands:
                await store.write(commands.admit(created_at=5000, started_at=5000))
            async with open_commands(store, at=10):
                [room] = await store.list_rooms()

        assert room.opened_at == 5000

    async def test_leaves_no_lock_file(self, tmp_path: Path) -> None:
        path = tmp_path / "runs.db"
        async with SqliteStore(path) as store:
            async with open_commands(store, "a/b"):
                held = lock_path(str(path), "a/b").exists()
            left = lock_path(str(path), "a/b").exists()

        assert (held, left) == (True, False)

    async def test_of_a_room_whose_lock_can_not_be_made_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "runs.db"
        lock_path(str(path), "main").mkdir()
        async with SqliteStore(path) as store:
            with pytest.raises(WriteRefusedError, match="room-lock"):
                async with open_commands(store):
                    pass
            rooms = await store.list_rooms()

        assert rooms == ()


def test_lock_file_names_are_distinct_and_fit_every_file_system(tmp_path: Path) -> None:
    names = ["a/b", "a.b", "a-b", "a_b", "..", "con", "nul", "a" * 128, "/" * 128]
    paths = [lock_path(str(tmp_path / "runs.db"), name) for name in names]
    for path in paths:
        path.touch()

    assert len(set(paths)) == len(names)
    assert {path.parent for path in paths} == {tmp_path}
    assert not any(set(path.name) & set('<>:"/\\|?*') for path in paths)


def test_lock_of_a_file_that_was_replaced_meanwhile_is_taken_on_the_new_one(tmp_path: Path) -> None:
    """Whoever waited with the old file open must not own beside the owner of the new one."""
    database = str(tmp_path / "runs.db")
    with RoomLock(database, "main") as first:
        lock_path(database, "main").unlink()
        with RoomLock(database, "main") as second, RoomLock(database, "main") as third:
            held = (first.held, second.held, third.held)

    assert held == (True, True, False)
