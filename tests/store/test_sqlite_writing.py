"""Batches: what is committed together, what a failing commit leaves behind, and who hears of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import apsw
import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from spindel.clock import foreign_work
from spindel.errors import WriteRefusedError, WriteUncertainError
from spindel.store import AdmitRun, Confirmation, SqliteStore, StorePart, Together
from spindel.store import _connection as connection_module
from spindel.store._executor import InlineExecutor
from spindel.store._writer import BATCH_MAX
from spindel.testing.store_contract import open_commands
from tests.store.conftest import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spindel.store import Mutation
    from spindel.store._executor import Lane
    from tests.store.conftest import FailingDisk, RunProgram

EXECUTORS = pytest.mark.parametrize("executor", ["thread", "inline"])


def codes_of(results: Sequence[Any]) -> list[Any]:
    return [
        (result.code, result.transient)
        if isinstance(result, WriteRefusedError)
        else "uncertain"
        if isinstance(result, WriteUncertainError)
        else result
        for result in results
    ]


class TestBatch:
    @EXECUTORS
    async def test_of_256_queued_admissions_takes_at_most_two_commits(self, tmp_path: Path, executor: Any) -> None:
        """R-87: 256 admissions that wait at the same moment are written in at most 2 commits."""
        async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
            before = store.commits
            async with trio.open_nursery() as nursery:
                for _ in range(256):
                    nursery.start_soon(store.write, commands.admit())
            tasks = store.commits - before
            await store.write_each([commands.admit() for _ in range(256)])
            group = store.commits - before - tasks

        assert tasks <= 2
        assert group == 1

    @EXECUTORS
    async def test_larger_than_the_limit_is_split_and_loses_nothing(self, tmp_path: Path, executor: Any) -> None:
        async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
            before = store.commits
            results = await store.write_each([commands.admit() for _ in range(1000)])
            commits = store.commits - before
            report = await store.check()

        assert results == [None] * 1000
        assert commits == 4
        assert report.runs == 1000

    @EXECUTORS
    async def test_undoes_a_refused_mutation_alone(self, tmp_path: Path, executor: Any) -> None:
        """R-03: in one batch the refused mutation is undone, a refused `Together` as a whole, its neighbours not."""
        async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
            first, second, inside, after = (commands.admit() for _ in range(4))
            other = commands.admit(id=first.id, kind="other")
            before = store.commits
            results = await store.write_each(
                [first, other, Together(mutations=(inside, commands.finish(inside), other)), second, after]
            )
            commits = store.commits - before
            rows = {run.id for run in (await store.list_runs(commands.query())).runs}

        assert codes_of(results) == [None, ("run-exists", False), ("run-exists", False), None, None]
        assert commits == 1
        assert rows == {first.id, second.id, after.id}

    @EXECUTORS
    async def test_has_the_writes_of_all_tasks_that_write_again_and_again(self, tmp_path: Path, executor: Any) -> None:
        async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
            before = store.commits
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(write_in_turn, store, [commands.admit() for _ in range(20)])
            commits = store.commits - before
            report = await store.check()

        assert report.runs == 1000
        assert commits == 20

    async def test_is_shared_by_tasks_that_began_apart(self, tmp_path: Path) -> None:
        """One whose first write came while the other's was committed writes with it from then on."""
        executor = GatedExecutor()
        async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
            before = store.commits
            executor.lane.shut = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write_in_turn, store, [commands.admit() for _ in range(10)])
                await wait_all_tasks_blocked()
                nursery.start_soon(write_in_turn, store, [commands.admit() for _ in range(10)])
                await wait_all_tasks_blocked()
                handed_over = len(executor.lane.kept)
                executor.lane.open()
            commits = store.commits - before

        assert handed_over == 1
        # The first one alone, nine shared, the late one's last alone.
        assert commits == 11

    async def test_has_the_writes_of_those_whom_the_delivery_resumed_and_of_those_whom_they_woke(
        self, tmp_path: Path
    ) -> None:
        async with (
            SqliteStore(tmp_path / "runs.db", executor="inline") as store,
            open_commands(store) as commands,
            trio.open_nursery() as nursery,
        ):

            async def write_and_wake() -> None:
                woken = trio.Event()

                async def write_when_woken() -> None:
                    await woken.wait()
                    await store.write(commands.admit())

                nursery.start_soon(write_when_woken)
                await store.write(commands.admit())
                woken.set()
                await store.write(commands.admit())

            before = store.commits
            for _ in range(20):
                nursery.start_soon(write_and_wake)
            await wait_all_tasks_blocked()
            commits = store.commits - before

        assert commits == 2

    async def test_keeps_the_order_of_the_writes_and_readings_that_came_meanwhile(self, tmp_path: Path) -> None:
        """What waits for a hand-over is applied in the order in which it was queued, over several turns."""
        executor = GatedExecutor()
        async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
            runs = [commands.admit() for _ in range(BATCH_MAX)]
            last = commands.finish(runs[-1])
            found: dict[str, Confirmation] = {}

            async def read_back(mutation: Mutation[Any], when: str) -> None:
                found[when] = await store.confirm(mutation)

            steps: list[tuple[Any, ...]] = [
                (read_back, runs[0], "before its write"),
                (store.write, runs[0]),
                (read_back, runs[0], "after its write"),
                (store.write_each, runs[1:]),
                (store.write, last),
                (read_back, last, "in the next turn"),
            ]
            executor.lane.shut = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.write, commands.admit())
                await wait_all_tasks_blocked()
                for step in steps:
                    nursery.start_soon(*step)
                    await wait_all_tasks_blocked()
                kept = len(executor.lane.kept)
                executor.lane.open()
            report = await store.check()

        assert kept == 1
        assert found == {
            "before its write": Confirmation.ABSENT,
            "after its write": Confirmation.PRESENT,
            "in the next turn": Confirmation.PRESENT,
        }
        assert report.runs == BATCH_MAX + 1

    async def test_of_one_that_writes_alone_is_not_kept_waiting(self, tmp_path: Path) -> None:
        """After a pause a write is handed over in the next tick of the loop, and after another write soon after it."""
        executor = GatedExecutor()
        async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
            executor.lane.shut = True
            ticks: list[int] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write_in_turn, store, [commands.admit(), commands.admit()])
                for _ in range(2):
                    ticks.append(0)
                    while not executor.lane.kept:
                        ticks[-1] += 1
                        await trio.lowlevel.checkpoint()
                    executor.lane.deliver()
                await wait_all_tasks_blocked()
                executor.lane.open()

        assert ticks[0] <= 3
        assert ticks[1] <= 5

    async def test_in_flight_is_foreign_work_for_a_test_s_clock(self, tmp_path: Path) -> None:
        async with SqliteStore(tmp_path / "runs.db") as store, open_commands(store) as commands:
            busy: list[bool] = []
            foreign_work().listen(busy.append)
            await store.write_each([commands.admit(), commands.admit()])
            await store.list_rooms()
            foreign_work().listen(None)

        assert busy == [False, True, False, True, False]


class GatedLane:
    """A lane that a test can shut: then it keeps its work until the test has it done."""

    def __init__(self) -> None:
        self.shut = False
        self.kept: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []

    def submit(self, work: Callable[[], Any], deliver: Callable[[Any], object]) -> None:
        self.kept.append((work, deliver))
        if not self.shut:
            self.deliver()

    def deliver(self) -> None:
        kept, self.kept = self.kept, []
        for work, deliver in kept:
            deliver(work())

    def open(self) -> None:
        self.shut = False
        self.deliver()

    def close(self) -> None:
        assert not self.kept


class GatedExecutor:
    def __init__(self) -> None:
        self.lane = GatedLane()

    def open_lane(self, name: str) -> Lane:
        return self.lane if name == "store writer" else InlineExecutor().open_lane(name)


async def write_in_turn(store: SqliteStore, mutations: Sequence[AdmitRun]) -> None:
    for mutation in mutations:
        await store.write(mutation)


class TestFailingCommit:
    @EXECUTORS
    async def test_leaves_effects_uncertain_and_judges_the_others_again(
        self, tmp_path: Path, disk: FailingDisk, executor: Any
    ) -> None:
        """R-04: after a failed COMMIT effects are uncertain, the others are judged again, and nothing is repeated."""
        async with (
            SqliteStore(tmp_path / "runs.db", vfs=disk.name, executor=executor) as store,
            open_commands(store) as commands,
        ):
            admission = commands.admit()
            other = commands.admit(id=admission.id, kind="other")
            stranger = attrs.evolve(commands, epoch=99).admit()
            commits = store.commits
            disk.syncs_to_fail = 1
            results = await store.write_each([admission, other, admission, stranger])
            commits = store.commits - commits
            stored = [run.kind for run in (await store.list_runs(commands.query())).runs]
            first_confirmed = await store.confirm(admission)
            other_confirmed = await store.confirm(other)

        # Whichever of the two contents has the id now, the verdicts fit it, and only those given after the failure.
        verdicts = {"run": [("run-exists", False), None], "other": [None, ("run-exists", False)]}
        assert len(stored) == 1
        assert codes_of(results) == ["uncertain", *verdicts[stored[0]], ("not-owner", False)]
        assert commits == 1
        assert first_confirmed is (Confirmation.PRESENT if stored == ["run"] else Confirmation.CONFLICT)
        assert other_confirmed is (Confirmation.PRESENT if stored == ["other"] else Confirmation.CONFLICT)

    @EXECUTORS
    async def test_while_the_disk_stays_broken_nothing_is_confirmed_and_writes_are_refused_for_now(
        self, tmp_path: Path, disk: FailingDisk, executor: Any, autojump_clock: MockClock
    ) -> None:
        """R-04: until a checkpoint succeeds, reading back is uncertain and writes are refused as transient."""
        async with (
            SqliteStore(tmp_path / "runs.db", vfs=disk.name, executor=executor) as store,
            open_commands(store) as commands,
        ):
            admission = commands.admit()
            other = commands.admit(id=admission.id, kind="other")
            disk.syncs_to_fail = 1000
            results = await store.write_each([admission, other])
            confirmed_meanwhile = await confirmation_of(store, admission)
            refused = codes_of(await store.write_each([commands.admit()]))
            disk.syncs_to_fail = 0
            await trio.sleep(5)
            confirmed = await confirmation_of(store, admission)
            await store.write(admission)
            confirmed_at_last = await confirmation_of(store, admission)
            report = await store.check()

        assert codes_of(results) == ["uncertain", ("store-unavailable", True)]
        assert confirmed_meanwhile is None
        assert refused == [("store-unavailable", True)]
        assert confirmed in {Confirmation.PRESENT, Confirmation.ABSENT}
        assert confirmed_at_last is Confirmation.PRESENT
        assert report.ok
        assert report.runs == 1

    async def test_is_followed_by_a_whole_checkpoint_before_anything_is_believed(
        self, tmp_path: Path, disk: FailingDisk
    ) -> None:
        journal = tmp_path / "runs.db-wal"
        async with (
            SqliteStore(tmp_path / "runs.db", vfs=disk.name, executor="inline") as store,
            open_commands(store) as commands,
        ):
            disk.syncs_to_fail = 1
            [result] = await store.write_each([commands.admit()])
            before = journal.stat().st_size
            await store.confirm(commands.admit())
            after = journal.stat().st_size

        assert isinstance(result, WriteUncertainError)
        assert before > 0
        assert after == 0

    async def test_is_not_followed_by_attempts_without_a_pause(
        self, tmp_path: Path, disk: FailingDisk, autojump_clock: MockClock
    ) -> None:
        async with (
            SqliteStore(tmp_path / "runs.db", vfs=disk.name, executor="inline") as store,
            open_commands(store) as commands,
        ):
            disk.syncs_to_fail = 1000
            await store.write_each([commands.admit()])
            counts = [disk.syncs]
            for pause in (0.0, 0.0, 0.025, 0.025, 0.025):
                await trio.sleep(pause)
                await store.write_each([commands.admit()])
                counts.append(disk.syncs)
            disk.syncs_to_fail = 0
            await trio.sleep(5)
            await store.write(commands.admit())

        attempted = [later > earlier for earlier, later in pairwise(counts)]
        # At once, then after 25 ms, then after 50 ms.
        assert attempted == [True, False, True, False, True]


class TestFailureBeforeCommit:
    @EXECUTORS
    async def test_refuses_the_whole_batch_for_now(self, tmp_path: Path, executor: Any) -> None:
        async with (
            SqliteStore(tmp_path / "runs.db", parts=[NOTES], executor=executor) as store,
            open_commands(store) as commands,
        ):
            first, second = commands.admit(), commands.admit()
            note = WriteNote(room="main", epoch=commands.epoch, problem=apsw.FullError("no room is left"))
            results = await store.write_each([first, note, second])
            again = await store.write_each([first, second])

        assert codes_of(results) == [("disk-full", True)] * 3
        assert again == [None, None]

    @EXECUTORS
    async def test_of_a_part_s_own_code_is_told_to_its_caller_alone(self, tmp_path: Path, executor: Any) -> None:
        async with (
            SqliteStore(tmp_path / "runs.db", parts=[NOTES], executor=executor) as store,
            open_commands(store) as commands,
        ):
            first, second = commands.admit(), commands.admit()
            note = WriteNote(room="main", epoch=commands.epoch, problem=ZeroDivisionError("a bug"))
            results = await store.write_each([first, note, second])
            notes: int = await store.write(WriteNote(room="main", epoch=commands.epoch))

        assert results[0] is None
        assert isinstance(results[1], ZeroDivisionError)
        assert results[2] is None
        # What the failing one had written before it failed was undone.
        assert notes == 1

    async def test_of_a_part_s_rule_has_the_rule_s_code(self, tmp_path: Path) -> None:
        async with SqliteStore(tmp_path / "runs.db", parts=[NOTES]) as store, open_commands(store) as commands:
            results = await store.write_each(
                [
                    WriteNote(room="main", epoch=commands.epoch, text=""),
                    WriteNote(room="main", epoch=commands.epoch, text="much too long"),
                    WriteNote(room="main", epoch=7),
                ]
            )

        assert codes_of(results) == [("note-empty", False), ("check", False), ("not-owner", False)]


@attrs.frozen
class WriteNote:
    """A mutation of several statements; returns how many notes there are."""

    part: ClassVar[str] = "notes"

    room: str
    epoch: int
    text: str = "hello"
    problem: Exception | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        return ("write-note", self.text)


def write_note(connection: apsw.Connection, note: WriteNote) -> int:
    connection.execute("INSERT INTO notes_texts VALUES (?)", (note.text,))
    if note.problem is not None:
        raise note.problem
    count: int = connection.execute("SELECT count(*) FROM notes_texts").get
    return count


NOTES_SCRIPT = """
CREATE TABLE notes_texts (text TEXT CHECK (length(text) < 10)) STRICT;
CREATE TRIGGER notes_rule BEFORE INSERT ON notes_texts WHEN NEW.text = ''
BEGIN SELECT RAISE(ABORT, 'note-empty'); END;
"""
NOTES = StorePart(
    name="notes",
    migrations={"sqlite": (NOTES_SCRIPT,)},
    sqlite={WriteNote: write_note},
    memory={},
    sqlite_confirm={},
    memory_confirm={},
)


class TestLock:
    async def test_of_another_process_is_waited_for_and_never_seen(self, tmp_path: Path) -> None:
        async with SqliteStore(tmp_path / "runs.db") as store, open_commands(store) as commands:
            other = apsw.Connection(str(tmp_path / "runs.db"))
            other.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.write, commands.admit())
                await wait_all_tasks_blocked()
                other.execute("COMMIT")
            other.close()
            report = await store.check()

        assert report.runs == 1

    async def test_that_is_never_given_back_refuses_the_write_for_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection_module, "BUSY_MILLISECONDS", 1)
        async with SqliteStore(tmp_path / "runs.db") as store, open_commands(store) as commands:
            other = apsw.Connection(str(tmp_path / "runs.db"))
            other.execute("BEGIN IMMEDIATE")
            admission = commands.admit()
            [result] = await store.write_each([admission])
            other.execute("COMMIT")
            other.close()
            await store.write(admission)

        assert codes_of([result]) == [("busy", True)]


class TestClosing:
    async def test_writes_what_was_queued_and_leaves_no_thread(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "runs.db")
        await store.__aenter__()
        results: list[Any] = []

        async def write(mutation: AdmitRun) -> None:
            results.append(await store.write(mutation))

        async with open_commands(store) as commands:
            mutations = [commands.admit() for _ in range(300)]
            async with trio.open_nursery() as nursery:
                for mutation in mutations:
                    nursery.start_soon(write, mutation)
                await trio.lowlevel.checkpoint()
                nursery.start_soon(store.__aexit__, None, None, None)
        async with SqliteStore(tmp_path / "runs.db", read_only=True) as reader:
            report = await reader.check()

        assert results == [None] * 300
        assert report.runs == 300
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("spindel store")] == []

    @pytest.mark.slow
    def test_forgotten_does_not_keep_the_process(self, tmp_path: Path) -> None:
        program = f"""
import trio
from spindel.store import SqliteStore

async def main():
    await SqliteStore({str(tmp_path / "runs.db")!r}).__aenter__()

trio.run(main)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], check=False, cwd=REPOSITORY, timeout=60, capture_output=True, text=True
        )

        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_full_disk_refuses_or_leaves_open_what_it_could_not_take_and_goes_on_later(
    run_on_small_disk: RunProgram,
) -> None:
    """R-02: what a full disk made uncertain is settled by confirming and repeating once there is room again."""
    done = run_on_small_disk(FULL_DISK)

    assert (done.code, done.errors) == (0, "")
    assert done.output.split() == ["filled", "settled", "True"]


FULL_DISK = """
import logging, os, sys, trio
from spindel.errors import WriteRefusedError, WriteUncertainError
from spindel.store import Confirmation, SqliteStore
from spindel.testing.store_contract import open_commands

logging.disable()
os.chdir(sys.argv[1])

async def main():
    os.chdir(sys.argv[1])
    with open("filler", "wb") as filler:
        filler.write(b"x" * 4096)
    async with SqliteStore("runs.db", executor="inline") as store, open_commands(store) as commands:
        admitted, doubtful, refused = [], [], []
        while not doubtful and not refused:
            batch = [commands.admit() for _ in range(20)]
            for mutation, result in zip(batch, await store.write_each(batch)):
                if result is None:
                    admitted.append(mutation)
                elif isinstance(result, WriteUncertainError):
                    doubtful.append(mutation)
                else:
                    assert isinstance(result, WriteRefusedError) and result.transient, result
                    refused.append(mutation)
        print("filled")
        os.remove("filler")
        os.system("mount -o remount,size=8m " + sys.argv[1])
        await trio.sleep(0.03)
        for mutation in doubtful:
            assert await store.confirm(mutation) is not Confirmation.CONFLICT
        for mutation in [*doubtful, *refused]:
            await store.write(mutation)
        print("settled")
        report = await store.check()
        print(report.ok and report.runs == len(admitted) + len(doubtful) + len(refused))

trio.run(main)
"""


async def confirmation_of(store: SqliteStore, mutation: Mutation[Any]) -> Confirmation | None:
    """Give what reading back says, or None while it can't be believed."""
    try:
        return await store.confirm(mutation)
    except WriteUncertainError:
        return None
