"""Writing to a database whose connections are cut, whose rows are locked, and whose rooms change hands meanwhile."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
import trio

from spindel.errors import InvalidRecordError, WriteRefusedError, WriteUncertainError
from spindel.ids import RunId
from spindel.store import (
    AdmitRun,
    Confirmation,
    PostgresPart,
    PostgresStore,
    RunStatus,
    StorePart,
    Together,
)
from spindel.store import _postgres_connection as connection_module
from spindel.testing.postgres import PostgresCluster
from spindel.testing.store_contract import Commands, open_commands, refusal
from tests.store.postgres import plain_session, wait_for_row, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

pytestmark = pytest.mark.postgres


@pytest.fixture
async def store(postgres_dsn: str) -> AsyncGenerator[PostgresStore, None]:
    async with PostgresStore(postgres_dsn) as store:
        yield store


@pytest.fixture
async def room(store: PostgresStore) -> AsyncGenerator[Commands, None]:
    async with open_commands(store) as commands:
        yield commands


def pid_of_writer(store: PostgresStore) -> int:
    session = store._database.backend._session
    assert session is not None
    return session.info.backend_pid


WAITS = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = %s"


class TestLostConnection:
    async def test_before_the_commit_nothing_is_stored_and_the_same_write_succeeds_later(
        self, store: PostgresStore, room: Commands, postgres_dsn: str
    ) -> None:
        """R-03: a session that ended before COMMIT refuses its batch, and says that it may be tried again."""
        run = room.admit()
        with plain_session(postgres_dsn) as session:
            session.execute("SELECT pg_terminate_backend(%s, 5000)", (pid_of_writer(store),))
        with pytest.raises(WriteRefusedError) as caught:
            await store.write(run)

        assert (caught.value.code, caught.value.transient) == ("connection-lost", True)
        assert await store.confirm(run) is Confirmation.ABSENT
        await store.write(run)
        assert await store.confirm(run) is Confirmation.PRESENT

    async def test_at_the_commit_effects_are_uncertain_and_the_others_are_judged_again(
        self, store: PostgresStore, room: Commands, postgres_dsn: str
    ) -> None:
        """R-04: what a failed commit may have stored is unknown; what was refused for its sake is judged anew."""
        with plain_session(postgres_dsn) as session:
            # The last thing that a commit does before it is one.
            session.execute(
                "CREATE FUNCTION end_session() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); RETURN NULL; END $$"
            )
            session.execute(
                "CREATE CONSTRAINT TRIGGER end_session AFTER INSERT ON spindel.runs DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW WHEN (NEW.kind = 'fatal') EXECUTE FUNCTION end_session()"
            )
        fatal = room.admit(kind="fatal")
        rival = room.admit(id=fatal.id)
        first, second = await store.write_each([fatal, rival])

        assert isinstance(first, WriteUncertainError)
        assert first.identity == fatal.identity
        assert second is None, "alone, its reason to be refused is gone"
        assert await store.confirm(fatal) is Confirmation.CONFLICT
        assert await store.confirm(rival) is Confirmation.PRESENT

    @pytest.mark.slow
    async def test_after_the_commit_the_write_is_uncertain_and_confirmed_by_its_identity(self) -> None:
        """R-02: the commit is on the disk, its reply is lost; the same identity is read back."""
        with PostgresCluster() as cluster:
            dsn = cluster.create_database()
            async with PostgresStore(dsn) as store, open_commands(store) as room, trio.open_nursery() as nursery:
                run = room.admit()
                failed: list[WriteUncertainError] = []

                async def write() -> None:
                    try:
                        await store.write(run)
                    except WriteUncertainError as problem:
                        failed.append(problem)

                # A commit now waits, durable here, for a standby that doesn't exist.
                cluster.run_sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
                cluster.run_sql("SELECT pg_reload_conf()")
                with plain_session(dsn) as session:
                    await wait_for_row(
                        session, "SELECT 1 WHERE current_setting('synchronous_standby_names') = %s", "nobody"
                    )
                    nursery.start_soon(write)
                    await wait_for_row(session, WAITS, pid_of_writer(store), "SyncRep")
                    cluster.run_sql("ALTER SYSTEM RESET synchronous_standby_names")
                    # Its end is a transaction, too, which would wait as well.
                    session.execute("SELECT pg_terminate_backend(%s)", (pid_of_writer(store),))
                    cluster.run_sql("SELECT pg_reload_conf()")
                await wait_until(lambda: failed)

                assert failed[0].identity == run.identity
                assert await store.confirm(run) is Confirmation.PRESENT
                await store.write(run)

    @pytest.mark.slow
    async def test_a_server_that_was_killed_is_found_again(self, caplog: pytest.LogCaptureFixture) -> None:
        """While there is none, writes are refused as transient; afterwards rooms go on, and their locks are back."""
        with PostgresCluster() as cluster:
            dsn = cluster.create_database()
            async with PostgresStore(dsn) as store, open_commands(store) as room:
                run = room.admit()
                await store.write(run)
                cluster.kill()
                codes = {await refusal(store, room.finish(run)) for _ in range(3)}
                with pytest.raises(WriteUncertainError):
                    await store.confirm(run)
                cluster.start()
                with trio.fail_after(20):
                    while (await store.write_each([room.finish(run)]))[0] is not None:  # noqa: ASYNC110  as for a user
                        await trio.lowlevel.checkpoint()
                record = await store.load_run("main", RunId(run.id))
                with plain_session(dsn) as session:
                    await wait_for_row(session, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted")

                assert codes <= {"connection-lost", "store-unavailable"}
                assert record is not None
                assert record.status is RunStatus.COMPLETED


class TestLockedRoom:
    async def test_a_mutation_waits_for_a_claim_and_is_then_refused(
        self, store: PostgresStore, room: Commands, postgres_dsn: str
    ) -> None:
        """R-12: the epoch is read under the room's lock, so no write of an older owner comes after a claim."""
        found: list[str] = []

        async def write() -> None:
            found.append(await refusal(store, room.admit()))

        with plain_session(postgres_dsn) as session:
            async with trio.open_nursery() as nursery:
                session.execute("BEGIN")
                session.execute("UPDATE spindel.rooms SET epoch = epoch + 1")
                nursery.start_soon(write)
                with plain_session(postgres_dsn) as other:
                    await wait_for_row(
                        other, "SELECT 1 FROM pg_locks WHERE pid = %s AND NOT granted", pid_of_writer(store)
                    )
                session.execute("COMMIT")

        assert found == ["not-owner"]

    async def test_a_lock_that_is_never_freed_refuses_the_batch_as_busy(
        self, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        impatient = connection_module._SETTINGS.replace("lock_timeout = '30s'", "lock_timeout = '20ms'")
        monkeypatch.setattr(connection_module, "_SETTINGS", impatient)
        async with PostgresStore(postgres_dsn) as store, open_commands(store) as room:
            run = room.admit()
            with plain_session(postgres_dsn) as session:
                session.execute("BEGIN")
                session.execute("SELECT FROM spindel.rooms FOR UPDATE")
                with pytest.raises(WriteRefusedError) as caught:
                    await store.write(run)
                with pytest.raises(WriteUncertainError):
                    await store.confirm(run)
                session.execute("ROLLBACK")
            await store.write(run)

        assert (caught.value.code, caught.value.transient) == ("busy", True)

    @pytest.mark.slow
    async def test_a_deadlock_with_a_program_that_locks_as_it_likes_is_no_caller_s_business(
        self, store: PostgresStore, postgres_dsn: str
    ) -> None:
        """The server rolls our transaction back, and it is simply done again."""
        async with open_commands(store, "a") as first, open_commands(store, "b") as second:
            with plain_session(postgres_dsn) as session:
                # Ours looks for a deadlock after a second and finds it; this one never looks.
                session.execute("SET deadlock_timeout = '1h'")
                session.execute("BEGIN")
                session.execute("SELECT FROM spindel.rooms WHERE name = 'b' FOR UPDATE")
                async with trio.open_nursery() as nursery:
                    results: list[Any] = []

                    async def write() -> None:
                        results.extend(await store.write_each([second.admit(), first.admit()]))

                    nursery.start_soon(write)
                    with plain_session(postgres_dsn) as other:
                        await wait_for_row(
                            other, "SELECT 1 FROM pg_locks WHERE pid = %s AND NOT granted", pid_of_writer(store)
                        )
                    await trio.to_thread.run_sync(
                        session.execute, "SELECT FROM spindel.rooms WHERE name = 'a' FOR UPDATE"
                    )
                    session.execute("COMMIT")

        assert results == [None, None]


async def test_two_stores_write_to_many_rooms_without_a_lock_error(postgres_dsn: str) -> None:
    """Batches of many rooms, from two processes' stores at once: every write is acknowledged, every row is right."""

    async def work(store: PostgresStore, name: str) -> None:
        async with open_commands(store, name) as room:
            for _ in range(5):
                runs = [room.admit() for _ in range(5)]
                assert await store.write_each(runs) == [None] * 5
                assert await store.write_each([room.finish(run) for run in runs]) == [None] * 5

    async with PostgresStore(postgres_dsn) as one, PostgresStore(postgres_dsn) as two:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(work, one, f"one/{number}")
                nursery.start_soon(work, two, f"two/{9 - number}")
        report = await one.check()

    assert report.ok
    assert (report.rooms, report.runs, report.running) == (20, 500, 0)


async def test_a_batch_is_one_commit(store: PostgresStore, room: Commands) -> None:
    """R-87: 256 queued admissions are one transaction, refused ones among them."""
    before = store.commits
    runs = [room.admit() for _ in range(255)]
    results = await store.write_each([*runs[:100], room.admit(id=runs[0].id), *runs[100:]])

    assert store.commits - before == 1
    assert results[:100] == [None] * 100
    assert results[101:] == [None] * 155
    assert isinstance(results[100], WriteRefusedError)
    assert results[100].code == "run-exists"


async def test_a_cancelled_read_ends_and_the_next_one_is_answered(store: PostgresStore, postgres_dsn: str) -> None:
    """A long read is stopped in the server, by libpq's cancel; what is asked afterwards isn't met by it."""

    def sleep(reader: Any) -> None:
        reader.session.execute("SELECT pg_sleep(3600)")

    with plain_session(postgres_dsn) as session:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(store._read, sleep))
            sleeping = "SELECT 1 FROM pg_stat_activity WHERE wait_event = %s AND datname = current_database()"
            await wait_for_row(session, sleeping, "PgSleep")
            nursery.cancel_scope.cancel()

    assert nursery.cancel_scope.cancelled_caught
    assert await store.list_rooms() == ()


async def test_a_read_that_meets_a_dead_session_is_asked_again(store: PostgresStore, postgres_dsn: str) -> None:
    with plain_session(postgres_dsn) as session:
        session.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    assert await store.list_rooms() == ()


# -- parts --


class Note(msgspec.Struct, frozen=True):
    part: ClassVar[str] = "notes"

    room: str
    epoch: int
    text: str

    @property
    def identity(self) -> tuple[str, ...]:
        return ("note", self.text)


NOTES = StorePart(
    name="notes",
    migrations={"postgres": ["CREATE TABLE spindel.notes_lines (text text PRIMARY KEY CHECK (text <> 'bad'));"]},
    sqlite={},
    memory={},
    sqlite_confirm={},
    memory_confirm={},
    postgres=PostgresPart(
        functions="""
CREATE FUNCTION pg_temp.note(line jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
BEGIN
  IF line #>> '{}' = 'broken' THEN
    RETURN pg_temp.no_such_function();
  END IF;
  INSERT INTO spindel.notes_lines VALUES (line #>> '{}');
  RETURN pg_temp.changed(to_jsonb(length(line #>> '{}')));
END;
$$;
CREATE FUNCTION pg_temp.confirm_note(line jsonb) RETURNS text LANGUAGE sql AS $$
  SELECT CASE WHEN EXISTS (SELECT 1 FROM spindel.notes_lines WHERE text = line #>> '{}') THEN 'present' ELSE 'absent' END;
$$;
""",
        apply={Note: "note"},
        confirm={Note: "confirm_note"},
        argument={Note: lambda note: note.text if note.text != "unsendable" else object()},
    ),
)


async def test_a_part_has_its_place_in_batches_and_in_together(postgres_dsn: str) -> None:
    """A layer's mutations share the batch, the savepoints and the results; its mistakes stay its own."""
    async with PostgresStore(postgres_dsn, parts=[NOTES]) as store, open_commands(store) as room:
        make: Callable[[str], Note] = partial(Note, room.room, room.epoch)
        run = room.admit()
        before = store.commits
        results = await store.write_each(
            [
                make("one"),
                make("one"),
                make("bad"),
                make("broken"),
                make("unsendable"),
                run,
                make("three"),
                make("nul\0"),
            ]
        )
        commits = store.commits - before
        with pytest.raises(WriteRefusedError):
            await store.write(Together(mutations=(make("four"), make("bad"))))
        together: tuple[Any, ...] = await store.write(Together(mutations=(room.finish(run), make("seven"))))
        confirmed = [await store.confirm(make(text)) for text in ("one", "four", "seven")]

    assert commits == 1
    assert (results[0], results[5], results[6]) == (3, None, 5)
    assert [getattr(results[number], "code", None) for number in (1, 2, 3)] == ["exists", "check", "part-failed"]
    assert isinstance(results[4], TypeError)
    assert isinstance(results[7], InvalidRecordError)
    assert together == (None, 5)
    assert confirmed == [Confirmation.PRESENT, Confirmation.ABSENT, Confirmation.PRESENT]


def test_a_part_without_a_half_for_postgresql_is_refused(postgres_dsn: str) -> None:
    part = StorePart(name="x", migrations={}, sqlite={}, memory={}, sqlite_confirm={}, memory_confirm={})
    with pytest.raises(InvalidRecordError, match="'x'"):
        PostgresStore(postgres_dsn, parts=[part])


def test_functions_of_the_core_know_every_mutation() -> None:
    """What SQLite's half applies and confirms, PostgreSQL's does, too."""
    from spindel.store._runs_part import RUNS_PART  # noqa: PLC0415  private

    assert RUNS_PART.postgres is not None
    assert RUNS_PART.postgres.apply.keys() == RUNS_PART.sqlite.keys()
    assert RUNS_PART.postgres.confirm.keys() == RUNS_PART.sqlite_confirm.keys()
    assert AdmitRun in RUNS_PART.postgres.apply
