"""Opening a database: what it must be, what is said if it isn't, and what is never said."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

import pytest
import trio

from spindel import open_reader, open_room
from spindel.errors import SchemaError, WriteRefusedError
from spindel.ids import RunId
from spindel.store import PostgresStore, RunStatus, open_place
from spindel.store._migrations import collect_migrations
from spindel.store._postgres_connection import open_session, read_address
from spindel.store._runs_part import RUNS_PART
from spindel.testing.clocks import START_MICROS
from spindel.testing.store_contract import open_commands
from tests.store.postgres import plain_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spindel import Run
    from spindel.testing.postgres import PostgresCluster

pytestmark = pytest.mark.postgres


@pytest.fixture
def empty_dsn(postgres_cluster: PostgresCluster) -> Iterator[str]:
    """The address of a database that nobody has touched."""
    dsn = postgres_cluster.create_database()
    yield dsn
    postgres_cluster.drop_database(dsn)


async def give(_run: Run[int], value: int) -> int:
    return value


async def test_a_room_opens_a_database_by_its_address_and_a_reader_reads_it(empty_dsn: str) -> None:
    """The same program, pointed at an address instead of a path."""
    async with open_room(empty_dsn, name="main") as room:
        run = await room.start(give, 7)
        value = await run.result()
        async with open_reader(empty_dsn, name="main") as reader:
            page = await reader.list_runs()

    assert value == 7
    assert [row.id for row in page.runs] == [run.id]


async def test_an_empty_database_is_made_ours_by_a_writer_only(empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match="no room was ever opened"):
        async with PostgresStore(empty_dsn, read_only=True):
            pass
    with plain_session(empty_dsn) as session:
        untouched = session.execute("SELECT to_regnamespace('spindel')").fetchall()
    async with PostgresStore(empty_dsn) as store:
        assert await store.list_rooms() == ()
    async with PostgresStore(empty_dsn, read_only=True) as store:
        assert await store.list_rooms() == ()
        with pytest.raises(WriteRefusedError, match="read-only"):
            async with open_commands(store):
                pass

    assert untouched == [(None,)]


async def test_processes_that_open_a_new_database_at_once_make_its_tables_once(empty_dsn: str) -> None:
    async def open_it() -> None:
        async with PostgresStore(empty_dsn):
            pass

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(open_it)
    with plain_session(empty_dsn) as session:
        (count,) = session.execute("SELECT count(*) FROM spindel.migrations").fetchone() or (None,)

    assert count == 2


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DROP TABLE spindel.migrations", "another program's"),
        ("INSERT INTO spindel.migrations VALUES ('runs', 3, 'x', 1)", "newer version"),
        ("UPDATE spindel.migrations SET checksum = 'x' WHERE number = 2", "not the one of this version"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
async def test_what_isn_t_ours_or_is_newer_is_left_alone(
    empty_dsn: str, statement: str, problem: str, read_only: bool
) -> None:
    """R-10: a newer or foreign database is refused, unchanged."""
    async with PostgresStore(empty_dsn):
        pass
    with plain_session(empty_dsn) as session:
        session.execute(statement.encode())
    with pytest.raises(SchemaError, match=problem):
        async with PostgresStore(empty_dsn, read_only=read_only):
            pass


async def test_a_database_from_before_families_is_read_and_brought_forward(empty_dsn: str) -> None:
    """R-10: its rows are readable, have no family version, and so are never settled."""
    with plain_session(empty_dsn) as session:
        session.execute(RUNS_PART.migrations["postgres"][0].encode())
        known = collect_migrations((RUNS_PART,), "postgres")
        session.execute("INSERT INTO spindel.migrations VALUES ('runs', 1, %s, 1)", (known[0].checksum,))
        session.execute("INSERT INTO spindel.rooms VALUES ('main', gen_random_uuid(), 1, NULL, 1, 2)")
        session.execute(
            "INSERT INTO spindel.runs (id, room, incarnation, kind, actor, provenance, created_at, started_at, status, "
            "updated_at) SELECT gen_random_uuid(), name, incarnation, 'run', 'x', '{}', 1, 1, 'running', 1 "
            "FROM spindel.rooms"
        )
        ((run_id,),) = session.execute("SELECT id FROM spindel.runs").fetchall()
    async with PostgresStore(empty_dsn, read_only=True) as store:
        before = await store.load_run("main", RunId(run_id))
        report = await store.check()
    async with PostgresStore(empty_dsn) as store, open_commands(store, at=START_MICROS) as room:
        await store.write(room.adopt())
        after = await store.load_run("main", RunId(run_id))

    assert report.violations == 0
    assert before is not None
    assert (before.status, before.family_version) == (RunStatus.RUNNING, None)
    assert after is not None
    assert (after.status, after.reason, after.family_return_ack) == (RunStatus.FAILED, "orphaned", None)


async def test_a_store_can_be_opened_again_and_not_twice(postgres_dsn: str) -> None:
    store = PostgresStore(postgres_dsn)
    async with store:
        with pytest.raises(RuntimeError, match="open already"):
            async with store:
                pass
        assert await store.list_rooms() == ()
    with pytest.raises(RuntimeError, match="not open"):
        await store.list_rooms()
    async with store, open_commands(store) as room:
        await store.write(room.admit())


async def test_a_database_of_another_encoding_is_refused(postgres_cluster: PostgresCluster) -> None:
    postgres_cluster.run_sql("CREATE DATABASE narrow ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(SchemaError, match="LATIN1"):
        async with PostgresStore(postgres_cluster.dsn("narrow")):
            pass
    postgres_cluster.run_sql("DROP DATABASE narrow")


async def test_a_user_who_may_not_create_is_told(postgres_cluster: PostgresCluster, empty_dsn: str) -> None:
    postgres_cluster.run_sql("CREATE ROLE guest LOGIN")
    with pytest.raises(SchemaError, match="this user may not"):
        async with PostgresStore(empty_dsn.replace("user=postgres", "user=guest")):
            pass
    postgres_cluster.run_sql("DROP ROLE guest")


class TestSettings:
    """What the promises need holds, whatever the role has as default."""

    async def test_a_commit_waits_for_the_disk(self, postgres_cluster: PostgresCluster, postgres_dsn: str) -> None:
        settings = {
            "synchronous_commit": "off",
            "default_transaction_isolation": "serializable",
            "default_transaction_read_only": "on",
            "search_path": "nowhere",
        }
        postgres_cluster.run_sql("CREATE ROLE careless LOGIN SUPERUSER")
        for name, value in settings.items():
            postgres_cluster.run_sql(f"ALTER ROLE careless SET {name} = '{value}'")
        dsn = postgres_dsn.replace("user=postgres", "user=careless")
        with open_session(read_address(dsn)) as session:
            found = {name: session.execute(f"SHOW {name}".encode()).fetchone() for name in settings}
        # The tables are made by another role: who owns something can't be dropped.
        async with PostgresStore(postgres_dsn):
            pass
        async with PostgresStore(dsn) as store, open_commands(store) as room:
            await store.write(room.admit())
        postgres_cluster.run_sql("DROP ROLE careless")

        assert found == {
            "synchronous_commit": ("on",),
            "default_transaction_isolation": ("read committed",),
            "default_transaction_read_only": ("off",),
            "search_path": ("pg_catalog, pg_temp",),
        }

    async def test_a_stricter_commit_is_left_as_it_is(self, postgres_dsn: str) -> None:
        with open_session(read_address(postgres_dsn + "&options=-csynchronous_commit%3Dremote_apply")) as session:
            assert session.execute("SHOW synchronous_commit").fetchone() == ("remote_apply",)


SECRET = "hunter2-and-more"
ADDRESSES = (
    f"postgresql://somebody:{SECRET}@127.0.0.1:1/db",
    f"postgresql://somebody:{SECRET}@[::1/db",
    f"postgresql://somebody:{SECRET} @127.0.0.1:1/db",
    f"postgresql://somebody@127.0.0.1:1/db?password={SECRET}",
    f"postgresql://somebody@127.0.0.1:1/db?{SECRET}",
    f"postgresql://somebody:{SECRET}@127.0.0.1:port/db",
    f"host=127.0.0.1 port=1 password={SECRET}",
    f"host=127.0.0.1 port=1 password={SECRET} nonsense",
)


@pytest.mark.parametrize("address", ADDRESSES)
async def test_a_password_is_in_no_message_no_cause_and_no_log(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """What an address holds besides its name is nobody's business, also where it can't be read at all."""
    caplog.set_level(logging.DEBUG)
    said = ""
    try:
        store = PostgresStore(address)
        said += repr(store) + store.place + repr(store._database._address)
        async with store:
            pass
    except SchemaError as problem:
        said += "".join(traceback.format_exception(problem)).replace(address, "")
        said += repr(problem) + str(vars(problem))
    else:
        raise AssertionError("nobody listens there")

    assert SECRET not in said
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("postgresql://me:pw@db.example.org:5433/rooms", "postgresql://me@db.example.org:5433/rooms"),
        ("postgres://db.example.org/rooms?sslmode=require", "postgresql://db.example.org/rooms"),
        ("postgresql:///rooms?host=/run/pg&user=me", "postgresql://me@/rooms?host=/run/pg"),
        ("dbname=rooms password=pw", "postgresql:///rooms"),
    ],
)
def test_a_database_is_called_by_what_is_no_secret(address: str, place: str) -> None:
    assert PostgresStore(address).place == place


def test_a_place_is_an_address_or_a_path(tmp_path: object) -> None:
    assert isinstance(open_place("postgresql:///x"), PostgresStore)
    assert isinstance(open_place("postgres:///x"), PostgresStore)
    assert open_place(f"{tmp_path}/postgresql").place == f"{tmp_path}/postgresql"


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spindel.store._postgres_database", None)
    with pytest.raises(SchemaError, match=r"spindel\[postgres\]"):
        PostgresStore("postgresql:///x")
