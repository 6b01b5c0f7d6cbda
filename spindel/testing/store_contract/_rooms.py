"""Rooms: claims, epochs, their times, and the adoption of orphans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import pytest
import trio

from spindel.errors import InvalidRecordError, RoomInUseError
from spindel.ids import RunId
from spindel.store._contract import Confirmation, RoomClaim
from spindel.store._mutations import (
    Together,
)
from spindel.store._records import RunStatus
from spindel.testing.clocks import START_MICROS, ManualWallClock
from spindel.testing.store_contract._commands import (
    CORE,
    FAMILY,
    Commands,
    fresh_uuid,
    list_ids,
    load_row,
    open_commands,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.store._contract import Store
    from spindel.store._mutations import Mutation


class RoomsContract:
    """Rooms: claims, epochs, their times, and the adoption of orphans. A part of `StoreContract`."""

    # -- rooms --

    async def test_second_claim_of_a_room_is_refused(self, store: Store, room: Commands) -> None:
        """R-11: an open room can't be opened again here, and goes on undisturbed."""
        with pytest.raises(RoomInUseError, match="main") as caught:
            async with open_commands(store):
                pass
        run = room.admit()
        await store.write(run)

        assert caught.value.room == "main"
        assert caught.value.owner["pid"]
        assert (await load_row(store, run)).status is RunStatus.RUNNING

    async def test_each_claim_adds_one_to_the_epoch(self, reopen: Callable[[], Store]) -> None:
        """R-11: epochs of a room count its openings, whoever opened it; rooms count for themselves."""
        epochs: list[int] = []
        async with reopen() as store:
            for _ in range(2):
                async with open_commands(store) as commands:
                    epochs.append(commands.epoch)
        async with reopen() as store, open_commands(store) as first, open_commands(store, "a/other.room-1") as second:
            epochs += [first.epoch, second.epoch]

        assert epochs == [1, 2, 3, 1]

    async def test_room_is_free_again_after_its_block_raised(self, store: Store) -> None:
        class Broken(Exception):  # noqa: N818  nobody is to take it for an error of the store
            pass

        with pytest.raises(Broken):
            async with open_commands(store):
                raise Broken
        with trio.CancelScope() as scope:
            async with open_commands(store):
                scope.cancel()
                await trio.lowlevel.checkpoint()
        async with open_commands(store) as commands:
            assert commands.epoch == 3

    async def test_older_owner_is_refused_everything(self, reopen: Callable[[], Store]) -> None:
        """R-12, in the store: once a newer owner has claimed the room, each write of the older is `not-owner`."""
        async with reopen() as store, open_commands(store) as old:
            live, fenced = old.admit(), old.admit()
            await store.write(live)
            await store.write(old.fence(fenced))
        async with reopen() as store, open_commands(store) as new:
            before = [await load_row(store, run) for run in (live, fenced)]
            tried: list[Mutation[Any]] = [
                old.admit(),
                live,
                old.fence(old.admit()),
                old.fence(live),
                old.finish(live),
                old.finish(old.admit()),
                old.causes(live),
                old.witnesses(live, FAMILY),
                old.witnesses(live, family=fresh_uuid()),
                old.dispose(fenced),
                old.adopt(),
                Together(mutations=(old.finish(live),)),
                msgspec.structs.replace(new.admit(), incarnation=old.incarnation),
                msgspec.structs.replace(new.fence(new.admit()), admission=new.admit(incarnation=old.incarnation)),
                new.adopt(incarnation=old.incarnation),
            ]

            for mutation in tried:
                assert await refusal(store, mutation) == "not-owner", mutation
            assert [await load_row(store, run) for run in (live, fenced)] == before

    async def test_unclaimed_room_has_no_owner(self, store: Store) -> None:
        nobody = Commands("never-claimed", 1, fresh_uuid())

        assert await refusal(store, nobody.admit()) == "not-owner"
        assert await refusal(store, nobody.adopt()) == "not-owner"

    async def test_rooms_are_listed_with_their_owners(self, store: Store) -> None:
        """A room is dated by its owner's clock: open, closed, and open again."""
        clock = ManualWallClock(START_MICROS + 50)
        incarnation = fresh_uuid()
        async with store.claim_room(RoomClaim("b", incarnation, START_MICROS, clock)), open_commands(store, "a"):
            first, second = await store.list_rooms()
            assert (first.name, second.name) == ("a", "b")
            assert second.owner is not None
            assert second.owner["pid"]
            assert (second.incarnation, second.epoch) == (incarnation, 1)
            assert (second.opened_at, second.closed_at) == (START_MICROS, None)
        _, closed = await store.list_rooms()
        async with open_commands(store, "b", at=START_MICROS + 100) as commands:
            _, again = await store.list_rooms()

            assert (closed.owner, closed.closed_at) == (None, START_MICROS + 50)
            assert (again.opened_at, again.closed_at) == (START_MICROS + 100, None)
            assert (again.incarnation, again.epoch) == (commands.incarnation, 2)

    async def test_times_of_a_room_never_go_backwards(self, store: Store) -> None:
        clock = ManualWallClock(START_MICROS + 50)
        async with store.claim_room(RoomClaim("main", fresh_uuid(), START_MICROS, clock)):
            pass
        clock.advance(-1)
        async with store.claim_room(RoomClaim("main", fresh_uuid(), START_MICROS - 500, clock)):
            (opened,) = await store.list_rooms()
        (closed,) = await store.list_rooms()

        assert opened.opened_at == START_MICROS + 50
        assert closed.closed_at == START_MICROS + 50

    async def test_room_is_not_opened_before_its_newest_run_began(self, store: Store) -> None:
        async with open_commands(store) as commands:
            await store.write(commands.admit(started_at=START_MICROS + 900))
            await store.write(commands.fence(commands.admit(started_at=START_MICROS + 901)))
        async with open_commands(store):
            (room,) = await store.list_rooms()

            assert room.opened_at == START_MICROS + 901

    @pytest.mark.parametrize("name", ["", "Main", "a b", "x" * 129, "ä", 7])
    async def test_name_of_a_room_is_checked(self, store: Store, name: Any) -> None:
        with pytest.raises(InvalidRecordError, match="room"):
            async with store.claim_room(RoomClaim(name, fresh_uuid(), START_MICROS)):
                pass

        assert await store.list_rooms() == ()

    # -- adoption --

    async def test_running_rows_of_a_dead_owner_are_orphaned(self, reopen: Callable[[], Store]) -> None:
        """R-13, in the store: adoption ends running rows without witness and leaves waiting and ended ones alone."""
        async with reopen() as store, open_commands(store) as dead, open_commands(store, "other") as other:
            plain, job, parent = dead.admit(), dead.admit_job(), dead.admit()
            child, ended, waiting, fenced = dead.admit(parent_id=parent.id), dead.admit(), dead.admit(), dead.admit()
            foreign = other.admit()
            for run in (plain, job, parent, child, ended, waiting, foreign):
                await store.write(run)
            await store.write(dead.witnesses(job, CORE))
            await store.write(dead.causes(plain))
            await store.write(dead.finish(ended))
            await store.write(dead.finish(waiting, "waiting"))
            await store.write(dead.fence(fenced))
            running = {run.id: await load_row(store, run) for run in (plain, job, parent, child)}
            others = {run.id: await load_row(store, run) for run in (ended, waiting, fenced, foreign)}
            latest = dead.now
        async with reopen() as store, open_commands(store, at=latest + 10) as new:
            mine = new.admit()
            await store.write(mine)
            adopt = new.adopt()
            assert await store.confirm(adopt) is Confirmation.ABSENT
            assert await store.write(adopt) == 4
            assert await store.confirm(adopt) is Confirmation.PRESENT
            assert await store.write(adopt) == 0

            for run_id, before in running.items():
                record = await store.load_run("main", RunId(run_id))
                assert record == attrs.evolve(
                    before,
                    status=RunStatus.FAILED,
                    reason="orphaned",
                    ended_at=adopt.at,
                    updated_at=adopt.at,
                    job_result_state="unavailable" if before.job_offer is not None else None,
                )
            for run in (ended, waiting, fenced, foreign):
                assert await load_row(store, run) == others[run.id]
            assert (await load_row(store, mine)).status is RunStatus.RUNNING
            assert await refusal(store, new.admit(parent_id=parent.id)) == "parent-not-live"

    async def test_orphans_are_adopted_in_batches(self, reopen: Callable[[], Store]) -> None:
        """R-88, in small: each adoption takes at most its limit, and the batches are disjoint."""
        async with reopen() as store, open_commands(store) as dead:
            for _ in range(7):
                await store.write(dead.admit())
        async with reopen() as store, open_commands(store) as dead_too:
            for _ in range(3):
                await store.write(dead_too.admit())
        async with reopen() as store, open_commands(store) as new:
            counts: list[int] = [await store.write(new.adopt(limit=4)) for _ in range(4)]

            assert counts == [4, 4, 2, 0]
            assert await list_ids(store, new.query(status=RunStatus.RUNNING)) == []
            assert len(await list_ids(store, new.query(status=RunStatus.FAILED))) == 10

    async def test_adoption_by_a_clock_that_stepped_back_keeps_times_in_order(
        self, reopen: Callable[[], Store]
    ) -> None:
        async with reopen() as store, open_commands(store, at=START_MICROS + 1000) as dead:
            run = dead.admit()
            await store.write(run)
        async with reopen() as store, open_commands(store, at=START_MICROS) as new:
            await store.write(new.adopt())
            record = await load_row(store, run)

            assert record.ended_at == record.updated_at == run.started_at

    async def test_row_of_a_dead_owner_still_refuses_its_id(self, reopen: Callable[[], Store]) -> None:
        async with reopen() as store, open_commands(store) as dead:
            run = dead.admit()
            await store.write(run)
        async with reopen() as store, open_commands(store) as new:
            again = new.admit(id=run.id)

            assert await refusal(store, again) == "run-exists"
            await store.write(new.adopt())
            assert await refusal(store, again) == "terminal-fence"

    async def test_facts_outlive_the_store_that_wrote_them(self, reopen: Callable[[], Store]) -> None:
        async with reopen() as store, open_commands(store) as commands:
            first, run = commands.admit_job(), commands.admit()
            await store.write(first)
            await store.write(run)
            await store.write(commands.witnesses(first, FAMILY, CORE))
            await store.write(commands.finish(first, error="text"))
            await store.write(commands.causes(run, first))
            before = [await load_row(store, first), await load_row(store, run)]
        async with reopen() as store:
            assert [await load_row(store, first), await load_row(store, run)] == before
