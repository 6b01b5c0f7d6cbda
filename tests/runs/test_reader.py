"""Reading a room cold: without owning it, and without concluding more than a row says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from spindel.errors import InvalidRecordError, RoomOwnershipLostError, SchemaError
from spindel.ids import RunId
from spindel.runs import (
    Child,
    Presence,
    Room,
    RoomReader,
    RoomState,
    Run,
    SettlementReport,
    WitnessFact,
    observe_settlement,
    open_reader,
    open_room,
)
from spindel.store import MemoryStore, RunStatus, SqliteStore
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from pathlib import Path

    from spindel.store import Store


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


async def test_a_cold_reader_knows_rows_and_no_leases(store: Store) -> None:
    """R-84: lease and owner are unknown to it, so nothing is settled, however well it ended."""
    stop = trio.Event()
    async with open_room(store, name="r") as room, open_reader(store, name="r") as reader:
        live = await room.start(wait_for, stop)
        ended = await room.start(give)
        await ended.wait_returned()
        cold = {run.id: await observe_settlement(reader, run.id) for run in (live, ended)}
        hot = await observe_settlement(room, ended.id)
        stop.set()

    for report in cold.values():
        assert (report.lease, report.owner) == (Presence.UNKNOWN, Presence.UNKNOWN)
        assert (report.admission, report.leases, report.launches, report.omitted) == (None, (), (), 0)
        assert not report.settled
    assert cold[live.id].outcome is None
    assert cold[ended.id].outcome == hot.outcome
    assert cold[ended.id].family is WitnessFact.VALID
    assert hot.settled


async def test_an_unknown_id_has_no_outcome(store: Store) -> None:
    """R-84: a missing row proves nothing; for the owner, too, an absent lease is no settlement."""
    async with open_room(store, name="r") as room, open_reader(store, name="r") as reader:
        unknown = RunId(room.incarnation)
        hot, cold = await observe_settlement(room, unknown), await observe_settlement(reader, unknown)

    assert (hot.outcome, hot.lease, hot.settled) == (None, Presence.ABSENT, False)
    assert (cold.outcome, cold.lease, cold.settled) == (None, Presence.UNKNOWN, False)


async def test_a_room_that_is_closed_or_lost_reads_cold() -> None:
    """R-84: whoever owned it once sees no more than anybody."""
    faulty = FaultyStore(MemoryStore())
    async with open_room(faulty, name="r") as closed:
        ended = await closed.start(give)
    report = await observe_settlement(closed, ended.id)
    rooms: list[Room] = []

    async def lose() -> None:
        async with open_room(faulty, name="r") as room:
            rooms.append(room)
            faulty.lose("r")
            await room.start(give)

    with pytest.raises(RoomOwnershipLostError):
        await lose()
    lost = await observe_settlement(rooms[0], ended.id)

    assert closed.state is RoomState.CLOSED
    assert rooms[0].state is RoomState.LOST
    for seen in (report, lost):
        assert seen.outcome is not None
        assert (seen.lease, seen.owner, seen.settled) == (Presence.UNKNOWN, Presence.UNKNOWN, False)


def test_a_report_says_nothing_of_usage_funds_or_requests() -> None:
    """R-84: it has the fields of the contract and no other, so nobody can read consumption into it."""
    assert [field.name for field in attrs.fields(SettlementReport)] == [
        "run_id",
        "room",
        "outcome",
        "family",
        "core",
        "adapter",
        "lease",
        "owner",
        "evidence",
        "admission",
        "leases",
        "launches",
        "omitted",
        "settled",
    ]


async def test_a_reader_claims_nothing(store: Store) -> None:
    """R-84: a room keeps owner and epoch while it is read, and one that nobody owns stays so."""
    async with open_room(store, name="r") as room:
        run = await room.start(give)
        await run.wait_returned()
        before = await store.list_rooms()
        async with open_reader(store, name="r") as reader:
            await reader.load(run.id)
            await reader.list_runs()
        during = await store.list_rooms()
    after_close = await store.list_rooms()
    async with open_reader(store, name="r") as reader:
        record = await reader.load(run.id)
    after = await store.list_rooms()

    assert before == during
    assert after_close == after
    assert after[0].owner is None
    assert record is not None
    assert record.status is RunStatus.COMPLETED


async def test_a_reader_sees_what_the_owner_lists(store: Store) -> None:
    """R-22, R-84: pages, filters and subtrees are the same hot and cold."""
    stop = trio.Event()
    async with open_room(store, name="r") as room, open_reader(store, name="r") as reader:
        parent = await room.start(wait_for, stop)
        await parent.start_children([Child(give, (n,), {}) for n in range(5)])
        other = await room.start(give)
        await other.wait_returned()

        assert reader.name == "r"
        for query in ({}, {"parent": parent.id}, {"under": parent.id}, {"status": RunStatus.RUNNING}, {"limit": 3}):
            assert await reader.list_runs(**query) == await room.list_runs(**query)
        first = await reader.list_runs(limit=4)
        second = await reader.list_runs(limit=4, before=first.next)
        assert len({row.id for row in (*first.runs, *second.runs)}) == 7
        stop.set()


async def test_a_reader_of_a_path_opens_it_read_only_also_while_it_is_in_use(tmp_path: Path) -> None:
    """R-84: a file is read from its path, in use or not, and never changed by it."""
    path = tmp_path / "runs.db"
    async with open_room(path, name="r") as room:
        run = await room.start(give)
        await run.wait_returned()
        async with open_reader(path, name="r") as reader:
            in_use = await reader.load(run.id)
    async with open_reader(path, name="r") as reader:
        closed = await reader.load(run.id)
        report = await observe_settlement(reader, run.id)
        store = reader.store

    assert in_use == closed
    assert in_use is not None
    assert (report.family, report.evidence, report.settled) == (WitnessFact.VALID, "durable", False)
    assert isinstance(store, SqliteStore)


async def test_a_reader_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """R-84: reading creates no file."""
    path = tmp_path / "none.db"
    with pytest.raises(SchemaError):
        async with open_reader(path, name="r"):
            raise AssertionError("there is nothing to read")

    assert not path.exists()  # noqa: ASYNC240  a look at a temporary folder


@pytest.mark.parametrize("name", ["", "Room", "a b", "x" * 129])
def test_a_reader_has_the_name_of_a_room(name: str) -> None:
    """R-84: a name that no room can have is refused at once."""
    with pytest.raises(InvalidRecordError, match="room"):
        open_reader(MemoryStore(), name=name)


async def test_another_room_of_the_store_is_not_read(store: Store) -> None:
    """R-84: a reader sees its own room only."""
    async with open_room(store, name="a") as room:
        run = await room.start(give)
        await run.wait_returned()
        async with open_reader(store, name="b") as reader:
            record, page = await reader.load(run.id), await reader.list_runs()
            report = await observe_settlement(reader, run.id)

    assert record is None
    assert page.runs == ()
    assert report.outcome is None


async def test_a_reader_can_be_made_from_an_open_store(store: Store) -> None:
    """R-84: code that has a store needs no block for it, and the store stays open."""
    async with open_room(store, name="r") as room:
        run = await room.start(give)
        await run.wait_returned()
        async with open_reader(store, name="r"):
            pass
        record = await RoomReader(store, "r").load(run.id)

    assert record is not None
    assert record.family_return_ack is not None
