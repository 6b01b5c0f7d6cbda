"""Families: what a parent owes for its children, until all of it has come back."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import FamilySealedError
from spindel.runs import Child, LaunchKind, Outcome, Run, observe_settlement, open_room
from spindel.runs._entry import Entry, FamilyState
from spindel.store import AdmitRun, FinishRun, MemoryStore, RunStatus
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from spindel.runs import Executor, Launch, Ticket
    from spindel.store import RunRecord, Store
    from spindel.testing.sweep import Steps
    from tests.conftest import Sweep


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


def is_open(run: Run[Any]) -> bool:
    try:
        run.outcome_nowait()
    except trio.WouldBlock:
        return True
    return False


# -- sealing ---------------------------------------------------------------------------------------------------------


async def test_a_reservation_before_the_seal_is_admitted_and_joined(store: Store) -> None:
    """R-41: reserved, then sealed: the child is admitted, and its parent waits for it."""
    stop, done = trio.Event(), trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        with parent.reserve() as token:
            parent.seal()
            child = await parent.admit(token, wait_for, done)
        stop.set()
        await wait_all_tasks_blocked()
        open_before = is_open(parent)
        done.set()
        await parent.wait_returned()

        assert open_before
        assert child.outcome_nowait().status is RunStatus.COMPLETED


async def test_a_reservation_of_a_parent_whose_work_is_over_is_admitted_and_joined(store: Store) -> None:
    """R-41: the end of the work seals, too; the parent's first child may come after it."""
    stop, done = trio.Event(), trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        with parent.reserve() as token:
            stop.set()
            await wait_all_tasks_blocked()
            child = await parent.admit(token, wait_for, done)
        await wait_all_tasks_blocked()
        open_before = is_open(parent)
        done.set()
        await parent.wait_returned()
        record = await room.load(parent.id)

        assert open_before
        assert child.parent_id == parent.id
        assert record is not None
        assert record.family_return_ack is not None


async def test_a_seal_is_idempotent_and_refuses_what_comes_after(store: Store) -> None:
    """R-41: sealed, then reserved: refused; work and plain tasks go on."""
    stop = trio.Event()
    noted: list[str] = []

    async def note(text: str) -> None:
        noted.append(text)

    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        parent.seal()
        parent.seal()
        with pytest.raises(FamilySealedError) as caught:
            await parent.start_child(give)
        parent.start_soon(note, "a plain task")
        await wait_all_tasks_blocked()
        still_open = is_open(parent)
        stop.set()

    assert caught.value.run_id == parent.id
    assert noted == ["a plain task"]
    assert still_open


async def test_an_unused_reservation_holds_the_parent_until_its_block_is_left(store: Store) -> None:
    """R-39, R-78: an open callback keeps the family open; left unused, it leaves no trace."""
    stop = trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        with parent.reserve():
            stop.set()
            await wait_all_tasks_blocked()
            open_inside = is_open(parent)
        await parent.wait_returned()
        rows = (await room.list_runs()).runs

        assert open_inside
        assert [row.id for row in rows] == [parent.id]


# -- who decides that a child returned -------------------------------------------------------------------------------


async def test_deleted_run_objects_change_no_lease(store: Store) -> None:
    """R-45: a child that nobody refers to is owned and waited for as before."""
    done = trio.Event()

    async def parent(run: Run[None]) -> None:
        await run.start_child(wait_for, done)
        await run.start_children([Child(wait_for, (done,), {})] * 2)

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        gc.collect()
        leases = (await observe_settlement(room, run.id)).leases
        open_before = is_open(run)
        done.set()
        await run.wait_returned()
        rows = (await room.list_runs(parent=run.id)).runs

        assert len(leases) == 3
        assert open_before
        assert [row.status for row in rows] == [RunStatus.COMPLETED] * 3


async def test_a_supervisor_that_claims_success_changes_no_lease(store: Store) -> None:
    """R-45: a supervisor may say what it likes about its children; only their return releases a lease."""
    done = trio.Event()

    async def supervise(child: Run[None]) -> Outcome[None]:
        return Outcome(child.id, RunStatus.COMPLETED, None, None)

    async def parent(run: Run[Outcome[None]]) -> Outcome[None]:
        return await supervise(await run.start_child(wait_for, done))

    async with open_room(store, name="r") as room:
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        (lease,) = (await observe_settlement(room, run.id)).leases
        record = await room.load(lease.run_id)
        open_before = is_open(run)
        done.set()

        assert record is not None
        assert record.status is RunStatus.RUNNING
        assert not lease.child_returned
        assert open_before


# -- nesting ---------------------------------------------------------------------------------------------------------


class Nest:
    """Three levels, each with a publication: the shape of nested experiments. One leaf fails."""

    def __init__(self, store: Store) -> None:
        self.store = FaultyStore(store)
        # Who was published, and how many writes had been made by then.
        self.published: list[tuple[str, int]] = []

    def publisher(self, name: str) -> Callable[[Outcome[Any]], Awaitable[None]]:
        async def publish(_: Outcome[Any]) -> None:
            await trio.lowlevel.checkpoint()
            self.published.append((name, len(self.store.writes)))

        return publish

    async def root(self, run: Run[None]) -> None:
        for name in ("m0", "m1"):
            await run.start_child(self.middle, name, kind=name, publish=self.publisher(name))
        await trio.lowlevel.checkpoint()

    async def middle(self, run: Run[None], name: str) -> None:
        leaves = [f"{name}.l{number}" for number in range(2)]
        await run.start_children(
            [Child(self.leaf, (leaf,), {"kind": leaf, "publish": self.publisher(leaf)}) for leaf in leaves]
        )
        await trio.lowlevel.checkpoint()

    async def leaf(self, _: Run[None], name: str) -> None:
        await trio.lowlevel.checkpoint()
        if name == "m0.l0":
            raise ValueError(name)

    async def play(self, steps: Steps | None = None) -> dict[str, RunRecord]:
        """Run it, cancelled where `steps` says, check what holds wherever that is, and give the rows."""
        async with open_room(self.store, name="nest") as room:
            run = await room.start(self.root, kind="root", publish=self.publisher("root"))
            if steps is not None:
                steps.arm(run.cancel)
            await run.wait_returned()
        rows = (await room.list_runs(limit=100)).runs
        ends = [write.mutation.id for write in self.store.writes if isinstance(write.mutation, FinishRun)]
        assert sorted(ends) == sorted(row.id for row in rows)
        ended = {
            next(row.kind for row in rows if row.id == write.mutation.id): position
            for position, write in enumerate(self.store.writes)
            if isinstance(write.mutation, FinishRun)
        }
        published = dict(self.published)
        assert len(self.published) == len(published) == len(rows)
        for row in rows:
            assert row.status.terminal
            assert row.family_return_ack is not None
            assert ended[row.kind] < published[row.kind]
            if row.kind != "root":
                assert published[row.kind] <= ended[row.kind.rpartition(".")[0] or "root"]
        assert room.entries == {}
        return {row.kind: row for row in rows}


async def test_nested_families_end_from_the_leaves_up(store: Store) -> None:
    """R-51: a leaf that fails fails alone; each level ends and is published before the one above ends."""
    rows = await Nest(store).play()

    assert {kind: row.status for kind, row in rows.items()} == dict.fromkeys(
        ("root", "m0", "m1", "m0.l1", "m1.l0", "m1.l1"), RunStatus.COMPLETED
    ) | {"m0.l0": RunStatus.FAILED}


async def test_nested_families_end_from_the_leaves_up_wherever_the_root_is_cancelled(sweep: Sweep) -> None:
    """R-51: cancelled after any step, every admitted level has one row, and children end before their parents."""
    seen: Counter[int] = Counter()

    async def scenario(steps: Steps) -> None:
        rows = await Nest(MemoryStore()).play(steps)
        seen[len(rows)] += 1

    assert await sweep(scenario) > 30
    # Cancelled early, little was admitted; at the end, everything was.
    assert min(seen) < 7
    assert max(seen) == 7


# -- what a family costs ---------------------------------------------------------------------------------------------


class CountingDict(dict[int, Entry]):
    """Counts every lease that is looked at, one by one or in passing."""

    looks = 0

    def __setitem__(self, key: int, entry: Entry) -> None:
        self.looks += 1
        super().__setitem__(key, entry)

    def __getitem__(self, key: int) -> Entry:
        self.looks += 1
        return super().__getitem__(key)

    def __delitem__(self, key: int) -> None:
        self.looks += 1
        super().__delitem__(key)

    def __iter__(self) -> Iterator[int]:
        self.looks += len(self)
        return super().__iter__()

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()

    def items(self) -> Any:
        self.looks += len(self)
        return super().items()


class CountingExecutor:
    """Counts the launches by kind, and passes them on."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.launches: Counter[LaunchKind] = Counter()

    def construct(self, launch: Launch) -> Ticket:
        self.launches[launch.kind] += 1
        return self._executor.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        self._executor.submit(ticket)


def entries_alive() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if isinstance(thing, Entry))


@pytest.mark.parametrize("children", [0, 1, 10, 100, 1_000, 10_000])
async def test_a_family_costs_a_constant_for_each_child(children: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-86: two looks and two mutations a child, one launch a parent, none for a leaf, and nothing left of them."""
    families: list[CountingDict] = []

    class Counted(FamilyState):
        def __init__(self, parent: Entry) -> None:
            super().__init__(parent)
            self.leases = CountingDict()
            families.append(self.leases)

    monkeypatch.setattr("spindel.runs._admission.FamilyState", Counted)
    stop = trio.Event()
    store = FaultyStore(MemoryStore())
    before = entries_alive()
    handles: list[weakref.ref[Run[int]]] = []

    async def parent(run: Run[None]) -> None:
        for start in range(0, children, 256):
            group = await run.start_children([Child(give, (n,), {}) for n in range(start, min(start + 256, children))])
            handles.extend(weakref.ref(child) for child in group if isinstance(child, Run))
        await stop.wait()

    async with open_room(store, name="r") as room:
        executor = room.pool.tasks = CountingExecutor(room.pool.tasks)
        run = await room.start(parent)
        stop.set()
        await run.wait_returned()
        del run
        left = entries_alive() - before
        alive = sum(1 for handle in handles if handle() is not None)

    assert len(store.written(AdmitRun)) == len(store.written(FinishRun)) == children + 1
    assert sum(leases.looks for leases in families) == 2 * children
    assert executor.launches == {}
    assert (left, alive) == (0, 0)


@pytest.mark.parametrize("children", [1, 10, 1_000])
async def test_a_family_that_is_not_empty_at_the_seal_is_joined_by_one_launch(children: int) -> None:
    """R-86: however many children are alive at the seal, one launch joins them; leaves have none."""
    done = trio.Event()
    before = entries_alive()

    async def parent(run: Run[None]) -> None:
        await run.start_children([Child(wait_for, (done,), {})] * children)

    async with open_room(name="r") as room:
        executor = room.pool.tasks = CountingExecutor(room.pool.tasks)
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        done.set()
        await run.wait_returned()
        del run
        left = entries_alive() - before

    assert executor.launches == {LaunchKind.JOIN: 1}
    assert left == 0


async def test_a_kept_child_keeps_nothing_of_those_above_it() -> None:
    """R-86: whoever keeps the last of a hundred generations keeps one record, not a chain of a hundred."""
    kept: list[Run[Any]] = []
    before = entries_alive()

    async def generation(run: Run[None], left: int) -> None:
        child = await run.start_child(generation, left - 1) if left else run
        if not left:
            kept.append(child)

    async with open_room(name="r") as room:
        await (await room.start(generation, 99)).result()
        left = entries_alive() - before

    assert len(kept) == 1
    assert left == 1
