"""Many mutations of one type at once: the same as one by one, with fewer statements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import apsw
import attrs
import pytest

from spindel.ids import WitnessStage, witness_id
from spindel.store import AdmitRun, AppendWitnesses, FinishRun, SqliteStore, StorePart
from spindel.store import _migrations as migrations_module
from spindel.store import _sqlite_backend as backend_module
from spindel.store import _sqlite_many as many_module
from spindel.store._connection import open_for_writing
from spindel.testing.store_contract import open_commands
from tests.store.test_sqlite_writing import codes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spindel.store import Mutation
    from spindel.testing.store_contract import Commands
    from tests.store.conftest import FailingDisk

FAMILY, CORE, ADAPTER = WitnessStage.FAMILY_RETURN, WitnessStage.CORE_CLEANUP, WitnessStage.ADAPTER_CLEANUP
COUNT = 70
ROWS = "SELECT * FROM runs ORDER BY id"


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the writer's connection executes from now on, in order."""
    seen: list[str] = []

    def note(_cursor: object, text: str, _values: object) -> bool:
        seen.append(text)
        return True

    def open_traced(*args: Any, **options: Any) -> apsw.Connection:
        connection = open_for_writing(*args, **options)
        connection.exec_trace = note
        return connection

    monkeypatch.setattr(migrations_module, "open_for_writing", open_traced)
    return seen


async def write_all(
    path: Path, make: Callable[[Commands], Sequence[Sequence[Mutation[Any]]]]
) -> tuple[list[list[Any]], list[Any]]:
    """Write groups of mutations to a new file. Gives all verdicts and all rows."""
    async with SqliteStore(path, executor="inline") as store, open_commands(store) as commands:
        verdicts = [codes_of(await store.write_each(group)) for group in make(attrs.evolve(commands, now=1))]
    connection = apsw.Connection(str(path))
    rows = connection.execute(ROWS).fetchall()
    connection.close()
    return verdicts, rows


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 65, 81, 130])
async def test_all_rows_are_written_whatever_their_number(tmp_path: Path, count: int) -> None:
    def make(commands: Commands) -> list[list[Any]]:
        jobs = [commands.admit_job() for _ in range(count)]
        runs = [commands.admit() for _ in range(count)]
        return [
            jobs,
            runs,
            [commands.witnesses(job, FAMILY, CORE) for job in jobs],
            [commands.finish(job, family_returned=False, job_result_state="unavailable") for job in jobs],
            [commands.finish(run, "failed", error=f"error {run.id}") for run in runs],
            [commands.witnesses(job, ADAPTER) for job in jobs],
        ]

    async with SqliteStore(tmp_path / "runs.db", executor="inline") as store, open_commands(store) as commands:
        groups = make(commands)
        verdicts = [await store.write_each(group) for group in groups]
        loaded = [await store.load_run("main", mutation.id) for group in groups[:2] for mutation in group]
        report = await store.check()

    jobs, runs = loaded[:count], loaded[count:]
    assert verdicts == [[None] * count] * 6
    assert report.ok
    assert [
        (job.family_return_ack, job.job_core_cleanup_ack, job.job_adapter_cleanup_ack, job.ended_at)
        for job in jobs
        if job
    ] == [
        (*(witness_id(stage, first.id) for stage in (FAMILY, CORE, ADAPTER)), end.ended_at)
        for first, end in zip(groups[0], groups[3], strict=True)
    ]
    assert [(run.family_return_ack, run.status, run.error) for run in runs if run] == [
        (witness_id(FAMILY, first.id), "failed", f"error {first.id}") for first in groups[1]
    ]


async def test_a_batch_of_equal_ones_is_a_few_statements(tmp_path: Path, statements: list[str]) -> None:
    async with SqliteStore(tmp_path / "runs.db", executor="inline") as store, open_commands(store) as commands:
        jobs = [commands.admit_job() for _ in range(128)]
        for group in (
            jobs,
            [commands.witnesses(job, FAMILY, CORE) for job in jobs],
            [commands.finish(job, family_returned=False) for job in jobs],
            [commands.witnesses(job, ADAPTER) for job in jobs],
        ):
            statements.clear()
            await store.write_each(group)

            # The transaction, the savepoint around them, who owns the room, and twice 64 rows.
            assert len(statements) == 7


def duplicate(commands: Commands, groups: list[list[Any]]) -> None:
    groups[0][30] = commands.admit(id=groups[0][3].id, kind="other")


def repeat(_: Commands, groups: list[list[Any]]) -> None:
    for group in groups:
        group.insert(30, group[3])


def stranger(_: Commands, groups: list[list[Any]]) -> None:
    for group in groups:
        fields = {name: getattr(group[30], name) for name in group[30].__struct_fields__}
        group[30] = type(group[30])(**(fields | {"epoch": 7}))


def orphan(commands: Commands, groups: list[list[Any]]) -> None:
    groups[0][30] = commands.admit(parent_id=commands.admit().id)


def child_of_a_neighbour(commands: Commands, groups: list[list[Any]]) -> None:
    groups[0][30] = commands.admit_job(id=groups[0][30].id, parent_id=groups[0][29].id)


def false_witness(commands: Commands, groups: list[list[Any]]) -> None:
    groups[1][30] = commands.witnesses(groups[0][30], CORE, family=witness_id(FAMILY, groups[0][29].id))


def two_halves_of_one(commands: Commands, groups: list[list[Any]]) -> None:
    groups[1][30:31] = [commands.witnesses(groups[0][30], CORE), commands.witnesses(groups[0][30], FAMILY)]


def other_outcome(commands: Commands, groups: list[list[Any]]) -> None:
    groups[2].insert(40, commands.finish(groups[0][3], "failed", family_returned=False))


def unknown(commands: Commands, groups: list[list[Any]]) -> None:
    groups[1][30] = commands.witnesses(commands.admit(), CORE)
    groups[2][30] = commands.finish(commands.admit())


def some_with_their_witness(commands: Commands, groups: list[list[Any]]) -> None:
    groups[2][20:40] = [commands.finish(job, family_returned=True) for job in groups[0][20:40]]


def a_waiting_one(commands: Commands, groups: list[list[Any]]) -> None:
    groups[2][30] = commands.finish(groups[0][30], "waiting", family_returned=False)


TROUBLES = [
    duplicate,
    repeat,
    stranger,
    orphan,
    child_of_a_neighbour,
    false_witness,
    two_halves_of_one,
    other_outcome,
    unknown,
    some_with_their_witness,
    a_waiting_one,
]


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_verdicts_and_rows_are_those_of_one_by_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statements: list[str],
    trouble: Callable[[Commands, list[list[Any]]], None],
) -> None:
    """R-03: whichever of many is refused, or repeated, it alone is, and all others stay."""
    script: list[list[Any]] = []

    def make(commands: Commands) -> list[list[Any]]:
        if not script:
            jobs = [commands.admit_job() for _ in range(COUNT)]
            script.extend(
                [
                    list(jobs),
                    [commands.witnesses(job, FAMILY, CORE) for job in jobs],
                    [commands.finish(job, family_returned=False) for job in jobs],
                    [commands.witnesses(job, ADAPTER) for job in jobs],
                ]
            )
            trouble(commands, script)
        # The same ids in both files, and the incarnation of each.
        return [
            [
                one
                if not isinstance(one, AdmitRun)
                else AdmitRun(
                    **{name: getattr(one, name) for name in AdmitRun.__struct_fields__}
                    | {"incarnation": commands.incarnation}
                )
                for one in group
            ]
            for group in script
        ]

    at_once = await write_all(tmp_path / "at_once.db", make)
    attempts = statements.count("SAVEPOINT many")
    monkeypatch.setattr(backend_module, "MANY_MIN", 1000)
    one_by_one = await write_all(tmp_path / "one_by_one.db", make)

    # Somebody else's mutation among them is seen before any is applied.
    assert attempts == (0 if trouble is stranger else 4)
    assert at_once[0] == one_by_one[0]
    # All columns but the incarnation, which is the third.
    assert [(*row[:2], *row[3:]) for row in at_once[1]] == [(*row[:2], *row[3:]) for row in one_by_one[1]]


async def test_a_failing_commit_leaves_many_uncertain_and_judges_the_others_again(
    tmp_path: Path, disk: FailingDisk
) -> None:
    """R-04: many that were applied at once are uncertain one by one, and those refused beside them are judged anew."""
    async with (
        SqliteStore(tmp_path / "runs.db", vfs=disk.name, executor="inline") as store,
        open_commands(store) as commands,
    ):
        first = [commands.admit() for _ in range(20)]
        others = [commands.admit(id=one.id, kind="other") for one in first]
        disk.syncs_to_fail = 1
        # Outcomes of nothing between them, so that each twenty are tried at once.
        results = codes_of(await store.write_each([*first, commands.finish(commands.admit()), *others]))
        stored = {run.kind for run in (await store.list_runs(commands.query(limit=100))).runs}

    # Whichever of the two contents is in the file now, the verdicts fit it.
    assert results[:20] == ["uncertain"] * 20
    assert results[20] == ("run-unknown", False)
    assert results[21:] == [{"run": ("run-exists", False), "other": None}[kind] for kind in stored] * 20


async def test_a_part_s_bug_with_many_is_told_to_nobody_if_each_alone_works(tmp_path: Path) -> None:
    def add(connection: apsw.Connection, note: Note) -> int:
        connection.execute("INSERT INTO notes_texts VALUES (?)", (note.text,))
        count: int = connection.execute("SELECT count(*) FROM notes_texts").get
        return count

    def add_many(connection: apsw.Connection, notes: Sequence[Note]) -> None:
        for note in notes:
            add(connection, note)
        raise ZeroDivisionError

    part = StorePart(
        name="notes",
        migrations={"sqlite": ("CREATE TABLE notes_texts (text TEXT) STRICT",)},
        sqlite={Note: add},
        memory={},
        sqlite_confirm={},
        memory_confirm={},
        sqlite_many={Note: add_many},
    )
    async with (
        SqliteStore(tmp_path / "runs.db", parts=[part], executor="inline") as store,
        open_commands(store) as commands,
    ):
        results = await store.write_each([Note("main", commands.epoch, str(number)) for number in range(20)])

    assert results == list(range(1, 21))


@attrs.frozen
class Note:
    """A mutation of a part that can apply many, badly."""

    part: ClassVar[str] = "notes"

    room: str
    epoch: int
    text: str

    @property
    def identity(self) -> tuple[str, ...]:
        return ("note", self.text)


async def test_each_row_is_looked_up_by_its_id_however_many_run(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "runs.db"):
        pass
    connection = apsw.Connection(str(tmp_path / "runs.db"))
    updates: list[tuple[str, tuple[str, ...]]] = [
        (many_module._FINISH_MANY, FinishRun.__struct_fields__),
        (many_module._FINISH_RETURNED_MANY, (*FinishRun.__struct_fields__, "witness")),
        (many_module._WITNESS_MANY, AppendWitnesses.__struct_fields__),
    ]
    plans = [
        [
            step[3]
            for step in connection.execute(
                f"EXPLAIN QUERY PLAN {many_module._text_of(statement, columns, 64)}", (None,) * len(columns) * 64
            )
        ]
        for statement, columns in updates
    ]
    connection.close()

    for plan in plans:
        assert [step for step in plan if "runs" in step] == ["SEARCH runs USING PRIMARY KEY (id=?)"]
