"""Rows: how they begin, how they end, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import pytest
import trio

from spindel.errors import WriteRefusedError, WriteUncertainError
from spindel.ids import RunId, witness_id
from spindel.store._contract import Confirmation
from spindel.store._mutations import (
    AdmitRun,
)
from spindel.store._records import RunRecord, RunStatus
from spindel.testing.clocks import START_MICROS
from spindel.testing.faults import Fault, FaultyStore
from spindel.testing.store_contract._commands import (
    ADAPTER,
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
    from spindel.store._contract import Store


class RowsContract:
    """Rows: how they begin, how they end, and what they refuse. A part of `StoreContract`."""

    # -- admission --

    async def test_admitted_run_is_read_as_it_was_written(self, store: Store, room: Commands) -> None:
        """A running row has every field of its admission and nothing of an end."""
        parent = room.admit()
        trigger, offer, experiment = fresh_uuid(), fresh_uuid(), fresh_uuid()
        run = room.admit(
            kind="job",
            actor="åsa",
            parent_id=parent.id,
            trigger_id=trigger,
            provenance='{"tags":["a",1,null],"z":"\\\\u0000\\u0000","ü":{"x":1.5}}',
            created_at=START_MICROS - 5,
            job_version=1,
            job_key="k",
            job_offer=offer,
            job_experiment=experiment,
        )
        await store.write(parent)
        await store.write(run)

        assert await load_row(store, run) == RunRecord(
            id=RunId(run.id),
            room="main",
            incarnation=room.incarnation,
            kind="job",
            actor="åsa",
            parent_id=RunId(parent.id),
            trigger_id=trigger,
            provenance={"tags": ["a", 1, None], "z": "\\u0000\0", "ü": {"x": 1.5}},
            family_version=1,
            job_version=1,
            job_key="k",
            job_offer=offer,
            job_experiment=experiment,
            created_at=START_MICROS - 5,
            started_at=run.started_at,
            status=RunStatus.RUNNING,
            reason=None,
            error=None,
            ended_at=None,
            job_result_state=None,
            job_scorecard=None,
            family_return_ack=None,
            job_core_cleanup_ack=None,
            job_adapter_cleanup_ack=None,
            admission_disposal=None,
            updated_at=run.started_at,
        )

    async def test_unknown_run_is_none_and_so_is_one_of_another_room(self, store: Store, room: Commands) -> None:
        run = room.admit()
        await store.write(run)

        assert await store.load_run("main", RunId(fresh_uuid())) is None
        assert await store.load_run("other", RunId(run.id)) is None

    async def test_repeated_admission_is_acknowledged_and_changes_nothing(self, store: Store, room: Commands) -> None:
        run = room.admit()
        await store.write(run)
        before = await load_row(store, run)

        await store.write(run)

        assert await load_row(store, run) == before
        assert len(await list_ids(store, room.query())) == 1

    async def test_admission_of_a_known_id_with_other_content_is_refused(self, store: Store, room: Commands) -> None:
        """R-08: an identity never changes, whichever field it is."""
        parent, trigger = room.admit(), fresh_uuid()
        run = room.admit()
        await store.write(parent)
        await store.write(run)
        before = await load_row(store, run)
        changes: dict[str, Any] = {
            "kind": "other",
            "actor": "other",
            "parent_id": parent.id,
            "trigger_id": trigger,
            "provenance": '{"a":1}',
            "family_version": None,
            "created_at": run.created_at - 1,
            "started_at": run.started_at + 1,
            "job_version": 1,
            "job_key": "key",
            "job_offer": trigger,
            "job_experiment": trigger,
        }

        for name, value in changes.items():
            changed = msgspec.structs.replace(run, **{name: value})
            assert await refusal(store, changed) == "run-exists", name
            assert await store.confirm(changed) is Confirmation.CONFLICT, name
        assert await load_row(store, run) == before

    async def test_one_of_two_racing_admissions_of_an_id_wins(self, store: Store, room: Commands) -> None:
        """R-05: two admissions of one id with other content race, and exactly one is acknowledged."""

        async def contend(admission: AdmitRun, results: list[tuple[str, object]]) -> None:
            (result,) = await store.write_each([admission])
            results.append((admission.actor, result))

        for _ in range(10):
            run = room.admit()
            results: list[tuple[str, object]] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(contend, run, results)
                nursery.start_soon(contend, msgspec.structs.replace(run, actor="rival"), results)
            won = [actor for actor, result in results if result is None]
            refused = [result for _, result in results if isinstance(result, WriteRefusedError)]

            assert (len(won), len(refused)) == (1, 1)
            assert (refused[0].code, refused[0].transient) == ("run-exists", False)
            assert (await load_row(store, run)).actor == won[0]

    async def test_id_of_another_room_is_taken(self, store: Store, room: Commands) -> None:
        """An id is unique in the whole store: the other room's row refuses it, and isn't changed from here."""
        run = room.admit()
        await store.write(run)
        async with open_commands(store, "other") as other:
            foreign = other.admit(id=run.id)

            assert await refusal(store, foreign) == "run-exists"
            assert await refusal(store, other.fence(foreign)) == "run-exists"
            assert await refusal(store, other.finish(run)) == "run-unknown"
            assert await refusal(store, other.witnesses(run, CORE)) == "run-unknown"
            assert await refusal(store, other.dispose(run)) == "run-unknown"
            await store.write(room.finish(run))
            assert await refusal(store, foreign) == "terminal-fence"
            assert await refusal(store, other.fence(foreign)) == "terminal-fence"

    async def test_parent_must_be_running_in_this_room_and_incarnation(self, store: Store, room: Commands) -> None:
        """R-36, in the store: an invented, ended, waiting, foreign or own parent admits nobody."""
        ended, waiting, foreign = room.admit(), room.admit(), room.admit()
        for run in (ended, waiting):
            await store.write(run)
        await store.write(room.finish(ended))
        await store.write(room.finish(waiting, "waiting"))
        own = fresh_uuid()
        async with open_commands(store, "other") as other:
            foreign = other.admit()
            await store.write(foreign)
            for parent in (fresh_uuid(), ended.id, waiting.id, foreign.id):
                assert await refusal(store, room.admit(parent_id=parent)) == "parent-not-live"
                assert await refusal(store, room.fence(room.admit(parent_id=parent))) == "parent-not-live"
            assert await refusal(store, room.admit(id=own, parent_id=own)) == "parent-not-live"

        assert await list_ids(store, room.query(parent=RunId(ended.id))) == []

    async def test_refusal_of_a_known_id_comes_before_that_of_its_parent(self, store: Store, room: Commands) -> None:
        run = room.admit()
        await store.write(run)
        orphaned = msgspec.structs.replace(run, parent_id=fresh_uuid())

        assert await refusal(store, orphaned) == "run-exists"
        await store.write(room.finish(run))
        assert await refusal(store, orphaned) == "terminal-fence"

    # -- outcomes --

    @pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "waiting"])
    async def test_outcome_is_stored_with_the_family_witness_in_one_write(
        self, store: Store, room: Commands, status: str
    ) -> None:
        """R-77, in the store: outcome and witness are there together; only a waiting Run has no end time."""
        run = room.admit()
        await store.write(run)
        before = await load_row(store, run)
        finish = room.finish(run, status, reason="because", error="x" * 2000)
        await store.write(finish)

        assert await load_row(store, run) == attrs.evolve(
            before,
            status=RunStatus(status),
            reason="because",
            error="x" * 2000,
            ended_at=None if status == "waiting" else finish.ended_at,
            family_return_ack=witness_id(FAMILY, run.id),
            updated_at=finish.ended_at,
        )

    async def test_outcome_of_a_job_has_its_result(self, store: Store, room: Commands) -> None:
        job, scorecard = room.admit_job(), fresh_uuid()
        await store.write(job)
        await store.write(room.finish(job, job_result_state="accepted", job_scorecard=scorecard))
        record = await load_row(store, job)

        assert (record.job_result_state, record.job_scorecard) == ("accepted", scorecard)

    async def test_result_of_a_waiting_run_is_refused(self, store: Store, room: Commands) -> None:
        job = room.admit_job()
        await store.write(job)

        assert await refusal(store, room.finish(job, "waiting", job_result_state="accepted")) == "outcome-early"
        assert await refusal(store, room.finish(job, "waiting", job_scorecard=fresh_uuid())) == "outcome-early"
        assert (await load_row(store, job)).status is RunStatus.RUNNING

    async def test_outcome_of_an_unknown_run_is_refused(self, store: Store, room: Commands) -> None:
        unknown = room.admit()

        assert await refusal(store, room.finish(unknown)) == "run-unknown"
        assert await refusal(store, room.witnesses(unknown, FAMILY)) == "run-unknown"
        assert await refusal(store, room.dispose(unknown)) == "run-unknown"

    @pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "waiting"])
    async def test_repeated_outcome_is_acknowledged_and_another_one_refused(
        self, store: Store, room: Commands, status: str
    ) -> None:
        """R-06: the row of an ended or waiting Run is the same after any other outcome was tried."""
        run = room.admit()
        await store.write(run)
        finish = room.finish(run, status, reason="because", error="text")
        await store.write(finish)
        before = await load_row(store, run)
        await store.write(finish)
        changes: dict[str, Any] = {
            "status": "completed" if status != "completed" else "failed",
            "reason": None,
            "error": "other",
            "ended_at": finish.ended_at + 1,
            "job_result_state": "accepted",
            "job_scorecard": fresh_uuid(),
        }

        for name, value in changes.items():
            changed = msgspec.structs.replace(finish, **{name: value})
            assert await refusal(store, changed) == "terminal-fence", name
            assert await store.confirm(changed) is Confirmation.CONFLICT, name
        assert await store.confirm(finish) is Confirmation.PRESENT
        assert await load_row(store, run) == before

    async def test_ended_rows_refuse_every_mutation(self, store: Store, room: Commands) -> None:
        """R-06: an ended, a waiting and a fenced row stay as they are, whatever is tried on them."""
        cause = room.admit()
        runs = {status: room.admit() for status in ("completed", "waiting")}
        for run in (cause, *runs.values()):
            await store.write(run)
        await store.write(room.finish(cause))
        for status, run in runs.items():
            await store.write(room.finish(run, status, family_returned=False))
        fenced = room.admit()
        await store.write(room.fence(fenced))

        for run in (*runs.values(), fenced):
            before = await load_row(store, run)
            assert await refusal(store, run) == "terminal-fence"
            assert await refusal(store, msgspec.structs.replace(run, actor="other")) == "terminal-fence"
            assert await refusal(store, room.fence(run)) == "terminal-fence"
            assert await refusal(store, room.finish(run, "cancelled")) == "terminal-fence"
            assert await refusal(store, room.causes(run, cause)) == "cause"
            assert await refusal(store, room.witnesses(run, FAMILY)) == "witness-late"
            assert await refusal(store, room.witnesses(run, CORE)) == "witness-late"
            assert await refusal(store, room.witnesses(run, ADAPTER)) == "adapter-order"
            assert await load_row(store, run) == before
        for run in runs.values():
            assert await refusal(store, room.dispose(run)) == "disposal-order"

    async def test_outcome_of_a_fence_or_orphan_is_no_outcome_of_its_run(self, store: Store, room: Commands) -> None:
        """R-06: a fence refuses the very outcome that looks like it, if it was dated otherwise."""
        run = room.admit()
        fence = room.fence(run)
        await store.write(fence)
        same = room.finish(
            run, "failed", reason="admission-failed", error="boom", ended_at=fence.ended_at, family_returned=True
        )

        assert await refusal(store, same) == "witness-late"
        assert await refusal(store, msgspec.structs.replace(same, ended_at=same.ended_at + 1)) == "terminal-fence"

    async def test_outcome_without_witness_never_gets_one(self, store: Store, room: Commands) -> None:
        """R-07: a family witness can't be added to a Run that has ended without it."""
        run = room.admit()
        finish = room.finish(run, family_returned=False)
        await store.write(run)
        await store.write(finish)
        later = msgspec.structs.replace(finish, family_returned=True)

        assert await refusal(store, later) == "witness-late"
        assert await store.confirm(later) is Confirmation.CONFLICT
        assert (await load_row(store, run)).family_return_ack is None

    async def test_outcome_keeps_a_witness_that_came_before_it(self, store: Store, room: Commands) -> None:
        """R-82, in the store: a Job's outcome doesn't ask for the witness that came with its core."""
        job = room.admit_job()
        finish = room.finish(job, family_returned=False)
        await store.write(job)
        await store.write(room.witnesses(job, FAMILY, CORE))
        await store.write(finish)
        await store.write(finish)

        assert await store.confirm(finish) is Confirmation.PRESENT
        assert (await load_row(store, job)).family_return_ack == witness_id(FAMILY, job.id)

    async def test_row_from_before_families_gets_no_family_witness(self, store: Store, room: Commands) -> None:
        """R-10: a row without family state ends, but nothing can ever vouch for its family."""
        run = room.admit(family_version=None)
        await store.write(run)

        assert await refusal(store, room.finish(run)) == "family-version"
        assert await refusal(store, room.witnesses(run, FAMILY)) == "family-version"
        assert await refusal(store, room.witnesses(run, FAMILY, ADAPTER)) == "family-version"
        await store.write(room.finish(run, family_returned=False))
        assert await refusal(store, room.witnesses(run, FAMILY)) == "family-version"
        assert (await load_row(store, run)).family_return_ack is None

    # -- fences --

    @pytest.mark.parametrize("stored", [False, True])
    async def test_fence_is_the_row_of_an_admission_that_failed(
        self, store: Store, room: Commands, stored: bool
    ) -> None:
        """R-57, in the store: a fence keeps id and timestamps, whether the first row had arrived or not."""
        run = room.admit()
        if stored:
            await store.write(run)
        fence = room.fence(run)

        assert await store.confirm(fence) is Confirmation.ABSENT
        await store.write(fence)
        record = await load_row(store, run)
        assert (record.status, record.reason, record.error) == (RunStatus.FAILED, "admission-failed", "boom")
        assert (record.created_at, record.started_at) == (run.created_at, run.started_at)
        assert record.ended_at == record.updated_at == fence.ended_at
        assert record.family_return_ack is None

    async def test_repeated_fence_is_acknowledged_and_another_one_refused(self, store: Store, room: Commands) -> None:
        run = room.admit()
        fence = room.fence(run)
        await store.write(fence)
        await store.write(fence)
        others = [
            msgspec.structs.replace(fence, error=None),
            msgspec.structs.replace(fence, ended_at=fence.ended_at + 1),
            msgspec.structs.replace(fence, admission=msgspec.structs.replace(run, actor="other")),
        ]

        assert await store.confirm(fence) is Confirmation.PRESENT
        for other in others:
            assert await refusal(store, other) == "terminal-fence"
            assert await store.confirm(other) is Confirmation.CONFLICT

    async def test_fence_of_another_admission_does_not_end_a_running_run(self, store: Store, room: Commands) -> None:
        run = room.admit()
        await store.write(run)
        fence = room.fence(msgspec.structs.replace(run, actor="other"))

        assert await refusal(store, fence) == "run-exists"
        assert await store.confirm(fence) is Confirmation.CONFLICT
        assert (await load_row(store, run)).status is RunStatus.RUNNING

    async def test_late_admission_meets_its_fence(self, store: Store, room: Commands) -> None:
        """R-58: an admission that arrives after its fence was written is refused inside the mutation."""
        faulty = FaultyStore(store)
        faulty.fail(1, Fault.LATE, of=AdmitRun)
        run = room.admit()
        with pytest.raises(WriteUncertainError):
            await faulty.write(run)
        assert await faulty.confirm(run) is Confirmation.ABSENT
        await faulty.write(room.fence(run))
        (late,) = await faulty.arrive()

        assert isinstance(late, WriteRefusedError)
        assert late.code == "terminal-fence"
        assert await faulty.confirm(run) is Confirmation.CONFLICT
        assert (await load_row(store, run)).reason == "admission-failed"

    async def test_fenced_admission_admits_no_children(self, store: Store, room: Commands) -> None:
        run = room.admit()
        await store.write(run)
        await store.write(room.fence(run))

        assert await refusal(store, room.admit(parent_id=run.id)) == "parent-not-live"
