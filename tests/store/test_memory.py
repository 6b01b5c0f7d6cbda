"""What only the memory store has: parts in plain tables, and costs that don't grow with history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import pytest

from spindel.errors import WriteRefusedError
from spindel.ids import RunId
from spindel.store._contract import Confirmation, StorePart
from spindel.store._memory import MemoryStore
from spindel.store._memory_tables import MemoryTables
from spindel.store._mutations import Together
from spindel.testing.store_contract import Commands, open_commands, refusal

if TYPE_CHECKING:
    from uuid import UUID


@attrs.frozen
class SetBalance:
    """A mutation of a layer above: an account of a Run, which must exist."""

    part: ClassVar[str] = "accounts"

    room: str
    epoch: int
    run_id: UUID
    balance: int

    @property
    def identity(self) -> tuple[str, ...]:
        return ("set-balance", str(self.run_id))


def set_balance(tables: MemoryTables, mutation: SetBalance) -> int:
    accounts, history = tables.table("accounts"), tables.table("history")
    before: int = accounts.get(mutation.run_id, 0)
    accounts[mutation.run_id] = mutation.balance
    history[len(history)] = before
    if tables.load_run(mutation.room, RunId(mutation.run_id)) is None:
        raise WriteRefusedError("no-run")
    if mutation.balance == 0:
        del accounts[mutation.run_id]
    if mutation.balance < 0:
        raise WriteRefusedError("overdrawn")
    return before


def confirm_balance(tables: MemoryTables, mutation: SetBalance) -> Confirmation:
    found = tables.table("accounts").get(mutation.run_id)
    if found is None:
        return Confirmation.ABSENT
    return Confirmation.PRESENT if found == mutation.balance else Confirmation.CONFLICT


ACCOUNTS = StorePart(
    name="accounts",
    migrations={},
    sqlite={},
    memory={SetBalance: set_balance},
    sqlite_confirm={},
    memory_confirm={SetBalance: confirm_balance},
)


class TestParts:
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore([ACCOUNTS])

    async def test_mutation_of_a_part_is_applied_and_confirmed(self, store: MemoryStore) -> None:
        async with open_commands(store) as room:
            run = room.admit()
            await store.write(run)
            ten = SetBalance("main", room.epoch, run.id, 10)

            assert await store.confirm(ten) is Confirmation.ABSENT
            assert await store.write(ten) == 0
            assert await store.confirm(ten) is Confirmation.PRESENT
            assert await store.write(attrs.evolve(ten, balance=5)) == 10
            assert await store.confirm(ten) is Confirmation.CONFLICT
            assert await store.write(attrs.evolve(ten, balance=0)) == 5
            assert await store.confirm(ten) is Confirmation.ABSENT

    async def test_refused_mutation_of_a_part_leaves_nothing(self, store: MemoryStore) -> None:
        """R-03: what a part changed before it refused is taken back: new, changed and deleted values."""
        async with open_commands(store) as room:
            run = room.admit()
            await store.write(run)
            ten = SetBalance("main", room.epoch, run.id, 10)
            unknown = attrs.evolve(ten, run_id=room.admit().id)
            assert await refusal(store, unknown) == "no-run"
            assert await store.confirm(unknown) is Confirmation.ABSENT
            await store.write(ten)
            assert await refusal(store, attrs.evolve(ten, balance=-1)) == "overdrawn"

            assert await store.confirm(ten) is Confirmation.PRESENT

    async def test_part_and_core_are_written_together_or_not_at_all(self, store: MemoryStore) -> None:
        """R-03: a `Together` of a part and the core, refused by either, leaves neither."""
        async with open_commands(store) as room:
            run = room.admit()
            ten = SetBalance("main", room.epoch, run.id, 10)
            gone = attrs.evolve(ten, balance=0)
            finish = room.finish(run)
            for bad in (attrs.evolve(ten, balance=-1), room.finish(room.admit())):
                tried = Together(mutations=(run, ten, gone, Together(mutations=(ten, finish)), bad))
                with pytest.raises(WriteRefusedError):
                    await store.write(tried)
                assert await store.load_run("main", RunId(run.id)) is None
                assert await store.confirm(ten) is Confirmation.ABSENT

            assert await store.write(Together(mutations=(run, ten, finish))) == (None, 0, None)
            assert await store.confirm(Together(mutations=(ten, finish))) is Confirmation.PRESENT

    async def test_part_obeys_the_owner_of_the_room(self, store: MemoryStore) -> None:
        """R-12: a part's mutation of an older owner is refused before the part sees it."""
        async with open_commands(store):
            pass
        async with open_commands(store) as room:
            run = room.admit()
            await store.write(run)

            assert await refusal(store, SetBalance("main", room.epoch - 1, run.id, 1)) == "not-owner"

    async def test_tables_of_parts_are_their_own(self) -> None:
        seen: list[int] = []

        @attrs.frozen
        class Look(SetBalance):
            part: ClassVar[str] = "other"

        def look(tables: MemoryTables, mutation: Look) -> None:
            seen.append(len(tables.table("accounts")))

        other = attrs.evolve(ACCOUNTS, name="other", memory={Look: look}, memory_confirm={})
        store = MemoryStore([ACCOUNTS, other])
        async with open_commands(store) as room:
            run = room.admit()
            await store.write(run)
            await store.write(SetBalance("main", room.epoch, run.id, 1))
            await store.write(Look("main", room.epoch, run.id, 1))

        assert seen == [0]


class TestCosts:
    async def write_history(self, store: MemoryStore, room: Commands, size: int) -> None:
        for _ in range(size):
            run = room.admit()
            await store.write_shielded(run)
            await store.write_shielded(room.finish(run))

    async def test_adoption_and_parents_never_meet_ended_rows(self) -> None:
        """R-88: what an opening and an admission look at are the running rows, whatever the history."""
        store = MemoryStore()
        async with open_commands(store) as dead:
            await self.write_history(store, dead, 2_000)
            orphans = [dead.admit() for _ in range(10)]
            await store.write_each(orphans)
        looked_at: list[Any] = []
        rows = store._rows

        class Watched(dict[int, Any]):
            def get(self, key: int, default: Any = None) -> Any:
                looked_at.append(key)
                return rows.get(key, default)

            def __iter__(self) -> Any:
                raise AssertionError("a scan of all rows")

            items = values = __iter__

        async with open_commands(store) as room:
            store._rows = Watched(rows)
            store._rooms["main"].rows = Watched(store._rooms["main"].rows)
            assert await store.write(room.adopt()) == 10
            parent = room.admit()
            await store.write(parent)
            child = room.admit(parent_id=parent.id)
            await store.write(child)

        assert looked_at == [parent.id.int, child.id.int]

    async def test_nothing_is_remembered_of_a_mutation_but_its_row(self) -> None:
        """The undo log is empty again after whatever was refused or done."""
        store = MemoryStore([ACCOUNTS])
        async with open_commands(store) as room:
            run = room.admit()
            for mutation in (
                Together(mutations=(run, SetBalance("main", room.epoch, run.id, 3), room.finish(run))),
                Together(mutations=(room.admit(), room.finish(room.admit()))),
                SetBalance("main", room.epoch, run.id, -1),
                SetBalance("main", room.epoch, run.id, 4),
            ):
                await store.write_each([mutation])

                assert store._undo._notes == []
                assert store._undo._marks == []
