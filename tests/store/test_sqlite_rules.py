"""The rules as the file itself keeps them: raw SQL of another program meets the same refusals."""

from __future__ import annotations

import sqlite3
from itertools import product
from typing import TYPE_CHECKING, Any
from uuid import UUID

import apsw
import attrs
import pytest

from spindel.ids import WitnessStage, witness_id, witness_text
from spindel.store import AdmitRun, RunStatus, SqliteStore
from spindel.store import _sqlite_runs as statements
from spindel.store._sqlite_reads import RunReader
from spindel.testing.store_contract import Commands, open_commands

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


@attrs.define
class Attacked:
    """A room with a row in each state, and a plain second connection to its file that sets nothing."""

    commands: Commands
    store: SqliteStore
    plain: sqlite3.Connection
    rows: dict[str, AdmitRun]

    def read(self) -> list[Any]:
        """Give every row of both tables."""
        runs = self.plain.execute("SELECT * FROM runs ORDER BY id").fetchall()
        return [*runs, *self.plain.execute("SELECT * FROM run_causes").fetchall()]

    def attack(self, statement: str, values: tuple[Any, ...] = ()) -> str:
        """Run a statement and give by what it was refused; the rows must be as before."""
        before = self.read()
        try:
            self.plain.execute(statement, values)
        except sqlite3.IntegrityError as refused:
            self.plain.rollback()
            code = str(refused)
        else:
            self.plain.rollback()
            raise AssertionError(f"{statement} was not refused")

        assert self.read() == before
        return code


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncGenerator[Attacked, None]:
    path = tmp_path / "runs.db"
    async with SqliteStore(path, executor="inline") as store, open_commands(store) as commands:
        names = ("running", "completed", "waiting", "fence", "cause", "job", "ended-job")
        rows = {name: commands.admit_job() if "job" in name else commands.admit() for name in names}
        results = await store.write_each(
            [
                *rows.values(),
                commands.finish(rows["completed"]),
                commands.finish(rows["waiting"], "waiting", reason="later"),
                commands.fence(rows["fence"]),
                commands.finish(rows["cause"]),
                commands.causes(rows["running"], rows["cause"]),
                commands.witnesses(rows["ended-job"], WitnessStage.CORE_CLEANUP),
                commands.finish(rows["ended-job"], "failed", reason="boom", job_result_state="unavailable"),
            ]
        )
        plain = sqlite3.connect(path)
        yield Attacked(commands, store, plain, rows)
        plain.close()

    assert results == [None] * len(results)


INSERTS = (
    "INSERT INTO runs ({names}) VALUES ({marks})",
    "INSERT OR REPLACE INTO runs ({names}) VALUES ({marks})",
    "INSERT OR IGNORE INTO runs ({names}) VALUES ({marks})",
    "INSERT OR FAIL INTO runs ({names}) VALUES ({marks})",
    "INSERT INTO runs ({names}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET status = 'running', ended_at = NULL",
    "INSERT INTO runs ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING",
)


def row_values(admission: AdmitRun, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "id": str(admission.id),
        "room": admission.room,
        "incarnation": str(admission.incarnation),
        "kind": "forged",
        "actor": "somebody",
        "provenance": "{}",
        "family_version": 1,
        "created_at": 1,
        "started_at": 1,
        "status": "running",
        "updated_at": 1,
    }
    return values | changes


class TestRawInsert:
    @pytest.mark.parametrize("form", INSERTS)
    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("running", "run-exists"),
            ("completed", "terminal-fence"),
            ("waiting", "terminal-fence"),
            ("fence", "terminal-fence"),
        ],
    )
    async def test_over_a_row_is_refused_in_every_form(
        self, attacked: Attacked, form: str, name: str, code: str
    ) -> None:
        """R-06: no form of INSERT revives, replaces or changes a row."""
        values = row_values(attacked.rows[name])
        statement = form.format(names=", ".join(values), marks=", ".join("?" * len(values)))

        assert attacked.attack(statement, tuple(values.values())) == code

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"incarnation": "00000000-0000-4000-8000-000000000000"}, "not-owner"),
            ({"room": "nowhere"}, "not-owner"),
            ({"status": "completed", "ended_at": 5}, "initial-status"),
            ({"status": "waiting"}, "initial-status"),
            ({"status": "failed", "ended_at": 5, "reason": "boom"}, "initial-status"),
            ({"reason": "early"}, "initial-status"),
            ({"family_return_ack": "x"}, "witness-at-admission"),
            ({"job_core_cleanup_ack": "x"}, "witness-at-admission"),
            ({"job_adapter_cleanup_ack": "x"}, "witness-at-admission"),
            ({"job_result_state": "x"}, "witness-at-admission"),
            ({"job_scorecard": "x"}, "witness-at-admission"),
            ({"status": "failed", "ended_at": 5, "reason": "admission-failed", "admission_disposal": "discarded"}, "witness-at-admission"),
        ],
    )  # fmt: skip
    async def test_of_what_no_admission_may_hold_is_refused(
        self, attacked: Attacked, changes: dict[str, Any], code: str
    ) -> None:
        """R-07: a row begins in its room's incarnation, running or as a fence, and without any witness or result."""
        values = row_values(attacked.commands.admit(), **changes)
        statement = INSERTS[0].format(names=", ".join(values), marks=", ".join("?" * len(values)))

        assert attacked.attack(statement, tuple(values.values())) == code

    @pytest.mark.parametrize("parent", ["completed", "waiting", "fence", None])
    async def test_under_a_parent_that_does_not_run_is_refused(self, attacked: Attacked, parent: str | None) -> None:
        parent_id = attacked.rows["running"].room if parent is None else str(attacked.rows[parent].id)
        values = row_values(attacked.commands.admit(), parent_id=parent_id)
        statement = INSERTS[0].format(names=", ".join(values), marks=", ".join("?" * len(values)))

        assert attacked.attack(statement, tuple(values.values())) == "parent-not-live"

    async def test_over_a_row_s_place_is_impossible_since_there_are_no_places(self, attacked: Attacked) -> None:
        """R-06: a row can't be replaced by its rowid, which no trigger would see."""
        with pytest.raises(sqlite3.OperationalError, match="no column named rowid"):
            attacked.plain.execute("INSERT OR REPLACE INTO runs (rowid, id) VALUES (1, 'x')")


IDENTITY = {
    "id": "x",
    "room": "x",
    "incarnation": "x",
    "kind": "x",
    "actor": "x",
    "parent_id": "x",
    "trigger_id": "x",
    "provenance": "[]",
    "family_version": 7,
    "job_version": 7,
    "job_key": "x",
    "job_offer": "x",
    "job_experiment": "x",
    "created_at": 7,
    "started_at": 7,
}


OTHER_OUTCOMES = (
    "status = 'running', ended_at = NULL",
    "status = 'cancelled', ended_at = 5",
    "reason = 'other'",
    "error = 'other'",
    "ended_at = ifnull(ended_at, 0) + 1",
    "job_scorecard = 'other'",
    "job_result_state = 'other'",
)


class TestRawUpdate:
    @pytest.mark.parametrize("name", ["running", "completed"])
    @pytest.mark.parametrize("form", ["UPDATE", "UPDATE OR REPLACE", "UPDATE OR IGNORE"])
    async def test_of_identity_is_refused(self, attacked: Attacked, form: str, name: str) -> None:
        """R-08: nothing that tells which Run a row is can be changed, whatever its state."""
        run_id = str(attacked.rows[name].id)
        codes = {
            column: attacked.attack(f"{form} runs SET {column} = ? WHERE id = ?", (value, run_id))
            for column, value in IDENTITY.items()
        }

        assert codes == dict.fromkeys(IDENTITY, "identity-immutable")

    @pytest.mark.parametrize("name", ["completed", "waiting", "fence", "ended-job"])
    async def test_of_an_outcome_is_refused(self, attacked: Attacked, name: str) -> None:
        """R-06: an outcome that was written is never changed."""
        run_id = str(attacked.rows[name].id)
        codes = {
            change: attacked.attack(f"UPDATE runs SET {change} WHERE id = ?", (run_id,)) for change in OTHER_OUTCOMES
        }

        assert codes == dict.fromkeys(OTHER_OUTCOMES, "terminal-fence")

    @pytest.mark.parametrize(
        "change",
        ["reason = 'early'", "error = 'early'", "job_scorecard = 'x'", "status = 'waiting', job_scorecard = 'x'"],
    )
    async def test_of_an_outcome_before_the_end_is_refused(self, attacked: Attacked, change: str) -> None:
        code = attacked.attack(f"UPDATE runs SET {change} WHERE id = ?", (str(attacked.rows["running"].id),))

        assert code == "outcome-early"

    @pytest.mark.parametrize(
        ("name", "change", "code"),
        [
            ("completed", "family_return_ack = NULL", "witness-fence"),
            ("completed", "family_return_ack = 'other'", "witness-fence"),
            ("waiting", "family_return_ack = NULL", "witness-fence"),
            ("ended-job", "job_core_cleanup_ack = NULL", "witness-fence"),
            ("fence", "family_return_ack = 'x'", "witness-late"),
            ("completed", "job_core_cleanup_ack = 'x'", "witness-late"),
            ("running", "job_adapter_cleanup_ack = 'x'", "adapter-order"),
            ("job", "job_adapter_cleanup_ack = 'x', job_core_cleanup_ack = 'x'", "adapter-order"),
            ("completed", "job_adapter_cleanup_ack = 'x'", "adapter-order"),
            ("waiting", "job_adapter_cleanup_ack = 'x'", "adapter-order"),
            ("running", "admission_disposal = 'discarded'", "disposal-order"),
            ("completed", "admission_disposal = 'discarded'", "disposal-order"),
        ],
    )
    async def test_of_a_witness_that_changes_vanishes_or_comes_out_of_order_is_refused(
        self, attacked: Attacked, name: str, change: str, code: str
    ) -> None:
        """R-07: a witness is written once, in the order of the boundaries, and never taken away."""
        assert attacked.attack(f"UPDATE runs SET {change} WHERE id = ?", (str(attacked.rows[name].id),)) == code

    async def test_of_a_stored_disposal_is_refused(self, attacked: Attacked) -> None:
        """R-07: a disposal is written once."""
        await attacked.store.write(attacked.commands.dispose(attacked.rows["fence"]))
        code = attacked.attack("UPDATE runs SET admission_disposal = NULL WHERE reason = 'admission-failed'")

        assert code == "witness-fence"

    @pytest.mark.parametrize(
        "change",
        [
            "status = 'cancelling'",
            "status = 'failed', ended_at = 5, reason = 'No Such Reason'",
            "status = 'failed', ended_at = 5, error = printf('%.*c', 2001, 'x')",
            "status = 'failed'",
            "ended_at = 5, status = 'running'",
        ],
    )
    async def test_to_values_that_no_row_holds_is_refused(self, attacked: Attacked, change: str) -> None:
        code = attacked.attack(f"UPDATE runs SET {change} WHERE id = ?", (str(attacked.rows["running"].id),))

        assert code.startswith(("CHECK constraint failed", "outcome-early"))


class TestRawDelete:
    @pytest.mark.parametrize(
        "statement",
        [
            "DELETE FROM runs",
            "DELETE FROM runs WHERE status = 'running'",
            "DELETE FROM run_causes",
            "UPDATE run_causes SET cause_id = run_id",
            "UPDATE OR REPLACE run_causes SET run_id = cause_id",
        ],
    )
    async def test_is_refused(self, attacked: Attacked, statement: str) -> None:
        """R-06: rows are kept, causes too."""
        assert attacked.attack(statement) == "rows-are-kept"

    @pytest.mark.parametrize("form", ["INSERT", "INSERT OR REPLACE", "INSERT OR IGNORE"])
    @pytest.mark.parametrize(
        ("consumer", "cause"),
        [
            ("completed", "cause"),
            ("running", "running"),
            ("running", "waiting"),
            ("running", "job"),
            ("fence", "cause"),
        ],
    )
    async def test_of_causality_is_not_possible_by_a_false_cause_either(
        self, attacked: Attacked, form: str, consumer: str, cause: str
    ) -> None:
        values = (str(attacked.rows[consumer].id), str(attacked.rows[cause].id))

        assert attacked.attack(f"{form} INTO run_causes VALUES (?, ?)", values) == "cause"


class TestPlans:
    """What a long history must not slow down looks at an index, and sorts nothing."""

    def plan(self, store: SqliteStore, statement: str, values: Any) -> str:
        connection = apsw.Connection(store.path)
        rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
        connection.close()
        return "\n".join(str(row[3]) for row in rows)

    async def test_adoption_reads_running_rows_only(self, attacked: Attacked) -> None:
        """R-88: orphans are found by the index of running rows; nothing is scanned."""
        for statement, values in (
            (statements._ADOPT, ("main", "x", 1, 500)),
            (statements._ORPHANED, ("main", "x")),
        ):
            plan = self.plan(attacked.store, statement, values)

            assert "runs_running" in plan
            assert "SCAN runs" not in plan

    async def test_no_list_scans_the_table(self, attacked: Attacked) -> None:
        reader = RunReader(apsw.Connection(attacked.store.path))
        names = ("room", "limit", "status", "parent", "under", "before_start", "before_id")
        for running, status, parent, under, before, jobs in product([False, True], repeat=6):
            text = reader._build_page(running, status or running, parent, under, before, jobs)
            plan = self.plan(attacked.store, text, dict.fromkeys(names, "x"))

            assert "SCAN runs" not in plan, text
            assert running or under or "TEMP B-TREE" not in plan, text
        reader.close()


@pytest.mark.slow
async def test_ten_thousand_orphans_after_a_long_history_take_twenty_mutations(tmp_path: Path) -> None:
    """R-88: 10,000 orphans are adopted in 20 mutations, whatever number of ended rows lies beside them."""
    path = tmp_path / "runs.db"
    async with SqliteStore(path) as store, open_commands(store) as commands:
        template = commands.admit()
        await store.write(template)
    fill(path, str(template.id), running=9_999, ended=100_000)
    async with SqliteStore(path) as store, open_commands(store) as commands:
        adopted: list[int] = [await store.write(commands.adopt()) for _ in range(20)]
        left: int = await store.write(commands.adopt())
        orphans = await store.list_runs(commands.query(status=RunStatus.FAILED, limit=1))
        report = await store.check()

    assert adopted == [500] * 20
    assert left == 0
    assert orphans.runs[0].reason == "orphaned"
    assert orphans.runs[0].family_return_ack is None
    assert report.ok
    assert (report.runs, report.running) == (110_000, 0)


def fill(path: Path, template: str, *, running: int, ended: int) -> None:
    """Multiply a row, past the triggers: they are right about each single row and have nothing to say about speed."""
    connection = apsw.Connection(str(path))
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    names = [name for _, name, *_ in connection.execute("PRAGMA table_info(runs)")]
    changed = {
        "id": "printf('10000000-0000-4000-8000-%012x', value)",
        "status": f"iif(value <= {running}, 'running', 'completed')",
        "ended_at": f"iif(value <= {running}, NULL, started_at)",
    }
    connection.execute("BEGIN")
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(
        f"INSERT INTO runs ({', '.join(names)}) SELECT {', '.join(changed.get(name, name) for name in names)} "
        f"FROM runs JOIN (WITH RECURSIVE numbers (value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM numbers "
        f"WHERE value < {running + ended}) SELECT value FROM numbers) WHERE id = ?",
        (template,),
    )
    for _, text in triggers:
        connection.execute(str(text))
    connection.execute("COMMIT")
    connection.close()


def test_the_text_of_a_witness_is_the_text_of_its_uuid() -> None:
    """R-77: both ways to compute a witness give the values of the contract's example."""
    run_id = "00000000-0000-4000-8000-000000000001"
    expected = {
        WitnessStage.FAMILY_RETURN: "5facb6b4-ca34-5e42-a1af-0724f1e194d8",
        WitnessStage.CORE_CLEANUP: "99ddd28c-f6f5-5d0b-8392-c154a2131492",
        WitnessStage.ADAPTER_CLEANUP: "13977513-016c-5db2-b000-9f70fa40f817",
    }

    assert {stage: witness_text(stage, run_id) for stage in WitnessStage} == expected
    for number in range(100):
        other = UUID(int=number)
        assert witness_text(WitnessStage.FAMILY_RETURN, str(other)) == str(
            witness_id(WitnessStage.FAMILY_RETURN, other)
        )
