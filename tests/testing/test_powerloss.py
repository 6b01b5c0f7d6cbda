"""The disk whose power can fail: what survives, what fails, and that SQLite works on it as on any other."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import apsw
import pytest

from spindel.testing.powerloss import PowerLossVFS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def vfs() -> PowerLossVFS:
    return PowerLossVFS()


def open_database(folder: Path, vfs: PowerLossVFS, synchronous: str = "FULL") -> apsw.Connection:
    connection = apsw.Connection(str(folder / "data.db"), vfs=vfs.name)
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY)")
    return connection


def survivors(vfs: PowerLossVFS, folder: Path, seed: int) -> set[int]:
    """Cut the power, reboot, and give the numbers that are left."""
    after = folder / f"after-{seed}"
    after.mkdir()
    vfs.write_survivors(after, seed)
    connection = apsw.Connection(str(after / "data.db"))

    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    left = {n for (n,) in connection.execute("SELECT n FROM numbers")}
    connection.close()
    return left


def test_synced_commits_survive_and_unsynced_ones_may_not(tmp_path: Path, vfs: PowerLossVFS) -> None:
    connection = open_database(tmp_path, vfs)
    connection.execute("INSERT INTO numbers VALUES (1)")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("INSERT INTO numbers VALUES (2)")
    left = [frozenset(survivors(vfs, tmp_path, seed)) for seed in range(30)]
    connection.close()

    assert set(left) == {frozenset({1}), frozenset({1, 2})}


def test_same_seed_loses_the_same(tmp_path: Path, vfs: PowerLossVFS) -> None:
    connection = open_database(tmp_path, vfs, "OFF")
    connection.execute("INSERT INTO numbers VALUES (1)")
    for seed in range(10):
        folders = [tmp_path / f"{seed}-first", tmp_path / f"{seed}-second"]
        for folder in folders:
            folder.mkdir()
            vfs.write_survivors(folder, seed)
        first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)

        assert first == second
    connection.close()


def test_truncation_is_lost_with_the_power_unless_synced(tmp_path: Path, vfs: PowerLossVFS) -> None:
    connection = open_database(tmp_path, vfs)
    connection.execute("INSERT INTO numbers VALUES (1)")
    connection.execute("PRAGMA synchronous = OFF")
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    assert (tmp_path / "data.db-wal").stat().st_size == 0
    sizes: set[int] = set()
    for seed in range(20):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        vfs.write_survivors(folder, seed)
        sizes.add((folder / "data.db-wal").stat().st_size)
    connection.close()

    assert 0 in sizes
    assert max(sizes) > 4096


def test_dead_disk_fails_every_operation_and_can_still_be_read(tmp_path: Path, vfs: PowerLossVFS) -> None:
    connection = open_database(tmp_path, vfs)
    connection.execute("INSERT INTO numbers VALUES (1)")
    vfs.cut_power(2)
    for n in (2, 3):
        with pytest.raises(apsw.IOError):
            connection.execute("INSERT INTO numbers VALUES (?)", (n,))

    assert not vfs.powered
    assert connection.execute("SELECT min(n) FROM numbers").fetchall() == [(1,)]
    assert 1 in survivors(vfs, tmp_path, 1)
    with suppress(apsw.IOError):
        connection.close()


@pytest.mark.parametrize("n", [1, 2])
def test_nth_sync_fails_and_its_commit_with_it(tmp_path: Path, vfs: PowerLossVFS, n: int) -> None:
    connection = open_database(tmp_path, vfs)
    vfs.fail_sync(n)
    if n == 2:
        connection.execute("INSERT INTO numbers VALUES (1)")
    with pytest.raises(apsw.IOError):
        connection.execute("INSERT INTO numbers VALUES (2)")
    left = survivors(vfs, tmp_path, 0)
    connection.execute("INSERT INTO numbers VALUES (3)")
    connection.close()

    assert left == ({1} if n == 2 else set())


def test_data_of_a_failed_sync_never_reach_the_disk(tmp_path: Path, vfs: PowerLossVFS) -> None:
    """What a failed sync should have kept is still to be read, but a later sync that succeeds does not keep it."""
    path = tmp_path / "file"
    file = vfs.xOpen(str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_READWRITE, 0])
    file.xWrite(b"first", 0)
    vfs.fail_sync()
    with pytest.raises(apsw.IOError):
        file.xSync(apsw.SQLITE_SYNC_NORMAL)
    file.xWrite(b"last", 10)
    file.xSync(apsw.SQLITE_SYNC_NORMAL)
    after = tmp_path / "after"
    after.mkdir()
    vfs.write_survivors(after, 0)

    assert file.xRead(5, 0) == b"first"
    assert (after / "file").read_bytes() == bytes(10) + b"last"
    file.xClose()


def test_full_disk_takes_no_more_and_goes_on_once_there_is_room(tmp_path: Path, vfs: PowerLossVFS) -> None:
    connection = open_database(tmp_path, vfs)
    vfs.fill_disk()
    with pytest.raises(apsw.FullError):
        connection.execute("INSERT INTO numbers VALUES (1)")
    vfs.free_disk()
    connection.execute("INSERT INTO numbers VALUES (2)")

    assert survivors(vfs, tmp_path, 2) == {2}
    connection.close()


def test_deleted_file_may_come_back_until_the_next_sync(tmp_path: Path, vfs: PowerLossVFS) -> None:
    """A rollback journal that is deleted without a sync of its folder can be there again, and undoes its commit."""
    connection = apsw.Connection(str(tmp_path / "data.db"), vfs=vfs.name)
    connection.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY)")
    connection.execute("INSERT INTO numbers VALUES (1)")
    left = [frozenset(survivors(vfs, tmp_path, seed)) for seed in range(20)]
    connection.close()

    assert set(left) == {frozenset(), frozenset({1})}


def test_file_that_was_there_before_is_on_the_disk(tmp_path: Path, vfs: PowerLossVFS) -> None:
    ordinary = apsw.Connection(str(tmp_path / "data.db"))
    ordinary.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY); INSERT INTO numbers VALUES (7)")
    ordinary.close()
    connection = open_database(tmp_path, vfs)
    connection.close()

    assert survivors(vfs, tmp_path, 0) == {7}
