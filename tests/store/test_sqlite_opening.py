"""Opening a file: new, older, newer, foreign, damaged, out of reach."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import apsw
import pytest

from spindel.errors import SchemaError, WriteRefusedError
from spindel.ids import RunId
from spindel.store import RunQuery, RunStatus, SqliteStore, StorePart
from spindel.store._connection import APPLICATION_ID
from spindel.store._migrations import Migration, load_scripts
from spindel.testing.store_contract import open_commands, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.store.conftest import FailingDisk, RunProgram

    Contents = Callable[[Path], dict[str, bytes]]

OPEN = """
import sys, trio
from spindel.errors import SchemaError
from spindel.store import SqliteStore

async def main(path):
    async with SqliteStore(path, read_only=sys.argv[-1] == "read-only") as store:
        print("rooms", [room.name for room in await store.list_rooms()])

try:
    trio.run(main, sys.argv[1])
except SchemaError as problem:
    print("refused:", problem.problem)
"""

IN_FOLDER = """
import os, sys
os.chdir(sys.argv[1])
sys.argv[1] += "/runs.db"
"""

LIST = """
print(sorted(os.listdir()))
"""

OLD_RUN = "00000000-0000-4000-8000-000000000001"
OLD_INCARNATION = "00000000-0000-4000-8000-0000000000ff"


def write_old_file(path: Path) -> None:
    """Make a file as the first version left it: no families, one ended and one running row."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    first = Migration("runs", 1, load_scripts("runs", "sqlite")[0])
    connection.execute(first.script).fetchall()
    connection.execute("INSERT INTO migrations VALUES ('runs', 1, ?, 7)", (first.checksum,))
    connection.execute("INSERT INTO rooms VALUES ('main', ?, 3, NULL, 10, 20)", (OLD_INCARNATION,))
    for run_id in (OLD_RUN, OLD_RUN.replace("1", "2")):
        connection.execute(
            "INSERT INTO runs (id, room, incarnation, kind, actor, provenance, created_at, started_at, status, "
            "updated_at) VALUES (?, 'main', ?, 'run', 'somebody', '{}', 11, 12, 'running', 12)",
            (run_id, OLD_INCARNATION),
        )
    connection.execute("UPDATE runs SET status = 'completed', ended_at = 15, updated_at = 15 WHERE id = ?", (OLD_RUN,))
    connection.close()


async def open_and_close(path: Path, **options: Any) -> None:
    async with SqliteStore(path, **options):
        pass


def read_migrations(path: Path) -> list[Any]:
    connection = apsw.Connection(str(path))
    try:
        return connection.execute("SELECT * FROM migrations").fetchall()
    finally:
        connection.close()


class TestNewFile:
    async def test_holds_every_migration_once_however_often_it_is_opened(self, tmp_path: Path) -> None:
        path = tmp_path / "runs.db"
        await open_and_close(path)
        first = read_migrations(path)
        await open_and_close(path)

        assert [(part, number) for part, number, _, _ in first] == [("runs", 1), ("runs", 2)]
        assert read_migrations(path) == first

    async def test_leaves_one_file_when_it_was_closed(self, tmp_path: Path, contents: Contents) -> None:
        async with SqliteStore(tmp_path / "runs.db") as store, open_commands(store) as commands:
            await store.write(commands.admit())

        assert list(contents(tmp_path)) == ["runs.db"]

    @pytest.mark.parametrize("content", [b"", None])
    async def test_may_be_an_empty_one_that_is_there_already(self, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "runs.db"
        if content is None:
            connection = apsw.Connection(str(path))
            connection.execute("PRAGMA user_version = 0; VACUUM")
            connection.close()
        else:
            path.write_bytes(content)

        await open_and_close(path)

        assert len(read_migrations(path)) == 2

    async def test_of_a_part_gets_the_part_s_tables_too(self, tmp_path: Path) -> None:
        part = StorePart(
            name="notes",
            migrations={"sqlite": ("CREATE TABLE notes_texts (text TEXT) STRICT",)},
            sqlite={},
            memory={},
            sqlite_confirm={},
            memory_confirm={},
        )
        path = tmp_path / "runs.db"
        await open_and_close(path, parts=[part])
        # Whoever doesn't load the part can still use the Runs.
        async with SqliteStore(path) as store:
            report = await store.check()

        assert [row[:2] for row in read_migrations(path)] == [("notes", 1), ("runs", 1), ("runs", 2)]
        assert report.ok

    async def test_store_can_be_opened_once_at_a_time(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "runs.db")
        async with store:
            with pytest.raises(RuntimeError, match="open already"):
                await store.__aenter__()
        async with store:
            assert await store.list_rooms() == ()

    async def test_used_outside_its_block_is_refused(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "runs.db")
        async with store, open_commands(store) as commands:
            admission = commands.admit()

        with pytest.raises(RuntimeError, match="is not open"):
            await store.list_rooms()
        assert await refusal(store, admission) == "store-closed"


class TestOlderFile:
    async def test_from_before_families_is_brought_forward_and_stays_readable(self, tmp_path: Path) -> None:
        """R-10: a row from before families is read as it was, and nothing can make it look settled."""
        path = tmp_path / "runs.db"
        write_old_file(path)

        async with SqliteStore(path) as store, open_commands(store) as commands:
            row = await store.load_run("main", RunId(UUID(OLD_RUN)))
            adopted: int = await store.write(commands.adopt())
            orphan = (await store.list_runs(commands.query(limit=1))).runs[0]
            report = await store.check()

        assert row is not None
        assert (row.status, row.ended_at, row.family_version, row.family_return_ack) == (
            RunStatus.COMPLETED, 15, None, None,
        )  # fmt: skip
        assert adopted == 1
        assert (orphan.status, orphan.reason, orphan.family_return_ack) == (RunStatus.FAILED, "orphaned", None)
        assert commands.epoch == 4
        assert report.ok

    async def test_takes_no_family_witness_for_an_old_row(self, tmp_path: Path) -> None:
        """R-10: neither a mutation nor raw SQL gives an old row the evidence that its family returned."""
        path = tmp_path / "runs.db"
        write_old_file(path)

        async with SqliteStore(path) as store, open_commands(store) as commands:
            running = commands.admit(id=UUID(OLD_RUN.replace("1", "2")), family_version=None)
            code = await refusal(store, commands.finish(running))
            connection = apsw.Connection(str(path))
            with pytest.raises(apsw.ConstraintError):
                connection.execute("UPDATE runs SET family_return_ack = 'x' WHERE family_version IS NULL")
            connection.close()

        assert code == "family-version"

    async def test_is_read_as_it_is_by_a_reader(self, tmp_path: Path, contents: Contents) -> None:
        """R-10: whoever only reads doesn't bring the file forward, and reads what it doesn't have as absent."""
        path = tmp_path / "runs.db"
        write_old_file(path)
        before = contents(tmp_path)

        async with SqliteStore(path, read_only=True) as store:
            page = await store.list_runs(RunQuery(room="main"))
            report = await store.check()

        assert [(str(run.id), run.family_version) for run in page.runs][-1] == (OLD_RUN, None)
        assert report.ok
        assert contents(tmp_path) == before

    async def test_whose_new_script_fails_stays_as_it_was(self, tmp_path: Path, disk: FailingDisk) -> None:
        path = tmp_path / "runs.db"
        write_old_file(path)
        disk.writes_fail = True
        with pytest.raises(SchemaError, match="disk is full"):
            await open_and_close(path, vfs=disk.name)
        disk.writes_fail = False

        assert len(read_migrations(path)) == 1


class TestForeignFile:
    @pytest.mark.parametrize("read_only", [False, True])
    async def test_of_a_newer_version_is_refused_unchanged(
        self, tmp_path: Path, contents: Contents, *, read_only: bool
    ) -> None:
        """R-10: a file with a migration that this version doesn't know is a SchemaError, and unchanged."""
        path = tmp_path / "runs.db"
        await open_and_close(path)
        change(path, "INSERT INTO migrations VALUES ('runs', 3, 'abc', 7)")
        before = contents(tmp_path)

        with pytest.raises(SchemaError, match=r"newer version \(migration runs 3\); update spindel"):
            await open_and_close(path, read_only=read_only)
        assert contents(tmp_path) == before

    async def test_with_another_text_of_a_known_migration_is_refused_unchanged(
        self, tmp_path: Path, contents: Contents
    ) -> None:
        path = tmp_path / "runs.db"
        await open_and_close(path)
        change(path, "UPDATE migrations SET checksum = 'abc' WHERE number = 2")
        before = contents(tmp_path)

        with pytest.raises(SchemaError, match="migration runs 2 is not the one"):
            await open_and_close(path)
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("mode", ["DELETE", "WAL"])
    @pytest.mark.parametrize("made_by", ["CREATE TABLE t (x)", "PRAGMA application_id = 77"])
    async def test_of_another_program_is_refused_unchanged(
        self, tmp_path: Path, contents: Contents, mode: str, made_by: str
    ) -> None:
        path = tmp_path / "runs.db"
        connection = apsw.Connection(str(path))
        connection.execute(f"PRAGMA journal_mode = {mode}").fetchall()
        connection.execute(made_by).fetchall()
        connection.close()
        before = contents(tmp_path)

        with pytest.raises(SchemaError, match="database of another program"):
            await open_and_close(path)
        assert contents(tmp_path) == before

    async def test_in_use_by_another_program_keeps_its_journal(self, tmp_path: Path, contents: Contents) -> None:
        path = tmp_path / "runs.db"
        connection = apsw.Connection(str(path))
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("CREATE TABLE t (x)")
        before = {name: data for name, data in contents(tmp_path).items() if not name.endswith("-shm")}

        with pytest.raises(SchemaError, match="another program"):
            await open_and_close(path)
        assert {name: data for name, data in contents(tmp_path).items() if not name.endswith("-shm")} == before
        connection.close()

    @pytest.mark.parametrize("content", [b"no database at all, but a text\n" * 40, b"SQLite format 3\0" + b"x" * 84])
    async def test_that_is_no_database_is_refused_unchanged(
        self, tmp_path: Path, contents: Contents, content: bytes
    ) -> None:
        path = tmp_path / "runs.db"
        path.write_bytes(content)

        with pytest.raises(SchemaError, match="it is not a SQLite database"):
            await open_and_close(path)
        assert contents(tmp_path) == {"runs.db": content}

    async def test_that_was_cut_is_refused_unchanged(self, tmp_path: Path, contents: Contents) -> None:
        path = tmp_path / "runs.db"
        await open_and_close(path)
        path.write_bytes(path.read_bytes()[:4096])
        before = contents(tmp_path)

        with pytest.raises(SchemaError, match="the database is damaged"):
            await open_and_close(path)
        assert contents(tmp_path) == before


def change(path: Path, statement: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(statement)
    connection.close()


def protect(path: Path, mode: int) -> None:
    path.chmod(mode)


class TestOutOfReach:
    @pytest.mark.parametrize("read_only", [False, True])
    async def test_missing_folder_is_named(self, tmp_path: Path, contents: Contents, *, read_only: bool) -> None:
        with pytest.raises(SchemaError, match=r"does not exist|no such file"):
            await open_and_close(tmp_path / "nowhere" / "runs.db", read_only=read_only)
        assert contents(tmp_path) == {}

    async def test_folder_instead_of_a_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SchemaError, match="it is a folder; name a file"):
            await open_and_close(tmp_path)

    async def test_reader_makes_no_file(self, tmp_path: Path, contents: Contents) -> None:
        with pytest.raises(SchemaError, match="there is no such file"):
            await open_and_close(tmp_path / "runs.db", read_only=True)
        assert contents(tmp_path) == {}

    async def test_reader_is_told_of_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "runs.db").touch()

        with pytest.raises(SchemaError, match="it is empty"):
            await open_and_close(tmp_path / "runs.db", read_only=True)

    async def test_reader_can_not_write(self, tmp_path: Path) -> None:
        async with SqliteStore(tmp_path / "runs.db") as store, open_commands(store) as commands:
            admission = commands.admit()
        async with SqliteStore(tmp_path / "runs.db", read_only=True) as store:
            assert await refusal(store, admission) == "read-only"
            with pytest.raises(WriteRefusedError, match="read-only"):
                async with open_commands(store):
                    pass

    @pytest.mark.slow
    async def test_read_only_file_is_refused_and_can_be_read(
        self, public_folder: Path, run_as_user: RunProgram, contents: Contents
    ) -> None:
        path = public_folder / "runs.db"
        async with SqliteStore(path) as store, open_commands(store):
            pass
        protect(path, 0o444)
        before = contents(public_folder)
        writer = run_as_user(OPEN, path)
        reader = run_as_user(OPEN, path, "read-only")

        assert (writer.code, writer.errors) == (0, "")
        assert writer.output.startswith("refused: this user may not write to it")
        assert (reader.code, reader.output) == (0, "rooms ['main']\n")
        assert contents(public_folder) == before

    @pytest.mark.slow
    async def test_read_only_folder_is_refused_and_can_be_read(
        self, public_folder: Path, run_as_user: RunProgram, contents: Contents
    ) -> None:
        path = public_folder / "runs.db"
        async with SqliteStore(path) as store, open_commands(store):
            pass
        protect(path, 0o666)
        protect(public_folder, 0o555)
        before = contents(public_folder)
        writer = run_as_user(OPEN, path)
        reader = run_as_user(OPEN, path, "read-only")
        fresh = run_as_user(OPEN, public_folder / "fresh.db")

        assert (writer.code, writer.errors) == (0, "")
        assert writer.output.startswith("refused: this user may not write to the folder")
        assert (reader.code, reader.output) == (0, "rooms ['main']\n")
        assert fresh.output.startswith("refused: it can't be created")
        assert contents(public_folder) == before

    @pytest.mark.slow
    async def test_unreadable_file_is_refused(self, public_folder: Path, run_as_user: RunProgram) -> None:
        path = public_folder / "runs.db"
        await open_and_close(path)
        protect(path, 0o000)
        writer = run_as_user(OPEN, path)

        assert (writer.code, writer.errors) == (0, "")
        assert writer.output.startswith("refused: this user may not read it")

    @pytest.mark.slow
    async def test_whoever_may_not_write_the_file_leaves_nothing_beside_it(
        self, public_folder: Path, run_as_user: RunProgram, contents: Contents
    ) -> None:
        """R-10: in a folder that anybody may write to, another user's journal would shut the owner out for good."""
        path = public_folder / "runs.db"
        async with SqliteStore(path) as store, open_commands(store):
            pass
        protect(path, 0o644)
        protect(public_folder, 0o777)
        before = contents(public_folder)
        writer = run_as_user(OPEN, path)
        reader = run_as_user(OPEN, path, "read-only")

        assert (writer.code, writer.errors) == (0, "")
        assert writer.output.startswith("refused: this user may not write to it")
        assert (reader.code, reader.output) == (0, "rooms ['main']\n")
        assert contents(public_folder) == before

    @pytest.mark.slow
    @pytest.mark.parametrize("owner", ["lives", "was killed"])
    async def test_whoever_may_not_write_the_file_reads_it_by_the_journal_that_is_there(
        self, public_folder: Path, run_as_user: RunProgram, contents: Contents, owner: str
    ) -> None:
        """R-10: what stands only in another user's journal is read, and the journal left as it is."""
        path = public_folder / "runs.db"
        async with SqliteStore(path) as store, open_commands(store):
            assert (public_folder / "runs.db-wal").stat().st_size
            if owner == "was killed":
                files = contents(public_folder)
                path = public_folder / "copy" / "runs.db"
                path.parent.mkdir()
                for name, data in files.items():
                    (path.parent / name).write_bytes(data)
            for file in path.parent.iterdir():
                file.chmod(0o644 if file.is_file() else 0o777)
            protect(path.parent, 0o777)
            before = {file.name: file.stat().st_uid for file in path.parent.iterdir()}
            reader = run_as_user(OPEN, path, "read-only")
            after = {file.name: file.stat().st_uid for file in path.parent.iterdir()}

        assert (reader.code, reader.output, reader.errors) == (0, "rooms ['main']\n", "")
        assert after == before

    @pytest.mark.slow
    async def test_journal_of_somebody_else_is_named(self, public_folder: Path, run_as_user: RunProgram) -> None:
        path = public_folder / "runs.db"
        await open_and_close(path)
        (public_folder / "runs.db-shm").touch(mode=0o644)
        protect(path, 0o666)
        protect(public_folder, 0o777)
        writer = run_as_user(OPEN, path)

        assert (writer.code, writer.errors) == (0, "")
        assert writer.output.startswith(f"refused: this user may not write to its journal {path}-shm")

    @pytest.mark.parametrize("read_only", [False, True])
    @pytest.mark.parametrize(
        ("made_by", "problem"),
        [
            (os.mkfifo, "it is a device, a pipe or a socket; name a file"),
            (lambda path: path.symlink_to("/dev/null"), "it is a device, a pipe or a socket; name a file"),
            (lambda path: path.symlink_to("runs.db"), "it can't be opened: Too many levels of symbolic links"),
        ],
        ids=["pipe", "device", "links in a circle"],
    )
    async def test_what_is_no_file_is_refused_untouched(
        self, tmp_path: Path, made_by: Callable[[Path], object], problem: str, *, read_only: bool
    ) -> None:
        """R-10: a pipe is not waited for, and no journal is made beside a device."""

        def made() -> list[Path]:
            return [*tmp_path.iterdir(), *Path("/dev").glob("null-*")]

        path = tmp_path / "runs.db"
        made_by(path)

        with pytest.raises(SchemaError, match=problem):
            await open_and_close(path, read_only=read_only)
        assert made() == [path]

    async def test_link_to_a_file_is_followed(self, tmp_path: Path, contents: Contents) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "runs.db").symlink_to(tmp_path / "real" / "there.db")
        async with SqliteStore(tmp_path / "runs.db") as store, open_commands(store):
            pass
        async with SqliteStore(tmp_path / "runs.db", read_only=True) as store:
            rooms = await store.list_rooms()

        assert [room.name for room in rooms] == ["main"]
        assert list(contents(tmp_path / "real")) == ["there.db"]

    def test_empty_path_is_refused(self) -> None:
        with pytest.raises(SchemaError, match="the path is empty; name a file"):
            SqliteStore("")

    @pytest.mark.slow
    async def test_full_disk_with_a_file_is_refused_and_it_can_be_read(
        self, tmp_path: Path, run_on_small_disk: RunProgram
    ) -> None:
        """R-10: no journal that can't be filled is left on a full disk."""
        path = tmp_path / "runs.db"
        async with SqliteStore(path) as store, open_commands(store):
            pass
        fill = f"cp {path} . && {{ dd if=/dev/zero of=filler bs=1k count=2000 2>/dev/null || true; }}"
        writer = run_on_small_disk(IN_FOLDER + OPEN + LIST, before=fill)
        reader = run_on_small_disk(IN_FOLDER + OPEN + LIST, "read-only", before=fill)

        assert (writer.code, writer.errors) == (0, "")
        assert writer.output == (
            "refused: the disk is full; free some space and open it again\n['filler', 'runs.db']\n"
        )
        assert (reader.code, reader.output) == (0, "rooms ['main']\n['filler', 'runs.db']\n")

    @pytest.mark.slow
    def test_full_disk_is_refused_and_nothing_is_left(self, run_on_small_disk: RunProgram) -> None:
        done = run_on_small_disk(
            IN_FOLDER + OPEN + LIST, before="dd if=/dev/zero of=filler bs=1k count=2000 2>/dev/null || true"
        )

        assert (done.code, done.errors) == (0, "")
        assert done.output == "refused: the disk is full; free some space and open it again\n['filler']\n"


async def test_no_thread_is_left_when_opening_failed(tmp_path: Path) -> None:
    (tmp_path / "runs.db").write_bytes(b"nothing" * 100)
    with pytest.raises(SchemaError):
        await open_and_close(tmp_path / "runs.db")

    assert [thread.name for thread in threading.enumerate() if "spindel" in thread.name] == []


async def test_path_is_fixed_when_the_store_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("runs.db")
    os.chdir(tmp_path / "elsewhere")
    async with store:
        pass

    assert store.path == str(tmp_path / "runs.db")
    assert (tmp_path / "runs.db").exists()


def test_unknown_executor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither 'thread' nor 'inline'"):
        SqliteStore(tmp_path / "runs.db", executor="fibre")  # type: ignore[arg-type]
