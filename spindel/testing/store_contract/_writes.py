"""How writes go: together, in batches, uncertain, cancelled, and what none may hold."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from spindel.errors import InvalidRecordError, WriteRefusedError, WriteUncertainError
from spindel.ids import RunId, witness_id
from spindel.store._contract import Confirmation
from spindel.store._mutations import (
    AdmitRun,
    FenceAdmission,
    FinishRun,
    RecordCauses,
    Together,
)
from spindel.store._records import RunStatus
from spindel.testing.faults import Fault, FaultyStore
from spindel.testing.store_contract._commands import (
    CORE,
    FAMILY,
    Commands,
    ForeignMutation,
    fresh_uuid,
    list_ids,
    load_row,
    open_commands,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from spindel.store._contract import Store
    from spindel.store._mutations import Mutation


class WritesContract:
    """How writes go: together, in batches, uncertain, cancelled, and what none may hold. A part of `StoreContract`."""

    # -- together --

    async def test_together_applies_all_and_gives_their_results(self, store: Store, room: Commands) -> None:
        run = room.admit_job()
        both = Together(mutations=(run, room.witnesses(run, FAMILY, CORE), room.adopt(), room.finish(run)))

        assert await store.confirm(both) is not Confirmation.PRESENT
        assert tuple(await store.write(both)) == (None, None, 0, None)
        assert await store.confirm(both) is Confirmation.CONFLICT, "the admission's row has ended meanwhile"
        record = await load_row(store, run)
        assert (record.status, record.job_core_cleanup_ack) == (RunStatus.COMPLETED, witness_id(CORE, run.id))

    async def test_together_is_undone_if_one_part_is_refused(self, reopen: Callable[[], Store]) -> None:
        """R-03: of a `Together`, nothing stays if one mutation is refused, wherever in the order it stands."""
        async with reopen() as store, open_commands(store) as dead:
            orphan = dead.admit()
            await store.write(orphan)
        async with reopen() as store, open_commands(store) as room:
            live, ended, fenced = room.admit_job(), room.admit(), room.admit()
            for run in (live, ended):
                await store.write(run)
            await store.write(room.finish(ended))
            await store.write(room.fence(fenced))
            before = [await load_row(store, run) for run in (orphan, live, ended, fenced)]
            new = room.admit()
            good: list[Mutation[Any]] = [
                new,
                room.finish(new),
                room.causes(live, ended, new),
                room.witnesses(live, FAMILY, CORE),
                room.finish(live, "cancelled"),
                room.dispose(fenced),
                room.adopt(),
                room.fence(room.admit()),
            ]

            for position in range(len(good) + 1):
                tried = Together(mutations=(*good[:position], room.finish(room.admit()), *good[position:]))
                assert await refusal(store, tried) == "run-unknown"
                assert [await load_row(store, run) for run in (orphan, live, ended, fenced)] == before
                assert len(await list_ids(store, room.query())) == len(before)
            await store.write(Together(mutations=tuple(good)))
            assert (await load_row(store, orphan)).reason == "orphaned"
            assert (await load_row(store, live)).caused_by == (ended.id, new.id)

    async def test_confirmation_of_several_is_that_of_the_worst(self, store: Store, room: Commands) -> None:
        first, second, third = room.admit(), room.admit(), room.admit()
        await store.write(first)
        await store.write(second)

        assert await store.confirm(Together(mutations=(first, second))) is Confirmation.PRESENT
        assert await store.confirm(Together(mutations=(first, third))) is Confirmation.ABSENT
        await store.write(room.finish(second))
        assert await store.confirm(Together(mutations=(first, third, second))) is Confirmation.CONFLICT

    # -- batches --

    async def test_refused_mutation_of_a_batch_is_undone_alone(self, store: Store, room: Commands) -> None:
        """R-03: in a batch, the refused mutation alone has no effect; a whole `Together` counts as one."""
        runs = [room.admit() for _ in range(4)]
        bad_parent = room.admit(parent_id=fresh_uuid())
        together = Together(mutations=(room.admit(), room.finish(room.admit())))
        results = await store.write_each(
            [runs[0], bad_parent, runs[1], together, runs[2], room.finish(runs[0]), room.finish(bad_parent), runs[3]]
        )

        assert [result.code if isinstance(result, WriteRefusedError) else result for result in results] == [
            None,
            "parent-not-live",
            None,
            "run-unknown",
            None,
            None,
            "run-unknown",
            None,
        ]
        assert sorted(await list_ids(store, room.query())) == sorted(run.id for run in runs)

    async def test_writes_apply_in_the_order_in_which_they_were_queued(self, store: Store, room: Commands) -> None:
        """A child is queued right after its parent, its outcome right after that, and all are taken."""
        parent = room.admit()
        children = [room.admit(parent_id=parent.id) for _ in range(20)]
        order: list[Mutation[Any]] = [parent]
        for child in children:
            order += [child, room.finish(child)]
        order.append(room.finish(parent))
        queue = iter(order)

        async def write_next() -> None:
            # Taking the mutation and queueing it happen in one turn, whichever task comes first.
            await store.write_shielded(next(queue))

        async with trio.open_nursery() as nursery:
            for _ in order:
                nursery.start_soon(write_next)

        records = [await load_row(store, run) for run in (parent, *children)]
        assert {record.status for record in records} == {RunStatus.COMPLETED}

    async def test_empty_batch_is_nothing(self, store: Store, room: Commands) -> None:
        assert await store.write_each([]) == []
        assert await list_ids(store, room.query()) == []

    async def test_cancelled_writer_knows_what_is_stored(self, store: Store, room: Commands) -> None:
        """R-09: whenever its caller is cancelled, what is stored returns, and what raises `Cancelled` isn't stored."""
        returned: set[UUID] = set()
        runs = [room.admit() for _ in range(60)]

        async def write(run: AdmitRun, scope: trio.CancelScope) -> None:
            with scope:
                await store.write(run)
                returned.add(run.id)

        for position, run in enumerate(runs):
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                if position % 3 == 0:
                    scope.cancel()
                nursery.start_soon(write, run, scope)
                for _ in range(position % 5):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

        stored = {run.id for run in runs if await store.load_run("main", RunId(run.id)) is not None}
        assert returned == stored
        assert {runs[position].id for position in range(0, 60, 3)}.isdisjoint(stored)

    async def test_shielded_writes_ignore_cancellation(self, store: Store, room: Commands) -> None:
        first, second = room.admit(), room.admit()
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.write_shielded(first)
            assert await store.write_each([second]) == [None]
            assert await store.confirm(first) is Confirmation.PRESENT
            assert await store.confirm(second) is Confirmation.PRESENT
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.write(room.finish(first))

        assert scope.cancelled_caught
        assert (await load_row(store, first)).status is RunStatus.RUNNING

    # -- uncertain writes --

    @pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY])
    async def test_uncertain_write_is_confirmed_and_repeated(self, store: Store, room: Commands, fault: Fault) -> None:
        """R-02: uncertain; `confirm` says ABSENT or PRESENT; the repeat is acknowledged, and there is one row."""
        faulty = FaultyStore(store)
        run, fenced = room.admit(), room.admit()
        mutations: list[Mutation[Any]] = [run, room.finish(run), room.fence(fenced), room.dispose(fenced)]
        for mutation in mutations:
            faulty.fail(1, fault)
            with pytest.raises(WriteUncertainError) as caught:
                await faulty.write(mutation)
            assert caught.value.identity == mutation.identity
            expected = Confirmation.ABSENT if fault is Fault.BEFORE else Confirmation.PRESENT
            assert await faulty.confirm(mutation) is expected
            await faulty.write(mutation)
            assert await faulty.confirm(mutation) is Confirmation.PRESENT

        assert sorted(await list_ids(store, room.query())) == sorted((run.id, fenced.id))

    # -- what no record may hold --

    @pytest.mark.parametrize(
        "value", [print, object(), ValueError("x"), contextvars.copy_context(), 1.5, b"x", True, [1], {"a": 1}]
    )
    async def test_what_is_no_data_is_refused_by_its_key(self, store: Store, room: Commands, value: object) -> None:
        """R-08: a function, a context, an exception or another object reaches no row; the error names the field."""
        run = room.admit()
        await store.write(run)
        finish = room.finish(run)
        before = await load_row(store, run)
        wrong: list[tuple[str, Any]] = [
            *((name, msgspec.structs.replace(room.admit(), **{name: value})) for name in AdmitRun.__struct_fields__),
            *(
                (name, msgspec.structs.replace(finish, **{name: value}))
                for name in FinishRun.__struct_fields__
                if not (name == "family_returned" and isinstance(value, bool))
            ),
            ("error", FenceAdmission(admission=run, error=value, ended_at=1)),  # type: ignore[arg-type]
            ("causes[1]", RecordCauses(room="main", epoch=room.epoch, id=run.id, causes=(run.id, value))),  # type: ignore[arg-type]
            ("family", msgspec.structs.replace(room.witnesses(run), family=value)),
            ("disposal", room.dispose(run, value)),  # type: ignore[arg-type]
            ("limit", room.adopt(limit=value)),
        ]
        for name, mutation in wrong:
            with pytest.raises(InvalidRecordError) as caught:
                await store.write(mutation)
            assert caught.value.key == name

        assert await load_row(store, run) == before
        assert len(await list_ids(store, room.query())) == 1

    async def test_unknown_key_is_refused_by_name(self, room: Commands) -> None:
        """R-08: a mutation has a closed set of fields."""
        with pytest.raises(TypeError, match="colour"):
            room.admit(colour="red")

    async def test_values_out_of_range_are_refused_by_their_key(self, store: Store, room: Commands) -> None:
        """R-08: reasons, texts, numbers and statuses that a row can't hold are named."""
        run = room.admit()
        await store.write(run)
        wrong: list[tuple[str, Mutation[Any]]] = [
            ("created_at", room.admit(created_at=2**63)),
            ("started_at", room.admit(started_at=-1)),
            ("family_version", room.admit(family_version=2**63)),
            ("kind", room.admit(kind="\udc80")),
            ("actor", room.admit(actor="\udc80")),
            ("job_key", room.admit(job_key="\udc80")),
            ("kind", room.admit(kind="a\0b")),
            ("actor", room.admit(actor="a\0b")),
            ("job_key", room.admit(job_key="a\0b")),
            ("provenance", room.admit(provenance="{")),
            ("provenance", room.admit(provenance="[]")),
            ("status", room.finish(run, "running")),
            ("status", room.finish(run, "cancelling")),
            ("reason", room.finish(run, reason="Not A Reason")),
            ("reason", room.finish(run, reason="")),
            ("error", room.finish(run, error="x" * 2001)),
            ("error", room.finish(run, error="\udc80")),
            ("error", room.finish(run, error="a\0b")),
            ("ended_at", room.finish(run, ended_at=-1)),
            ("error", room.fence(room.admit(), "x" * 2001)),
            ("created_at", room.fence(room.admit(created_at=-1))),
            ("disposal", room.dispose(run, "incomplete")),
            ("limit", room.adopt(limit=0)),
            ("limit", room.adopt(limit=501)),
            ("mutations", Together(mutations=())),
            ("mutations[1]", Together(mutations=(run, msgspec.structs.replace(run, epoch=room.epoch + 1)))),
            ("mutations[1]", Together(mutations=(run, msgspec.structs.replace(run, room="other")))),
            ("reason", Together(mutations=(run, room.finish(run, reason="Not A Reason")))),
        ]
        for name, mutation in wrong:
            with pytest.raises(InvalidRecordError) as caught:
                await store.write(mutation)
            assert caught.value.key == name
            with pytest.raises(InvalidRecordError):
                await store.write_each([room.admit(), mutation])

        assert len(await list_ids(store, room.query())) == 1, "nothing of a batch with a bad record is written"

    async def test_mutation_of_a_part_that_the_store_lacks_is_refused(self, store: Store, room: Commands) -> None:
        foreign = ForeignMutation(room.room, room.epoch)
        with pytest.raises(InvalidRecordError, match="ForeignMutation"):
            await store.write(foreign)
        with pytest.raises(InvalidRecordError, match="ForeignMutation"):
            await store.confirm(foreign)
