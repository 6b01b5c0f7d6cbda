"""Checking a file: each invariant that was broken past the triggers is found and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.ids import RunId, WitnessStage
from spindel.store import SqliteStore
from spindel.store import _check as check_module
from spindel.store import _sqlite_check as sqlite_check
from spindel.store._executor import InlineExecutor
from spindel.testing.store_contract import open_commands

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spindel.store import AdmitRun
    from spindel.store._executor import Lane

Rows = dict[str, "AdmitRun"]


async def fill(path: Path) -> Rows:
    """Make a file with a closed room that has a row in each state."""
    async with SqliteStore(path, executor="inline") as store, open_commands(store) as commands:
        rows = {name: commands.admit() for name in ("root", "completed", "waiting", "fence", "cause")}
        rows["job"] = commands.admit_job()
        rows["child"] = commands.admit(parent_id=rows["root"].id)
        results = await store.write_each(
            [
                *rows.values(),
                commands.finish(rows["cause"]),
                commands.causes(rows["completed"], rows["cause"]),
                commands.finish(rows["completed"]),
                commands.finish(rows["waiting"], "waiting", reason="later"),
                commands.fence(rows["fence"]),
                commands.dispose(rows["fence"]),
                commands.witnesses(rows["job"], WitnessStage.CORE_CLEANUP, WitnessStage.FAMILY_RETURN),
                commands.finish(rows["job"], job_result_state="accepted"),
                commands.witnesses(rows["job"], WitnessStage.ADAPTER_CLEANUP),
                commands.finish(rows["child"]),
                commands.finish(rows["root"]),
            ]
        )

    assert results == [None] * len(results)
    return rows


def break_in(path: Path, *statements: str) -> None:
    """Change a file past everything that guards it, and leave the guards as they were."""
    connection = apsw.Connection(str(path))
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    connection.execute("PRAGMA ignore_check_constraints = 1")
    connection.execute("PRAGMA foreign_keys = 0")
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    for _, text in triggers:
        connection.execute(str(text))
    connection.close()


async def check(path: Path) -> tuple[set[str], set[RunId | None]]:
    """Give the codes of all violations, and whom they are about."""
    async with SqliteStore(path, read_only=True, executor="inline") as store:
        report = await store.check()
    violations = [finding for finding in report.findings if finding.violation]

    assert report.violations == len(violations)
    assert report.ok == (not violations)
    return {finding.code for finding in violations}, {finding.run_id for finding in violations}


async def test_of_a_sound_file_counts_and_finds_nothing(tmp_path: Path) -> None:
    await fill(tmp_path / "runs.db")
    async with SqliteStore(tmp_path / "runs.db", read_only=True) as store:
        report = await store.check()

    assert report.findings == ()
    assert (report.rooms, report.runs, report.running, report.orphans, report.causes) == (1, 7, 0, 0, 1)


BREACHES: list[tuple[str, str, str]] = [
    ("completed", "id-form", "UPDATE runs SET trigger_id = 'NOT-A-UUID' WHERE id = ?"),
    ("completed", "end-time", "UPDATE runs SET ended_at = NULL WHERE id = ?"),
    ("completed", "end-time", "UPDATE runs SET status = 'cancelling' WHERE id = ?"),
    ("completed", "times", "UPDATE runs SET ended_at = started_at - 1 WHERE id = ?"),
    ("completed", "times", "UPDATE runs SET updated_at = started_at - 1 WHERE id = ?"),
    ("waiting", "outcome", "UPDATE runs SET status = 'running', family_return_ack = NULL WHERE id = ?"),
    ("waiting", "outcome", "UPDATE runs SET job_result_state = 'accepted' WHERE id = ?"),
    ("job", "outcome", "UPDATE runs SET reason = 'orphaned' WHERE id = ?"),
    ("completed", "text-form", "UPDATE runs SET reason = 'Not A Reason' WHERE id = ?"),
    ("completed", "text-form", "UPDATE runs SET error = printf('%.*c', 2001, 'x') WHERE id = ?"),
    ("completed", "provenance", "UPDATE runs SET provenance = 'no json' WHERE id = ?"),
    ("completed", "provenance", "UPDATE runs SET provenance = '[]' WHERE id = ?"),
    ("completed", "witness-value", "UPDATE runs SET family_return_ack = incarnation WHERE id = ?"),
    ("job", "witness-value", "UPDATE runs SET job_core_cleanup_ack = family_return_ack WHERE id = ?"),
    ("job", "witness-value", "UPDATE runs SET job_adapter_cleanup_ack = family_return_ack WHERE id = ?"),
    ("job", "witness-order", "UPDATE runs SET job_core_cleanup_ack = NULL WHERE id = ?"),
    ("completed", "witness-order", "UPDATE runs SET family_version = NULL WHERE id = ?"),
    ("fence", "fence-executed", "UPDATE runs SET job_result_state = 'accepted' WHERE id = ?"),
    ("fence", "disposal", "UPDATE runs SET admission_disposal = 'lost' WHERE id = ?"),
    ("fence", "disposal", "UPDATE runs SET reason = 'other' WHERE id = ?"),
    ("child", "parent", "UPDATE runs SET parent_id = '00000000-0000-4000-8000-000000000000' WHERE id = ?"),
    ("child", "parent", "UPDATE runs SET incarnation = '00000000-0000-4000-8000-000000000000' WHERE id = ?"),
    ("child", "parent", "UPDATE runs SET parent_id = (SELECT id FROM runs WHERE reason = 'admission-failed') WHERE id = ?"),
    ("child", "outlived-parent", "UPDATE runs SET status = 'running', ended_at = NULL, family_return_ack = NULL WHERE id = ?"),
    ("child", "after-parent", "UPDATE runs SET ended_at = ended_at + 1000, updated_at = updated_at + 1000 WHERE id = ?"),
    ("completed", "cause", "UPDATE run_causes SET cause_id = run_id WHERE run_id = ?"),
    ("cause", "cause", "UPDATE runs SET status = 'running', ended_at = NULL, family_return_ack = NULL WHERE id = ?"),
    ("cause", "witness-order", "UPDATE runs SET status = 'failed', reason = 'orphaned' WHERE id = ?"),
    ("completed", "outcome", "UPDATE runs SET reason = 'admission-failed' WHERE id = ?"),
    ("completed", "fence-executed", "UPDATE runs SET status = 'failed', reason = 'admission-failed' WHERE id = ?"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "statement"), BREACHES)
async def test_names_the_breach_of_a_row(tmp_path: Path, name: str, code: str, statement: str) -> None:
    path = tmp_path / "runs.db"
    rows = await fill(path)
    break_in(path, statement.replace("?", f"'{rows[name].id}'"))
    codes, whose = await check(path)

    assert code in codes
    if name != "cause":  # found at its consumer
        assert RunId(rows[name].id) in whose


@pytest.mark.parametrize(
    ("code", "statement"),
    [
        ("room", "UPDATE rooms SET name = 'Not A Room'"),
        ("room", "UPDATE rooms SET epoch = 0"),
        ("room", "UPDATE rooms SET owner = '{}'"),
        ("room", "UPDATE rooms SET closed_at = opened_at - 1"),
        ("reference", "UPDATE rooms SET name = 'another'"),
        ("schema", "DROP INDEX runs_running"),
        ("schema", "CREATE TABLE surprise (x)"),
        ("schema", "DROP INDEX runs_by_parent; CREATE INDEX runs_by_parent ON runs (parent_id)"),
    ],
)
async def test_names_the_breach_of_the_file(tmp_path: Path, code: str, statement: str) -> None:
    path = tmp_path / "runs.db"
    await fill(path)
    break_in(path, statement)
    codes, _ = await check(path)

    assert code in codes


async def test_names_a_trigger_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    await fill(path)
    connection = apsw.Connection(str(path))
    connection.execute("DROP TRIGGER runs_witnesses")
    connection.close()
    async with SqliteStore(path) as store:
        report = await store.check()

    assert [finding.sentence for finding in report.findings] == [
        "the trigger runs_witnesses is missing; what it guards is unguarded"
    ]


async def test_tells_damaged_pages_instead_of_failing(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SqliteStore(path) as store, open_commands(store) as commands:
        await store.write_each([commands.admit(provenance='{"x":"' + "y" * 500 + '"}') for _ in range(200)])
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(size // 2, size - 4096, 8192):
            file.seek(offset // 4096 * 4096)
            file.write(b"\xff" * 4096)
    codes, _ = await check(path)

    assert "damaged" in codes


async def test_may_run_while_the_room_is_in_use_and_changes_nothing(
    tmp_path: Path, contents: Callable[[Path], dict[str, bytes]]
) -> None:
    path = tmp_path / "runs.db"
    async with SqliteStore(path) as owner, open_commands(owner) as commands:
        await owner.write(commands.admit())
        before = contents(tmp_path)
        async with SqliteStore(path, read_only=True) as store:
            report = await store.check()
        after = contents(tmp_path)
        await owner.write(commands.admit())
    # The index of the journal notes its readers.
    stable = [name for name in before if not name.endswith("-shm")]

    assert report.findings == ()
    assert (report.runs, report.running, report.orphans) == (1, 1, 0)
    assert [after[name] for name in stable] == [before[name] for name in stable]


async def test_tells_orphans_as_information(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "runs.db") as store:
        async with open_commands(store) as commands:
            orphan = commands.admit()
            await store.write(orphan)
        async with open_commands(store):
            report = await store.check()

    assert [(finding.code, finding.run_id, finding.violation) for finding in report.findings] == [
        ("orphan", orphan.id, False)
    ]
    assert report.ok
    assert report.orphans == 1


async def test_keeps_the_first_findings_and_counts_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "FINDINGS_MAX", 3)
    async with SqliteStore(tmp_path / "runs.db") as store:
        async with open_commands(store) as commands:
            await store.write_each([commands.admit() for _ in range(10)])
        break_in(tmp_path / "runs.db", "UPDATE runs SET provenance = '[]'")
        report = await store.check()

    assert report.violations == 10
    assert [finding.code for finding in report.findings] == ["provenance"] * 3 + ["orphan"] * 3
    assert report.omitted == 14


async def test_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "_PROGRESS_ROWS", 10)
    seen: list[tuple[int, int]] = []
    async with SqliteStore(tmp_path / "runs.db") as store, open_commands(store) as commands:
        await store.write_each([commands.admit() for _ in range(25)])
        await store.check(lambda *counts: seen.append(counts))

    assert seen == [(10, 25), (20, 25), (25, 25)]


class GatedLane:
    """Keeps its work until the test lets it run."""

    def __init__(self) -> None:
        self.kept: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []

    def submit(self, work: Callable[[], Any], deliver: Callable[[Any], object]) -> None:
        self.kept.append((work, deliver))

    def run(self) -> None:
        for work, deliver in self.kept:
            deliver(work())
        self.kept.clear()

    def close(self) -> None:
        assert not self.kept


class GatedExecutor:
    """An executor of a program's own: everything inline but the check."""

    def __init__(self) -> None:
        self.gate = GatedLane()

    def open_lane(self, name: str) -> Lane:
        return self.gate if name == "store check" else InlineExecutor().open_lane(name)


async def test_ends_at_once_when_it_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_check, "_STOP_STEPS", 1)
    executor = GatedExecutor()
    async with SqliteStore(tmp_path / "runs.db", executor=executor) as store, open_commands(store) as commands:
        await store.write_each([commands.admit() for _ in range(25)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.check)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
                executor.gate.run()

    assert nursery.cancel_scope.cancelled_caught
