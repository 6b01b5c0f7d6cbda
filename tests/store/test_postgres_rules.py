"""The rules as the database itself keeps them: raw SQL of another program meets the same refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import psycopg
import pytest

from spindel.ids import WitnessStage
from spindel.store import AdmitRun, PostgresStore
from spindel.testing.store_contract import Commands, open_commands

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

pytestmark = pytest.mark.postgres

OTHER = "00000000-0000-4000-8000-000000000000"


@attrs.define
class Attacked:
    """A room with a row in each state, and a plain connection to its database, which is its superuser's."""

    commands: Commands
    store: PostgresStore
    plain: psycopg.Connection[tuple[Any, ...]]
    rows: dict[str, AdmitRun]

    def read(self) -> list[Any]:
        """Give every row of both tables."""
        runs = self.plain.execute("SELECT * FROM spindel.runs ORDER BY id").fetchall()
        return [*runs, *self.plain.execute("SELECT * FROM spindel.run_causes").fetchall()]

    def attack(self, statement: str, *values: object) -> str:
        """Run a statement and give the code that it was refused with, or the state of a constraint."""
        before = self.read()
        try:
            self.plain.execute(statement.encode(), values)
        except psycopg.Error as refused:
            code = refused.diag.constraint_name if refused.sqlstate == "SPNDL" else refused.sqlstate
        else:
            raise AssertionError(f"{statement} was not refused")

        assert self.read() == before
        assert code is not None
        return code


@pytest.fixture
async def attacked(postgres_dsn: str) -> AsyncGenerator[Attacked, None]:
    async with PostgresStore(postgres_dsn, executor="inline") as store, open_commands(store) as commands:
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
        with psycopg.connect(postgres_dsn, autocommit=True) as plain:
            yield Attacked(commands, store, plain, rows)

    assert results == [None] * len(results)


INSERTS = (
    "INSERT INTO spindel.runs ({names}) VALUES ({marks})",
    "INSERT INTO spindel.runs ({names}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET status = 'running'",
    "INSERT INTO spindel.runs ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING",
    "MERGE INTO spindel.runs AS r USING (SELECT) AS n ON false WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({marks})",
)


def insert(admission: AdmitRun, form: str = INSERTS[0], **changes: Any) -> tuple[str, list[object]]:
    values: dict[str, object] = {
        "id": admission.id,
        "room": admission.room,
        "incarnation": admission.incarnation,
        "kind": "forged",
        "actor": "somebody",
        "provenance": "{}",
        "family_version": 1,
        "created_at": 1,
        "started_at": 1,
        "status": "running",
        "updated_at": 1,
    } | changes
    return form.format(names=", ".join(values), marks=", ".join(["%s"] * len(values))), list(values.values())


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
        statement, values = insert(attacked.rows[name], form)

        assert attacked.attack(statement, *values) == code

    async def test_by_copy_is_refused_too(self, attacked: Attacked) -> None:
        """R-06: loading rows in bulk meets the same trigger."""
        run = attacked.rows["completed"]
        with pytest.raises(psycopg.Error) as caught, attacked.plain.cursor() as cursor:  # noqa: SIM117  the copy raises at its end
            with cursor.copy(
                "COPY spindel.runs (id, room, incarnation, kind, actor, provenance, created_at, started_at, status, "
                "updated_at) FROM STDIN"
            ) as copy:
                copy.write_row((run.id, run.room, run.incarnation, "x", "x", "{}", 1, 1, "running", 1))

        assert caught.value.diag.constraint_name == "terminal-fence"

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"incarnation": OTHER}, "not-owner"),
            ({"room": "nowhere"}, "not-owner"),
            ({"status": "completed", "ended_at": 5}, "initial-status"),
            ({"status": "waiting"}, "initial-status"),
            ({"status": "failed", "ended_at": 5, "reason": "boom"}, "initial-status"),
            ({"reason": "early"}, "initial-status"),
            ({"family_return_ack": OTHER}, "witness-at-admission"),
            ({"job_core_cleanup_ack": OTHER}, "witness-at-admission"),
            ({"job_adapter_cleanup_ack": OTHER}, "witness-at-admission"),
            ({"job_result_state": "x"}, "witness-at-admission"),
            ({"job_scorecard": OTHER}, "witness-at-admission"),
            ({"status": "failed", "ended_at": 5, "reason": "admission-failed", "admission_disposal": "discarded"}, "witness-at-admission"),
            ({"provenance": "no json"}, "22P02"),
        ],
    )  # fmt: skip
    async def test_of_what_no_admission_may_hold_is_refused(
        self, attacked: Attacked, changes: dict[str, Any], code: str
    ) -> None:
        """R-07: a row begins in its room's incarnation, running or as a fence, and without any witness or result."""
        statement, values = insert(attacked.commands.admit(), **changes)

        assert attacked.attack(statement, *values) == code

    @pytest.mark.parametrize("parent", ["completed", "waiting", "fence", None])
    async def test_under_a_parent_that_does_not_run_is_refused(self, attacked: Attacked, parent: str | None) -> None:
        parent_id = OTHER if parent is None else attacked.rows[parent].id
        statement, values = insert(attacked.commands.admit(), parent_id=parent_id)

        assert attacked.attack(statement, *values) == "parent-not-live"


IDENTITY: dict[str, object] = {
    "id": OTHER,
    "room": "x",
    "incarnation": OTHER,
    "kind": "x",
    "actor": "x",
    "parent_id": OTHER,
    "trigger_id": OTHER,
    "provenance": "[]",
    "family_version": 7,
    "job_version": 7,
    "job_key": "x",
    "job_offer": OTHER,
    "job_experiment": OTHER,
    "created_at": 7,
    "started_at": 7,
}

OTHER_OUTCOMES = (
    "status = 'running', ended_at = NULL",
    "status = 'cancelled', ended_at = 5",
    "reason = 'other'",
    "error = 'other'",
    "ended_at = coalesce(ended_at, 0) + 1",
    f"job_scorecard = '{OTHER}'",
    "job_result_state = 'other'",
)


class TestRawUpdate:
    @pytest.mark.parametrize("name", ["running", "completed"])
    async def test_of_identity_is_refused(self, attacked: Attacked, name: str) -> None:
        """R-08: nothing that tells which Run a row is can be changed, whatever its state."""
        codes = {
            column: attacked.attack(
                f"UPDATE spindel.runs SET {column} = %s WHERE id = %s", value, attacked.rows[name].id
            )
            for column, value in IDENTITY.items()
        }

        assert codes == dict.fromkeys(IDENTITY, "identity-immutable")

    @pytest.mark.parametrize("name", ["completed", "waiting", "fence", "ended-job"])
    async def test_of_an_outcome_is_refused(self, attacked: Attacked, name: str) -> None:
        """R-06: an outcome that was written is never changed."""
        codes = {
            change: attacked.attack(f"UPDATE spindel.runs SET {change} WHERE id = %s", attacked.rows[name].id)
            for change in OTHER_OUTCOMES
        }

        assert codes == dict.fromkeys(OTHER_OUTCOMES, "terminal-fence")

    @pytest.mark.parametrize(
        ("name", "change", "code"),
        [
            ("running", "reason = 'early'", "outcome-early"),
            ("running", "error = 'early'", "outcome-early"),
            ("running", f"job_scorecard = '{OTHER}'", "outcome-early"),
            ("running", f"status = 'waiting', job_scorecard = '{OTHER}'", "outcome-early"),
            ("running", "ended_at = 5", "outcome-early"),
            ("running", "status = 'cancelling'", "23514"),
            ("running", "status = 'failed'", "23514"),
            ("running", "status = 'failed', ended_at = 5, reason = 'No Such Reason'", "23514"),
            ("running", "status = 'failed', ended_at = 5, error = repeat('x', 2001)", "23514"),
            ("completed", "family_return_ack = NULL", "witness-fence"),
            ("completed", f"family_return_ack = '{OTHER}'", "witness-fence"),
            ("waiting", "family_return_ack = NULL", "witness-fence"),
            ("ended-job", "job_core_cleanup_ack = NULL", "witness-fence"),
            ("fence", f"family_return_ack = '{OTHER}'", "witness-late"),
            ("completed", f"job_core_cleanup_ack = '{OTHER}'", "witness-late"),
            ("running", f"job_adapter_cleanup_ack = '{OTHER}'", "adapter-order"),
            ("job", f"job_adapter_cleanup_ack = '{OTHER}', job_core_cleanup_ack = '{OTHER}'", "adapter-order"),
            ("completed", f"job_adapter_cleanup_ack = '{OTHER}'", "adapter-order"),
            ("waiting", f"job_adapter_cleanup_ack = '{OTHER}'", "adapter-order"),
            ("running", "admission_disposal = 'discarded'", "disposal-order"),
            ("completed", "admission_disposal = 'discarded'", "disposal-order"),
        ],
    )
    async def test_that_breaks_a_rule_is_refused(self, attacked: Attacked, name: str, change: str, code: str) -> None:
        """R-07: a witness is written once, in the order of the boundaries, and no outcome comes early."""
        assert attacked.attack(f"UPDATE spindel.runs SET {change} WHERE id = %s", attacked.rows[name].id) == code

    async def test_of_a_stored_disposal_is_refused(self, attacked: Attacked) -> None:
        """R-07: a disposal is written once."""
        await attacked.store.write(attacked.commands.dispose(attacked.rows["fence"]))
        code = attacked.attack("UPDATE spindel.runs SET admission_disposal = NULL WHERE reason = 'admission-failed'")

        assert code == "witness-fence"


class TestRawDelete:
    @pytest.mark.parametrize(
        "statement",
        [
            "DELETE FROM spindel.runs",
            "DELETE FROM spindel.runs WHERE status = 'running'",
            "DELETE FROM spindel.run_causes",
            "TRUNCATE spindel.run_causes",
            "TRUNCATE spindel.rooms CASCADE",
            "UPDATE spindel.run_causes SET cause_id = run_id",
        ],
    )
    async def test_is_refused(self, attacked: Attacked, statement: str) -> None:
        """R-06: rows are kept, causes too."""
        assert attacked.attack(statement) == "rows-are-kept"

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
        self, attacked: Attacked, consumer: str, cause: str
    ) -> None:
        statement = "INSERT INTO spindel.run_causes VALUES (%s, %s)"

        assert attacked.attack(statement, attacked.rows[consumer].id, attacked.rows[cause].id) == "cause"


class TestLocks:
    """What a trigger has looked at doesn't change before the transaction that it let through is over."""

    @pytest.mark.parametrize(
        ("statement", "change"),
        [
            ("SELECT spindel_insert()", "UPDATE spindel.rooms SET epoch = epoch + 1"),
            ("SELECT spindel_insert()", "UPDATE spindel.runs SET status = 'failed', ended_at = 5 WHERE id = %(run)s"),
            (
                "INSERT INTO spindel.run_causes VALUES (%(job)s, %(cause)s)",
                "UPDATE spindel.runs SET status = 'failed', ended_at = 5 WHERE id = %(job)s",
            ),
        ],
    )
    async def test_room_parent_and_consumer_wait(
        self, attacked: Attacked, postgres_dsn: str, statement: str, change: str
    ) -> None:
        child = attacked.commands.admit(parent_id=attacked.rows["running"].id)
        raw, values = insert(child, parent_id=child.parent_id)
        named = {name.replace("running", "run"): run.id for name, run in attacked.rows.items() if "-" not in name}
        with psycopg.connect(postgres_dsn) as first, psycopg.connect(postgres_dsn) as second:
            if "spindel_insert" in statement:
                first.execute(raw.encode(), values)
            else:
                first.execute(statement.encode(), named)
            second.execute("SET lock_timeout = '1ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                second.execute(change.encode(), named)
            second.rollback()
            first.rollback()


async def test_no_look_up_reads_more_than_its_own_row(attacked: Attacked) -> None:
    """A table without statistics, as it is when a program begins, costs no admission more than a long history does."""
    attacked.plain.execute("SELECT pg_stat_reset()")
    children = [attacked.commands.admit(parent_id=attacked.rows["running"].id) for _ in range(50)]
    await attacked.store.write_each(children)
    await attacked.store.write_each([attacked.commands.finish(child) for child in children])
    for child in children:
        await attacked.store.write(attacked.commands.causes(attacked.rows["running"], child))
    await attacked.store.write(attacked.commands.witnesses(attacked.rows["job"], WitnessStage.CORE_CLEANUP))
    await attacked.store.write(attacked.commands.finish(attacked.rows["running"]))
    session = attacked.store._database.backend._session
    assert session is not None
    session.execute("SELECT pg_stat_force_next_flush()")
    statistics = "SELECT indexrelname, idx_scan, idx_tup_read FROM pg_stat_user_indexes"
    scans = {name: (times, read) for name, times, read in attacked.plain.execute(statistics)}

    assert scans["runs_running"] == (0, 0), "it has every running row of the room"
    assert scans["run_causes_pkey"][1] < 10, "a Run may have any number of causes"
    assert scans["runs_pkey"][0] > 150
