"""Evidence beside the outcome: causes, witnesses and disposals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec
import pytest

from spindel.errors import WriteUncertainError
from spindel.ids import witness_id
from spindel.store._contract import Confirmation
from spindel.store._records import RunStatus
from spindel.testing.faults import Fault, FaultyStore
from spindel.testing.store_contract._commands import (
    ADAPTER,
    CORE,
    FAMILY,
    Commands,
    fresh_uuid,
    load_row,
    open_commands,
    refusal,
)

if TYPE_CHECKING:
    from spindel.store._contract import Store


class EvidenceContract:
    """Evidence beside the outcome: causes, witnesses and disposals. A part of `StoreContract`."""

    # -- causes --

    async def test_causes_are_a_set(self, store: Store, room: Commands) -> None:
        """R-34, in the store: causes are added once each and read in the order of their ids."""
        first, second, third, run = (room.admit() for _ in range(4))
        for admission in (first, second, third, run):
            await store.write(admission)
        for cause in (first, second, third):
            await store.write(room.finish(cause))
        await store.write(room.causes(run, third, first, third))
        await store.write(room.causes(run, first, second))
        await store.write(room.causes(run))

        assert (await load_row(store, run)).caused_by == (first.id, second.id, third.id)
        (listed,) = (await store.list_runs(room.query(status=RunStatus.RUNNING))).runs
        assert listed.caused_by == ()

    async def test_cause_must_have_ended_in_this_room(self, store: Store, room: Commands) -> None:
        """R-34, in the store: itself, a live, a waiting, an unknown and a foreign Run are no causes."""
        run, live, waiting, unknown, ended = (room.admit() for _ in range(5))
        for admission in (run, live, waiting, ended):
            await store.write(admission)
        await store.write(room.finish(waiting, "waiting"))
        await store.write(room.finish(ended))
        async with open_commands(store, "other") as other:
            foreign = other.admit()
            await store.write(foreign)
            await store.write(other.finish(foreign))
            for cause in (run, live, waiting, unknown, foreign):
                assert await refusal(store, room.causes(run, cause)) == "cause"
                assert await refusal(store, room.causes(run, ended, cause)) == "cause"
            assert await refusal(store, other.causes(run, foreign)) == "cause"

        assert (await load_row(store, run)).caused_by == ()

    async def test_causes_are_recorded_while_the_consumer_runs(self, store: Store, room: Commands) -> None:
        """A repeat is acknowledged after the end; anything new is refused then."""
        first, second, run = (room.admit() for _ in range(3))
        for admission in (first, second, run):
            await store.write(admission)
        for cause in (first, second):
            await store.write(room.finish(cause))
        stored, new = room.causes(run, first), room.causes(run, first, second)
        await store.write(stored)
        assert await store.confirm(new) is Confirmation.ABSENT
        await store.write(room.finish(run))
        await store.write(stored)

        assert await store.confirm(stored) is Confirmation.PRESENT
        assert await refusal(store, new) == "cause"
        assert await store.confirm(new) is Confirmation.CONFLICT
        assert await refusal(store, room.causes(room.admit(), first)) == "cause"
        assert (await load_row(store, run)).caused_by == (first.id,)
        async with open_commands(store, "other") as other:
            # Stored as they are, they are no business of another room's owner.
            assert await refusal(store, other.causes(run, first)) == "cause"
            assert await store.confirm(other.causes(run, first)) is Confirmation.ABSENT

    # -- witnesses --

    async def test_witnesses_of_a_job_come_in_their_order(self, store: Store, room: Commands) -> None:
        """R-82, in the store: core and family before the outcome, the adapter's after it."""
        job = room.admit_job()
        await store.write(job)
        before = await load_row(store, job)
        inner = room.witnesses(job, FAMILY, CORE)
        assert await store.confirm(inner) is Confirmation.ABSENT
        await store.write(inner)
        witnessed = attrs.evolve(
            before,
            family_return_ack=witness_id(FAMILY, job.id),
            job_core_cleanup_ack=witness_id(CORE, job.id),
            updated_at=inner.at,
        )
        assert await load_row(store, job) == witnessed
        early = room.witnesses(job, ADAPTER)
        assert await refusal(store, early) == "adapter-order"
        assert await store.confirm(early) is Confirmation.ABSENT
        finish = room.finish(job, family_returned=False)
        await store.write(finish)
        outer = room.witnesses(job, ADAPTER)
        await store.write(outer)

        assert await load_row(store, job) == attrs.evolve(
            witnessed,
            status=RunStatus.COMPLETED,
            ended_at=finish.ended_at,
            job_adapter_cleanup_ack=witness_id(ADAPTER, job.id),
            updated_at=outer.at,
        )

    async def test_witnesses_out_of_order_are_refused(self, store: Store, room: Commands) -> None:
        """R-07: no adapter witness without core, before the end or on a waiting row, no core or family after it."""
        job, waiting = room.admit_job(), room.admit_job()
        for run in (job, waiting):
            await store.write(run)
        assert await refusal(store, room.witnesses(job, CORE, ADAPTER)) == "adapter-order"
        await store.write(room.finish(job))
        await store.write(room.witnesses(waiting, CORE))
        await store.write(room.finish(waiting, "waiting"))

        assert await refusal(store, room.witnesses(job, ADAPTER)) == "adapter-order"
        assert await refusal(store, room.witnesses(job, CORE)) == "witness-late"
        assert await refusal(store, room.witnesses(job, CORE, ADAPTER)) == "witness-late"
        assert await refusal(store, room.witnesses(waiting, ADAPTER)) == "adapter-order"
        record = await load_row(store, job)
        assert record.job_core_cleanup_ack is record.job_adapter_cleanup_ack is None

    async def test_wrong_witnesses_are_refused(self, store: Store, room: Commands) -> None:
        """R-07: another stage's value, another Run's value and an invented one are no witness, set or not."""
        job, other = room.admit_job(), room.admit_job()
        await store.write(job)
        wrong = [
            room.witnesses(job, family=witness_id(CORE, job.id)),
            room.witnesses(job, core=witness_id(CORE, other.id)),
            room.witnesses(job, FAMILY, adapter=fresh_uuid()),
        ]

        for mutation in wrong:
            assert await refusal(store, mutation) == "witness-invalid"
            assert await store.confirm(mutation) is Confirmation.CONFLICT
        await store.write(room.witnesses(job, FAMILY, CORE))
        before = await load_row(store, job)
        for mutation in wrong:
            assert await refusal(store, mutation) == "witness-invalid"
        assert await load_row(store, job) == before

    async def test_repeated_witnesses_are_acknowledged_and_change_nothing(self, store: Store, room: Commands) -> None:
        job = room.admit_job()
        first, again = room.witnesses(job, CORE), room.witnesses(job, CORE)
        await store.write(job)
        await store.write(first)
        await store.write(again)
        assert (await load_row(store, job)).updated_at == first.at
        await store.write(room.finish(job))
        before = await load_row(store, job)
        await store.write(first)
        await store.write(room.witnesses(job))

        assert await store.confirm(first) is Confirmation.PRESENT
        assert await load_row(store, job) == before

    async def test_evidence_by_a_clock_that_stepped_back_keeps_times_in_order(
        self, store: Store, room: Commands
    ) -> None:
        job, fenced = room.admit_job(), room.admit()
        await store.write(job)
        await store.write(room.fence(fenced))
        before = await load_row(store, fenced)
        await store.write(msgspec.structs.replace(room.witnesses(job, CORE), at=1))
        await store.write(msgspec.structs.replace(room.dispose(fenced), at=1))

        assert (await load_row(store, job)).updated_at == job.started_at
        assert (await load_row(store, fenced)).updated_at == before.updated_at

    @pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY])
    async def test_uncertain_witness_write_is_repeated_until_acknowledged(
        self, store: Store, room: Commands, fault: Fault
    ) -> None:
        """R-81, in the store: a witness write that failed b or a is confirmed or repeated, and is there once."""
        faulty = FaultyStore(store)
        job = room.admit_job()
        await faulty.write(job)
        faulty.fail(1, fault)
        mutation = room.witnesses(job, FAMILY, CORE)
        with pytest.raises(WriteUncertainError) as caught:
            await faulty.write(mutation)

        assert caught.value.identity == mutation.identity
        expected = Confirmation.ABSENT if fault is Fault.BEFORE else Confirmation.PRESENT
        assert await faulty.confirm(mutation) is expected
        await faulty.write(mutation)
        assert await faulty.confirm(mutation) is Confirmation.PRESENT
        assert (await load_row(store, job)).updated_at == mutation.at

    # -- disposal --

    async def test_disposal_is_recorded_once_and_after_its_fence(self, store: Store, room: Commands) -> None:
        """R-57, in the store: only a fenced admission's things can be told to be gone."""
        run = room.admit()
        await store.write(run)
        disposal = room.dispose(run)
        assert await refusal(store, disposal) == "disposal-order"
        assert await store.confirm(disposal) is Confirmation.ABSENT
        await store.write(room.fence(run))
        before = await load_row(store, run)
        assert await store.confirm(disposal) is Confirmation.ABSENT
        disposal = room.dispose(run)
        await store.write(disposal)
        await store.write(room.dispose(run))

        assert await store.confirm(disposal) is Confirmation.PRESENT
        assert await load_row(store, run) == attrs.evolve(
            before, admission_disposal="discarded", updated_at=disposal.at
        )

    async def test_disposal_of_a_run_that_was_executed_is_refused(self, store: Store, room: Commands) -> None:
        run = room.admit()
        await store.write(run)
        alike = room.admit()
        await store.write(alike)
        await store.write(room.finish(run, "failed", reason="other"))
        await store.write(room.finish(alike, "waiting", reason="admission-failed"))

        for other in (run, alike):
            disposal = room.dispose(other)
            assert await refusal(store, disposal) == "disposal-order"
            assert await store.confirm(disposal) is Confirmation.CONFLICT
