"""Lists and their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spindel.errors import InvalidRecordError
from spindel.ids import RunId
from spindel.store._records import RunCursor, RunQuery, RunStatus
from spindel.testing.clocks import START_MICROS
from spindel.testing.store_contract._commands import (
    Commands,
    fresh_uuid,
    list_ids,
    open_commands,
)

if TYPE_CHECKING:
    from uuid import UUID

    from spindel.store._contract import Store


class ListsContract:
    """Lists and their pages. A part of `StoreContract`."""

    async def test_lists_are_ordered_by_start_then_id_and_pages_are_disjoint(
        self, store: Store, room: Commands
    ) -> None:
        """R-22: 300 Runs of few start times are paged completely, newest first, without one twice."""
        runs = [room.admit(started_at=START_MICROS + position % 3) for position in range(300)]
        await store.write_each(runs)
        expected = [run.id for run in sorted(runs, key=lambda run: (run.started_at, str(run.id)), reverse=True)]

        for limit in (1, 7, 100):
            seen: list[UUID] = []
            cursor: RunCursor | None = None
            while True:
                page = await store.list_runs(room.query(limit=limit, before=cursor))
                seen += [run.id for run in page.runs]
                assert len(page.runs) <= limit
                if (cursor := page.next) is None:
                    break
                assert cursor == RunCursor(page.runs[-1].started_at, page.runs[-1].id)
                if limit == 1 and len(seen) == 20:
                    break
            assert seen == (expected if limit > 1 else expected[:20])

    async def test_page_that_ends_with_the_last_run_has_no_next(self, store: Store, room: Commands) -> None:
        for _ in range(3):
            await store.write(room.admit())

        assert (await store.list_runs(room.query(limit=3))).next is None
        assert (await store.list_runs(room.query(limit=2))).next is not None
        assert (await store.list_runs(RunQuery(room="never-claimed"))).runs == ()

    @pytest.mark.parametrize("limit", [0, 101, -1, True, "20", 2.0])
    async def test_limit_of_a_page_is_checked(self, store: Store, room: Commands, limit: Any) -> None:
        """R-22: a limit that is not 1 to 100 is refused."""
        with pytest.raises(InvalidRecordError, match="limit"):
            await store.list_runs(room.query(limit=limit))

    async def test_lists_are_filtered_before_they_are_cut(self, store: Store, room: Commands) -> None:
        """R-22: status, parent and subtree choose among all Runs of the room, then the limit applies."""
        top, beside = room.admit(), room.admit()
        await store.write_each([top, beside])
        tree = [room.admit(parent_id=top.id) for _ in range(3)]
        await store.write_each(tree)
        leaves = [room.admit(parent_id=tree[0].id) for _ in range(3)]
        strange = room.admit(parent_id=tree[1].id, started_at=START_MICROS - 1)
        await store.write_each([*leaves, room.admit(parent_id=beside.id), strange])
        await store.write(room.finish(leaves[1]))
        async with open_commands(store, "other") as other:
            await store.write(other.admit())
        subtree = [*reversed(leaves), *reversed(tree), top, strange]

        assert await list_ids(store, room.query(under=RunId(top.id))) == [run.id for run in subtree]
        assert await list_ids(store, room.query(under=RunId(strange.id))) == [strange.id]
        assert await list_ids(store, room.query(under=RunId(fresh_uuid()))) == []
        assert await list_ids(store, room.query(parent=RunId(top.id), limit=2)) == [tree[2].id, tree[1].id]
        assert await list_ids(store, room.query(status=RunStatus.COMPLETED, limit=1)) == [leaves[1].id]
        assert await list_ids(store, room.query(status=RunStatus.CANCELLING)) == []
        assert await list_ids(
            store, room.query(under=RunId(top.id), parent=RunId(tree[0].id), status=RunStatus.RUNNING)
        ) == [leaves[2].id, leaves[0].id]
        assert len(await list_ids(store, room.query())) == 10
        page = await store.list_runs(room.query(under=RunId(top.id), limit=5))
        rest = await store.list_runs(room.query(under=RunId(top.id), limit=5, before=page.next))
        assert [run.id for run in (*page.runs, *rest.runs)] == [run.id for run in subtree]
        assert rest.next is None

    async def test_lists_see_what_was_written_since_the_last_one(self, store: Store, room: Commands) -> None:
        ids: list[UUID] = []
        for _ in range(5):
            run = room.admit()
            await store.write(run)
            ids.insert(0, run.id)
            assert await list_ids(store, room.query()) == ids
        late = room.admit(started_at=START_MICROS - 1)
        await store.write(late)

        assert await list_ids(store, room.query()) == [*ids, late.id]

    async def test_deep_subtree_is_listed(self, store: Store, room: Commands) -> None:
        """A family of a thousand levels is no deeper than any other for a list."""
        chain = [room.admit()]
        for _ in range(1000):
            chain.append(room.admit(parent_id=chain[-1].id))
        await store.write_each(chain)

        assert await list_ids(store, room.query(under=RunId(chain[-2].id))) == [chain[-1].id, chain[-2].id]
        assert await list_ids(store, room.query(under=RunId(chain[0].id), limit=1)) == [chain[-1].id]
