"""Who owns a room of a database: by its lock, by its epoch, and when either is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from spindel import open_room
from spindel.codec import encode_json
from spindel.errors import RoomInUseError, RoomOwnershipLostError, WriteRefusedError
from spindel.process import current_process, host_name
from spindel.runs import RoomState
from spindel.store import PostgresStore, RoomClaim, RunStatus
from spindel.store._postgres_ownership import lock_key
from spindel.testing.clocks import START_MICROS
from spindel.testing.store_contract import open_commands, refusal
from spindel.testing.store_contract._commands import fresh_uuid
from tests.store.conftest import REPOSITORY
from tests.store.postgres import plain_session, wait_for_row, wait_until

if TYPE_CHECKING:
    from spindel import Run

pytestmark = pytest.mark.postgres

OWN = """
import sys, trio
from spindel.store import PostgresStore
from spindel.testing.store_contract import open_commands

async def main(dsn):
    async with PostgresStore(dsn) as store, open_commands(store) as commands:
        await store.write_each([commands.admit() for _ in range(3)])
        print(commands.epoch, flush=True)
        await trio.sleep_forever()

trio.run(main, sys.argv[1])
"""


def own_elsewhere(dsn: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OWN, dsn], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def live_elsewhere() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)


def pid_of_locks(store: PostgresStore) -> int:
    session = store._database.locks._session
    assert session is not None
    return session.info.backend_pid


HELD = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> %s"


class TestLock:
    @pytest.mark.parametrize("same_store", [False, True])
    async def test_a_second_opener_in_this_process_is_refused(self, postgres_dsn: str, same_store: bool) -> None:
        """R-11: an open room can't be opened again, by this store or another one; the error names who has it."""
        async with PostgresStore(postgres_dsn) as store, PostgresStore(postgres_dsn) as other:
            async with open_commands(store) as room:
                with pytest.raises(RoomInUseError, match="main") as caught:
                    async with open_commands(store if same_store else other):
                        pass
                await store.write(room.admit())
            async with open_commands(other) as room:
                assert room.epoch == 2

        assert caught.value.owner["host"] == host_name()

    @pytest.mark.slow
    async def test_a_second_process_is_refused_until_the_first_is_killed(self, postgres_dsn: str) -> None:
        """R-11: kill -9 frees a room at once; its next owner has one more epoch, and adopts what was left."""
        with own_elsewhere(postgres_dsn) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "1\n"
                async with PostgresStore(postgres_dsn) as store:
                    with pytest.raises(RoomInUseError) as caught:
                        async with open_commands(store):
                            pass
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    with plain_session(postgres_dsn) as session:
                        # The server hears of it a moment later.
                        await wait_for_row(
                            session, "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory')"
                        )
                    async with open_commands(store) as room:
                        adopted: int = await store.write(room.adopt())
                        running = await store.list_runs(room.query(status=RunStatus.RUNNING))
            finally:
                process.kill()

        assert caught.value.owner["pid"] == process.pid
        assert (room.epoch, adopted, running.runs) == (2, 3, ())

    async def test_the_room_of_a_living_process_of_this_machine_is_not_taken_by_its_free_lock(
        self, postgres_dsn: str
    ) -> None:
        """A session may end while its process lives; where that can be seen, the room isn't taken from it."""
        with live_elsewhere() as process:
            here = current_process()
            stat = await trio.Path(f"/proc/{process.pid}/stat").read_text()
            owner = {"pid": process.pid, "started": int(stat.rpartition(")")[2].split()[19]), "boot": here.boot}
            async with PostgresStore(postgres_dsn) as store:
                async with open_commands(store):
                    pass
                for host, expected in ((host_name(), True), ("another", False)):
                    with plain_session(postgres_dsn) as session:
                        session.execute("UPDATE spindel.rooms SET owner = %s", (encode_json(owner | {"host": host}),))
                    refused = False
                    try:
                        async with open_commands(store):
                            pass
                    except RoomInUseError as problem:
                        refused = problem.owner["pid"] == process.pid
                    assert refused is expected, host
            process.communicate()

    async def test_a_server_that_can_t_be_asked_refuses_a_claim_as_transient(self, postgres_dsn: str) -> None:
        async with PostgresStore(postgres_dsn) as store:
            session = store._database.locks._session
            assert session is not None
            session.close()
            with pytest.raises(WriteRefusedError) as caught:
                async with open_commands(store):
                    pass

        assert (caught.value.code, caught.value.transient) == ("room-lock", True)

    def test_keys_are_those_of_every_version(self) -> None:
        """Programs of two versions must mean the same lock."""
        assert lock_key("main") == -3425551509646965007


@attrs.define
class Told:
    times: int = 0

    def __call__(self) -> None:
        self.times += 1


class TestLostLock:
    async def test_is_taken_again_and_the_room_goes_on(self, postgres_dsn: str) -> None:
        """The lock is no fence: a room whose session ended keeps its epoch, writes as before, and locks again."""
        told = Told()
        async with PostgresStore(postgres_dsn) as store, PostgresStore(postgres_dsn) as other:
            claim = RoomClaim("main", fresh_uuid(), START_MICROS, None, told)
            async with store.claim_room(claim), open_commands(store, "second") as room:
                before = pid_of_locks(store)
                with plain_session(postgres_dsn) as session:
                    session.execute("SELECT pg_terminate_backend(%s, 5000)", (before,))
                    await store.write(room.admit())
                    await wait_for_row(session, f"{HELD} HAVING count(*) = 2", before)
                for name in ("main", "second"):
                    with pytest.raises(RoomInUseError):
                        async with open_commands(other, name):
                            pass

        assert told.times == 0

    async def test_is_waited_for_while_another_has_it_for_the_moment(self, postgres_dsn: str) -> None:
        """Somebody who has the lock and hasn't moved the epoch may still give up; the room goes on meanwhile."""
        async with PostgresStore(postgres_dsn) as store, open_commands(store) as room:
            before = pid_of_locks(store)
            with plain_session(postgres_dsn) as session, plain_session(postgres_dsn) as waiting:
                async with trio.open_nursery() as nursery:
                    take = f"SELECT pg_advisory_lock({lock_key('main')})".encode()
                    nursery.start_soon(trio.to_thread.run_sync, lambda: waiting.execute(take))
                    await wait_for_row(session, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
                    session.execute("SELECT pg_terminate_backend(%s, 5000)", (before,))
                await store.write(room.admit())
                tried = "SELECT 1 FROM pg_stat_activity WHERE pid <> %s AND query LIKE %s"
                await wait_for_row(session, tried, before, "SELECT pg_try_advisory_lock%")
                assert store._database.locks.unguarded
                waiting.execute("SELECT pg_advisory_unlock_all()")
                await wait_until(lambda: not store._database.locks.unguarded)
            await store.write(room.admit())

    async def test_tells_an_idle_room_that_a_newer_owner_has_it(self, postgres_dsn: str) -> None:
        """R-12: without any write, the watch of the lock finds the moved epoch and tells the owner, once."""
        told = Told()
        async with PostgresStore(postgres_dsn) as store:
            claim = RoomClaim("main", fresh_uuid(), START_MICROS, None, told)
            async with store.claim_room(claim), open_commands(store, "kept") as kept:
                for _ in range(2):
                    before = pid_of_locks(store)
                    with plain_session(postgres_dsn) as session:
                        session.execute("UPDATE spindel.rooms SET epoch = epoch + 1 WHERE name = 'main'")
                        session.execute("SELECT pg_terminate_backend(%s, 5000)", (before,))
                        await wait_for_row(session, HELD, before)
                    await wait_until(lambda: told.times)
                await store.write(kept.admit())

        assert told.times == 1


async def test_a_room_that_was_taken_over_is_lost_at_once(postgres_dsn: str) -> None:
    """R-12: the room says so, cancels its Runs and raises, although none of them ever writes again."""
    cancelled: list[str | None] = []

    async def compute(run: Run[None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.append(run.cancel_reason)

    async with PostgresStore(postgres_dsn) as store:
        with pytest.raises(RoomOwnershipLostError) as caught:
            async with open_room(store, name="main") as room:
                run = await room.start(compute)
                with plain_session(postgres_dsn) as session:
                    session.execute("UPDATE spindel.rooms SET epoch = epoch + 1, incarnation = gen_random_uuid()")
                    session.execute("SELECT pg_terminate_backend(%s, 5000)", (pid_of_locks(store),))
                await trio.sleep_forever()
        record = await store.load_run("main", run.id)

    assert caught.value.room == "main"
    assert room.state is RoomState.LOST
    assert cancelled == ["room-lost"]
    assert record is not None
    assert (record.status, record.family_return_ack) == (RunStatus.RUNNING, None)


async def test_an_older_owner_s_late_end_leaves_the_newer_owner_s_room_alone(postgres_dsn: str) -> None:
    """R-12: leaving a room that somebody else has by now neither closes it nor frees its lock."""
    async with PostgresStore(postgres_dsn) as old, PostgresStore(postgres_dsn) as new:
        async with open_commands(old) as stale:
            with plain_session(postgres_dsn) as session:
                session.execute("SELECT pg_advisory_unlock_all()")
            await trio.lowlevel.checkpoint()
            old._database.locks._ask(b"SELECT pg_advisory_unlock(%s)", lock_key("main"))
            taken = open_commands(new)
            owner = await taken.__aenter__()
            assert await refusal(old, stale.admit()) == "not-owner"
        (room,) = await new.list_rooms()
        await new.write(owner.admit())
        with pytest.raises(RoomInUseError):
            async with open_commands(old):
                pass
        await taken.__aexit__(None, None, None)

    assert room.closed_at is None
    assert room.epoch == owner.epoch == 2
