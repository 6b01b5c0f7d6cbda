"""Checking a database cold. What must hold of a row, whatever keeps it, is tested with files."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from spindel.ids import RunId, WitnessStage
from spindel.store import PostgresStore
from spindel.store import _postgres_check as check_module
from spindel.testing.store_contract import open_commands
from tests.store.postgres import plain_session, wait_for_row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from spindel.testing.postgres import PostgresCluster

pytestmark = pytest.mark.postgres

OTHER = "00000000-0000-4000-8000-000000000000"


async def fill(dsn: str) -> dict[str, UUID]:
    """Give a closed room with a row of each kind."""
    async with PostgresStore(dsn, executor="inline") as store, open_commands(store) as room:
        names = ("completed", "waiting", "fence", "cause", "job", "parent")
        rows = {name: room.admit_job() if name == "job" else room.admit() for name in names}
        rows["child"] = room.admit(parent_id=rows["parent"].id)
        results = await store.write_each(
            [
                *rows.values(),
                room.finish(rows["cause"]),
                room.causes(rows["completed"], rows["cause"]),
                room.finish(rows["completed"]),
                room.finish(rows["waiting"], "waiting"),
                room.fence(rows["fence"]),
                room.witnesses(rows["job"], WitnessStage.FAMILY_RETURN, WitnessStage.CORE_CLEANUP),
                room.finish(rows["job"], family_returned=False),
                room.witnesses(rows["job"], WitnessStage.ADAPTER_CLEANUP),
                room.finish(rows["child"]),
                room.finish(rows["parent"]),
            ]
        )

    assert results == [None] * len(results)
    return {name: row.id for name, row in rows.items()}


async def check(dsn: str) -> set[tuple[str, RunId | None]]:
    async with PostgresStore(dsn, read_only=True) as store:
        report = await store.check()

    assert report.ok == (not report.violations)
    return {(finding.code, finding.run_id) for finding in report.findings if finding.violation}


async def test_of_a_sound_database_counts_and_finds_nothing(postgres_dsn: str) -> None:
    await fill(postgres_dsn)
    progress: list[tuple[int, int]] = []
    async with PostgresStore(postgres_dsn, read_only=True) as store:
        report = await store.check(lambda done, total: progress.append((done, total)))

    assert report.findings == ()
    assert (report.rooms, report.runs, report.running, report.orphans, report.causes) == (1, 7, 0, 0, 1)
    assert report.path == store.place
    assert progress == [(7, 7)]


@pytest.fixture
def broken_dsn(postgres_cluster: PostgresCluster) -> Iterator[str]:
    """The address of a database that a test may do anything to."""
    dsn = postgres_cluster.create_database()
    yield dsn
    postgres_cluster.drop_database(dsn)


BREACHES = [
    ("completed", "times", "UPDATE spindel.runs SET ended_at = started_at - 1 WHERE id = %s"),
    ("completed", "provenance", "UPDATE spindel.runs SET provenance = '[]' WHERE id = %s"),
    ("completed", "witness-value", "UPDATE spindel.runs SET family_return_ack = incarnation WHERE id = %s"),
    ("job", "witness-order", "UPDATE spindel.runs SET job_core_cleanup_ack = NULL WHERE id = %s"),
    ("fence", "fence-executed", "UPDATE spindel.runs SET job_result_state = 'accepted' WHERE id = %s"),
    ("child", "parent", f"UPDATE spindel.runs SET parent_id = '{OTHER}' WHERE id = %s"),
    ("completed", "cause", "UPDATE spindel.run_causes SET cause_id = run_id WHERE run_id = %s"),
    (None, "reference", f"INSERT INTO spindel.run_causes VALUES ('{OTHER}', '{OTHER}')"),
    (None, "room", "UPDATE spindel.rooms SET epoch = 0"),
]


@pytest.mark.parametrize(("name", "code", "statement"), BREACHES)
async def test_names_what_went_past_the_triggers(broken_dsn: str, name: str | None, code: str, statement: str) -> None:
    rows = await fill(broken_dsn)
    with plain_session(broken_dsn) as session:
        # As a replica's rows are written: no trigger, no reference is looked at.
        session.execute("SET session_replication_role = replica")
        session.execute(statement.encode(), () if name is None else (rows[name],))
    found = await check(broken_dsn)

    assert (code, None if name is None else RunId(rows[name])) in found


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DROP TRIGGER runs_insert ON spindel.runs", "trigger runs.runs_insert is missing"),
        ("ALTER TABLE spindel.runs DISABLE TRIGGER runs_delete", "trigger runs.runs_delete is not as"),
        (
            "CREATE OR REPLACE FUNCTION spindel.refuse(code text) RETURNS void LANGUAGE sql AS ''",
            "function refuse(code text) is not as",
        ),
        ("ALTER TABLE spindel.runs DROP CONSTRAINT runs_check", "constraint runs.runs_check is missing"),
        ("DROP INDEX spindel.runs_running", "index runs_running is missing"),
        ("ALTER TABLE spindel.runs ALTER kind DROP NOT NULL", "column runs.kind is not as"),
        ("ALTER TABLE spindel.rooms ADD COLUMN more text", "column rooms.more is none of ours"),
    ],
)
async def test_names_what_was_changed_about_the_tables(broken_dsn: str, statement: str, named: str) -> None:
    await fill(broken_dsn)
    with plain_session(broken_dsn) as session:
        session.execute(statement.encode())
    async with PostgresStore(broken_dsn, read_only=True) as store:
        report = await store.check()

    assert [named in finding.sentence for finding in report.findings].count(True) == 1
    assert {finding.code for finding in report.findings} == {"schema"}


async def test_leaves_nothing_behind_and_runs_beside_an_open_room(postgres_dsn: str) -> None:
    async with PostgresStore(postgres_dsn) as store, open_commands(store) as room:
        run = room.admit()
        await store.write(run)
        report = await store.check()
        await store.write(room.finish(run))
    with plain_session(postgres_dsn) as session:
        schemas = session.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'spindel%'").fetchall()

    assert (report.ok, report.running, report.orphans) == (True, 1, 0)
    assert schemas == [("spindel",)]


async def test_a_user_who_may_only_read_checks_the_rows(postgres_cluster: PostgresCluster, broken_dsn: str) -> None:
    await fill(broken_dsn)
    with plain_session(broken_dsn) as session:
        session.execute("CREATE ROLE auditor LOGIN")
        session.execute("GRANT USAGE ON SCHEMA spindel TO auditor")
        session.execute("GRANT SELECT ON ALL TABLES IN SCHEMA spindel TO auditor")
    async with PostgresStore(broken_dsn.replace("user=postgres", "user=auditor"), read_only=True) as store:
        report = await store.check()
    with plain_session(broken_dsn) as session:
        session.execute("DROP OWNED BY auditor")
        session.execute("DROP ROLE auditor")

    assert report.ok
    assert report.runs == 7
    assert [finding.code for finding in report.findings] == ["schema-unchecked"]


@pytest.mark.parametrize("between", [False, True])
async def test_ends_at_once_when_it_is_cancelled(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, between: bool
) -> None:
    """In the middle of a statement of the server, and between two."""
    await fill(postgres_dsn)
    reached = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def count_runs(database: Any) -> int:
        token.run_sync_soon(reached.set)
        if not between:
            database.session.execute("SELECT pg_sleep(3600)")
        while not cancelled:
            pass
        return 7

    cancelled: list[bool] = []
    monkeypatch.setattr(check_module.CheckedDatabase, "count_runs", count_runs)
    async with PostgresStore(postgres_dsn) as store:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(store.check))
            await reached.wait()
            if not between:
                with plain_session(postgres_dsn) as session:
                    await wait_for_row(
                        session,
                        "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()",
                    )
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
                cancelled.append(True)

        assert nursery.cancel_scope.cancelled_caught
