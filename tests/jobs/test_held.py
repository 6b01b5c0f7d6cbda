"""Held stages of a Job: what is told of them, and how an operator recovers them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AcknowledgeRefusedError,
    AdmissionRefusedError,
    InvalidRecordError,
    JobNotFoundError,
    NotHeldError,
    RecoveryInProgressError,
    RoomCloseRefusedError,
    RoomOwnershipLostError,
    RunAbandonedError,
    StageHeldError,
    StaleRevisionError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.ids import Revision
from spindel.jobs import Job, Stage, find_job, get_job, observe_settlement
from spindel.observe import RoomEvent, RunHeld, RunRecovered
from spindel.operator import abandon_held, recover, recovery_state
from spindel.runs import Finishing, HeldObligation, Presence, RoomState, open_room
from spindel.store import AppendWitnesses, Confirmation, FinishRun, RunStatus
from spindel.testing.faults import Fault, FaultyStore
from tests.jobs.adapters import Adapter, give, open_main, park, recover_now, row_of, wait_held

if TYPE_CHECKING:
    from trio.testing import MockClock

    from spindel.runs import Outcome, Room
    from spindel.testing.clocks import ManualWallClock

SECRET = "secret"
ACKNOWLEDGEMENTS = [(1, Stage.CORE_ACK), (2, Stage.ADAPTER_ACK)]


async def collect(
    room: Room, events: list[RoomEvent], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with room.watch(buffer=10_000) as watch:
        task_status.started()
        async for event in watch:
            events.append(event)  # noqa: PERF401  seen as it comes, not at the end


def told(events: list[RoomEvent]) -> list[tuple[str, str, str]]:
    """Give what the events tell of holds."""
    found: list[tuple[str, str, str]] = []
    for event in events:
        if isinstance(event, RunHeld):
            found.append((event.name, event.phase, event.code))
        elif isinstance(event, RunRecovered):
            found.append((event.name, event.phase, event.action))
    return found


class TestCallbacks:
    async def test_a_failed_core_cleanup_is_held_and_its_error_is_private(
        self, faulty: FaultyStore, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
    ) -> None:
        """J-17: held at core with the row running; only `recovery_state` gives the error; the room refuses to close."""
        adapter = Adapter(core_errors=[ValueError(SECRET)])
        events: list[RoomEvent] = []
        caplog.set_level(logging.DEBUG)
        async with open_main(faulty, report_seconds=1e-3) as room:
            await nursery.start(collect, room, events)
            job = await adapter.start(room, give, 5)
            view = await wait_held(job)
            row = await row_of(faulty, job)
            state = recovery_state(room, job.id)
            with pytest.raises(RoomCloseRefusedError) as caught:
                await room.close(grace_seconds=0)
            (hold,) = room.held()
            cold = await get_job(room, job.id)
            shown: list[object] = [view, row, hold, cold, caught.value, caught.value.held, *events, *caplog.messages]
            shown += [vars(record) for record in caplog.records]

            assert (view.status, view.stage, view.cleanup_stage) == (RunStatus.RUNNING, Stage.CORE, Stage.CORE)
            assert (view.settled, view.blocked_by, view.error, view.ended_at) == (False, (), None, None)
            assert (row.status, row.job_core_cleanup_ack) == (RunStatus.RUNNING, None)
            assert str(state.error) == SECRET
            assert (state.locator.stage, state.locator.job_id) == (Stage.CORE, job.id)
            assert state.locator.incarnation == room.incarnation
            assert SECRET not in repr(shown)
            assert str(state.locator.revision) not in repr(shown)
            assert caught.value.remaining == (job.id,)
            assert f"held: run {job.id} at core;" in str(caught.value)
            assert caught.value.held == (HeldObligation(job.id, None, None, "core", "ValueError", state.held_since),)
            assert any(str(job.id) in message and "core" in message for message in caplog.messages)
            after = await recover_now(room, job, "retry")
            assert await job.result() == 5
            await wait_all_tasks_blocked()

        assert adapter.calls == ["core", "core", "adapter"]
        assert not after.cleanup_required
        assert told(events) == [("run.held", "core", "ValueError"), ("run.recovered", "core", "retry")]

    async def test_work_that_was_cancelled_shows_cancelling_while_core_is_held(self, faulty: FaultyStore) -> None:
        """J-18: cancelling while held; cancel again gives False; retried: cancelled, settled, and the room closes."""
        adapter = Adapter(core_errors=[ValueError(SECRET)])
        async with open_main(faulty) as room:
            job = await adapter.start(room, park)
            await wait_all_tasks_blocked()
            assert job.cancel("user-asked")
            view = await wait_held(job)
            assert (view.status, view.cleanup_stage, view.cancel_requested) == (
                RunStatus.CANCELLING,
                Stage.CORE,
                True,
            )
            assert job.cancel() is False
            await recover_now(room, job, "retry")
            outcome = await job.outcome()
            report = await observe_settlement(room, job.id)
            await room.close()
            assert room.state is RoomState.CLOSED

        assert outcome.status is RunStatus.CANCELLED
        assert report.settled
        assert adapter.calls == ["core", "core", "adapter"]
        assert (await row_of(faulty, job)).reason == "user-asked"

    async def test_a_failed_adapter_never_changes_a_stored_outcome(self, faulty: FaultyStore) -> None:
        """J-19: completed stays completed; close is refused until the adapter is attested, which calls nothing."""
        adapter = Adapter(adapter_errors=[ValueError(SECRET)])
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            view = await wait_held(job)
            before = await row_of(faulty, job)
            report = await observe_settlement(room, job.id)
            with pytest.raises(RoomCloseRefusedError) as caught:
                await room.close(grace_seconds=0)
            with pytest.raises(trio.WouldBlock):
                job.run.outcome_nowait()
            acknowledged = await recover_now(room, job, "acknowledge")
            assert await job.result() == 5
            after = await row_of(faulty, job)
            settled = await observe_settlement(room, job.id)
            await room.close()

        assert (view.status, view.cleanup_stage, view.settled) == (RunStatus.COMPLETED, Stage.ADAPTER, False)
        assert (report.lease, report.owner, report.settled) == (Presence.PRESENT, Presence.PRESENT, False)
        assert [(hold.run_id, hold.phase) for hold in caught.value.held] == [(job.id, "adapter")]
        assert f"held: run {job.id} at adapter;" in str(caught.value)
        assert adapter.calls == ["core", "adapter"]
        assert acknowledged.status is RunStatus.COMPLETED
        assert (after.status, after.error, after.ended_at) == (RunStatus.COMPLETED, None, before.ended_at)
        assert settled.settled

    async def test_a_core_that_is_attested_is_not_called_again(self, faulty: FaultyStore) -> None:
        """J-19: attesting core cleanup goes on without a call, too, and the witnesses are written."""
        adapter = Adapter(core_errors=[ValueError(SECRET)])
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            await recover_now(room, job, "acknowledge")
            assert await job.result() == 5
            assert (await observe_settlement(room, job.id)).settled

        assert adapter.calls == ["core", "adapter"]

    @pytest.mark.parametrize("stage", [Stage.CORE, Stage.ADAPTER])
    async def test_an_error_about_another_room_or_run_only_holds_its_stage(
        self, faulty: FaultyStore, stage: Stage
    ) -> None:
        """J-17: a callback that raises what ends other Runs is held like any other; its own Job goes on afterwards."""
        errors: list[BaseException] = [RunAbandonedError(_some_run()), RoomOwnershipLostError("another", 3)]
        adapter = Adapter()
        (adapter.core_errors if stage is Stage.CORE else adapter.adapter_errors).extend(errors)
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            assert (await wait_held(job)).cleanup_stage is stage
            with pytest.raises(StageHeldError):
                await recover_now(room, job, "retry")
            await recover_now(room, job, "retry")
            assert await job.result() == 5

        assert room.state is RoomState.CLOSED
        assert adapter.calls.count(stage.value) == 3


def _some_run() -> Any:
    return UUID(int=77)


class TestExclusion:
    async def test_a_failed_retry_makes_a_new_revision(self, faulty: FaultyStore, nursery: trio.Nursery) -> None:
        """J-20: a retry that fails gives the new locator; the old one is stale, the new one works."""
        adapter = Adapter(core_errors=[ValueError("first"), KeyError("second")])
        events: list[RoomEvent] = []
        async with open_main(faulty) as room:
            await nursery.start(collect, room, events)
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            old = recovery_state(room, job.id).locator
            assert recovery_state(room, job.id).locator == old
            with pytest.raises(StageHeldError) as caught:
                await recover(room, old, "retry")
            state = recovery_state(room, job.id)
            new = state.locator
            assert isinstance(state.error, KeyError)
            assert caught.value.locator == new
            assert (new.stage, new.revision != old.revision) == (Stage.CORE, True)
            with pytest.raises(StaleRevisionError):
                await recover(room, old, "acknowledge")
            assert adapter.calls == ["core", "core"]
            await recover(room, new, "retry")
            assert await job.result() == 5
            await wait_all_tasks_blocked()

        assert adapter.calls == ["core", "core", "core", "adapter"]
        assert [kind for kind, _, _ in told(events)][-1] == "run.recovered"

    @pytest.mark.parametrize("changed", ["stage", "incarnation", "revision"])
    async def test_a_locator_of_another_hold_is_stale(self, faulty: FaultyStore, changed: str) -> None:
        """J-20: a locator whose stage, incarnation or revision isn't the hold's is stale, and nothing happens."""
        adapter = Adapter(core_errors=[ValueError("first")])
        other: dict[str, dict[str, Any]] = {
            "stage": {"stage": Stage.ADAPTER},
            "incarnation": {"incarnation": UUID(int=1)},
            "revision": {"revision": Revision(UUID(int=1))},
        }
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            locator = recovery_state(room, job.id).locator
            with pytest.raises(StaleRevisionError):
                await recover(room, attrs.evolve(locator, **other[changed]), "acknowledge")
            assert recovery_state(room, job.id).locator == locator
            await recover(room, locator, "acknowledge")
            await job.outcome()

    @pytest.mark.parametrize("action", ["abandon", "Acknowledge", ""])
    async def test_an_action_that_is_none_does_nothing(self, faulty: FaultyStore, action: Any) -> None:
        """J-20: an action that is neither of the two is refused before any effect, and the locator stays good."""
        adapter = Adapter(core_errors=[ValueError("first")])
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            locator = recovery_state(room, job.id).locator
            with pytest.raises(InvalidRecordError):
                await recover(room, locator, action)
            assert adapter.calls == ["core"]
            await recover(room, locator, "acknowledge")
            await job.outcome()

    @pytest.mark.parametrize("late", [False, True])
    async def test_of_two_recoveries_one_acts(self, faulty: FaultyStore, late: bool) -> None:
        """J-21: two at once, or one while the other's callback runs: one call, and the other is told so."""
        adapter = Adapter(core_errors=[ValueError("first")])
        refused: list[str] = []

        async def act(room: Room, job: Job[Any]) -> None:
            try:
                await recover(room, locator, "retry")
            except RecoveryInProgressError as error:
                refused.append(str(error.subject))

        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            adapter.core_gate = trio.Event()
            locator = recovery_state(room, job.id).locator
            async with trio.open_nursery() as nursery:
                nursery.start_soon(act, room, job)
                if late:
                    await wait_all_tasks_blocked()
                nursery.start_soon(act, room, job)
                await wait_all_tasks_blocked()
                assert len(refused) == 1
                with pytest.raises(StaleRevisionError):
                    await recover(room, attrs.evolve(locator, revision=Revision(UUID(int=1))), "retry")
                with pytest.raises(NotHeldError):
                    recovery_state(room, job.id)
                adapter.core_gate.set()
            assert await job.result() == 5

        assert refused == [f"Job {job.id}"]
        assert adapter.calls == ["core", "core", "adapter"]

    async def test_a_callback_that_runs_is_not_held(self, faulty: FaultyStore) -> None:
        """J-22: while a callback runs, its Job isn't held: no state to read, nothing to recover."""
        gate = trio.Event()
        adapter = Adapter(core_errors=[ValueError("first")], adapter_gate=gate)
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            locator = recovery_state(room, job.id).locator
            await recover(room, locator, "acknowledge")
            await wait_all_tasks_blocked()
            assert adapter.calls == ["core", "adapter"]
            with pytest.raises(NotHeldError) as caught:
                recovery_state(room, job.id)
            for action in ("retry", "acknowledge"):
                with pytest.raises(NotHeldError):
                    await recover(room, locator, action)
            assert not job.view().cleanup_required
            gate.set()
            assert await job.result() == 5

        assert caught.value.blocked_by == ()
        assert adapter.calls == ["core", "adapter"]


class TestTerminal:
    async def test_a_refused_outcome_is_held_with_its_lease(self, faulty: FaultyStore) -> None:
        """J-23: refused to acknowledge while the row runs; a retry stores the same outcome and end, written later.

        A terminal write that was refused was only logged once, and its Run forgotten.
        """
        faulty.fail(1, Fault.REFUSED, of=FinishRun, transient=False)
        adapter = Adapter()
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            view = await wait_held(job)
            locator = recovery_state(room, job.id).locator
            error = recovery_state(room, job.id).error
            with pytest.raises(AcknowledgeRefusedError) as caught:
                await recover(room, locator, "acknowledge")
            row = await row_of(faulty, job)
            again = recovery_state(room, job.id)
            report = await observe_settlement(room, job.id)
            assert adapter.calls == ["core"]
            after = await recover_now(room, job, "retry")
            assert await job.result() == 5

        assert (view.status, view.cleanup_stage, view.ended_at) == (RunStatus.RUNNING, Stage.TERMINAL, None)
        assert isinstance(error, WriteRefusedError)
        assert (caught.value.subject, caught.value.phase) == (f"Job {job.id}", "terminal")
        assert row.status is RunStatus.RUNNING
        assert report.lease is Presence.PRESENT
        assert (again.locator.revision != locator.revision, again.error) == (True, error)
        first, second = faulty.written(FinishRun)
        assert first == second
        stored = await row_of(faulty, job)
        assert (stored.status, stored.ended_at) == (RunStatus.COMPLETED, first.ended_at)  # type: ignore[attr-defined]
        assert after.ended_at == job.view().ended_at == stored.ended_at
        assert adapter.calls == ["core", "adapter"]

    async def test_a_stored_outcome_whose_reply_was_lost_is_attested_by_its_row(self, faulty: FaultyStore) -> None:
        """J-24: committed, but neither reply nor reading came: held; an acknowledgement finds it in the row and goes on."""
        faulty.fail(1, Fault.LOST_REPLY, of=FinishRun)
        faulty.fail_confirm(1, of=FinishRun, times=2)
        adapter = Adapter()
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            view = await wait_held(job)
            with pytest.raises(AcknowledgeRefusedError):
                await recover_now(room, job, "acknowledge")
            assert isinstance(recovery_state(room, job.id).error, WriteUncertainError)
            after = await recover_now(room, job, "acknowledge")
            assert await job.result() == 5
            row = await row_of(faulty, job)
            assert (await observe_settlement(room, job.id)).settled

        assert view.cleanup_stage is Stage.TERMINAL
        assert len(faulty.written(FinishRun)) == 1
        assert (after.status, after.ended_at) == (RunStatus.COMPLETED, row.ended_at)
        assert job.view().ended_at == row.ended_at
        assert adapter.calls == ["core", "adapter"]

    async def test_a_stored_outcome_whose_reply_was_lost_is_found_at_once(self, faulty: FaultyStore) -> None:
        """J-24: if the one confirming reading works, the walk goes on unheld, with one write."""
        faulty.fail(1, Fault.LOST_REPLY, of=FinishRun)
        adapter = Adapter()
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            assert await job.result() == 5
            row = await row_of(faulty, job)

        assert len(faulty.written(FinishRun)) == 1
        assert len([each for each in faulty.confirms if isinstance(each, FinishRun)]) == 1
        assert job.view().ended_at == row.ended_at

    @pytest.mark.parametrize("change", ["outcome", "result"])
    async def test_a_row_with_another_outcome_attests_nothing(self, faulty: FaultyStore, change: str) -> None:
        """J-24: a row that ended otherwise, or with another result, is no evidence: refused, still held."""
        faulty.fail(1, Fault.BEFORE, of=FinishRun)
        adapter = Adapter()
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            (frozen,) = faulty.written(FinishRun)
            assert isinstance(frozen, FinishRun)
            fields: dict[str, Any] = {name: getattr(frozen, name) for name in FinishRun.__struct_fields__}
            if change == "outcome":
                fields |= {"status": "failed", "error": "another"}
            else:
                fields |= {"ended_at": frozen.ended_at + 1}
            await faulty.store.write(FinishRun(**fields))
            for action in ("acknowledge", "retry"):
                with pytest.raises(AcknowledgeRefusedError if action == "acknowledge" else StageHeldError):
                    await recover_now(room, job, action)
            assert job.view().cleanup_stage is Stage.TERMINAL
            assert await faulty.confirm(frozen) is Confirmation.CONFLICT
            _give_up(room)

        assert adapter.calls == ["core"]


def _give_up(room: Room) -> None:
    assert len(abandon_held(room)) == 1


class TestRelease:
    @pytest.mark.parametrize("action", ["acknowledge", "retry"])
    async def test_a_release_that_failed_before_the_lease_went_is_not_passed_by_word(
        self, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, action: Literal["acknowledge", "retry"]
    ) -> None:
        """J-25: with the lease still there an acknowledgement is refused, and the lease stays; a retry releases it."""
        release = Finishing.release_lease
        failures = [OSError("the release failed")]

        def fail_once(finishing: Finishing) -> None:
            if failures:
                raise failures.pop()
            release(finishing)

        monkeypatch.setattr(Finishing, "release_lease", fail_once)
        adapter = Adapter()
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            view = await wait_held(job)
            if action == "acknowledge":
                with pytest.raises(AcknowledgeRefusedError):
                    await recover_now(room, job, "acknowledge")
            report = await observe_settlement(room, job.id)
            assert report.lease is Presence.PRESENT
            with pytest.raises(RoomCloseRefusedError):
                await room.close(grace_seconds=0)
            await recover_now(room, job, "retry")
            assert await job.result() == 5
            after = await observe_settlement(room, job.id)

        assert (view.status, view.cleanup_stage, view.settled) == (RunStatus.COMPLETED, Stage.RELEASE, False)
        assert after.settled
        assert adapter.calls == ["core", "adapter"]

    async def test_a_release_that_failed_after_the_lease_went_is_attested(
        self, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """J-25: with the lease gone the owner is still there, so it isn't settled; an acknowledgement passes.

        Until then it keeps its room, its waiters and its key, and nothing is published.
        """
        release = Finishing.release_lease
        order: list[str] = []

        def fail_after(finishing: Finishing) -> None:
            release(finishing)
            raise OSError("the reply of the release was lost")

        async def publish(_: Outcome[Any]) -> None:
            order.append("published")

        async def wait(job: Job[Any]) -> None:
            await job.outcome()
            order.append("woken")

        monkeypatch.setattr(Finishing, "release_lease", fail_after)
        adapter = Adapter()
        async with open_main(faulty) as room, trio.open_nursery() as nursery:
            job = await adapter.start(room, give, 5, key="k", publish=publish)
            nursery.start_soon(wait, job)
            view = await wait_held(job)
            report = await observe_settlement(room, job.id)
            with pytest.raises(RoomCloseRefusedError) as caught:
                await room.close(grace_seconds=0)
            assert (order, find_job(room, "k")) == ([], job)
            await recover_now(room, job, "acknowledge")
            assert await job.result() == 5
            after = await observe_settlement(room, job.id)
            assert find_job(room, "k") is None

        assert sorted(order) == ["published", "woken"]
        assert caught.value.remaining == (job.id,)
        assert (view.cleanup_stage, view.settled) == (Stage.RELEASE, False)
        assert (report.lease, report.owner, report.settled) == (Presence.ABSENT, Presence.PRESENT, False)
        assert (after.owner, after.settled) == (Presence.ABSENT, True)


class TestAcknowledgements:
    @pytest.mark.parametrize(("n", "stage"), ACKNOWLEDGEMENTS)
    @pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.REFUSED])
    async def test_a_witness_that_was_not_stored_is_not_attested(
        self, faulty: FaultyStore, n: int, stage: Stage, fault: Fault
    ) -> None:
        """J-26: failed before its commit, it is refused to acknowledge; a retry sends it again; one call of each callback."""
        faulty.fail(n, fault, of=AppendWitnesses)
        adapter = Adapter()
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            view = await wait_held(job)
            before = await row_of(faulty, job)
            with pytest.raises(AcknowledgeRefusedError):
                await recover_now(room, job, "acknowledge")
            assert job.view().cleanup_stage is stage
            await recover_now(room, job, "retry")
            assert await job.result() == 5
            assert (await observe_settlement(room, job.id)).settled

        assert (view.cleanup_stage, view.settled) == (stage, False)
        assert (before.job_core_cleanup_ack is None) is (stage is Stage.CORE_ACK)
        assert before.job_adapter_cleanup_ack is None
        written = faulty.written(AppendWitnesses)
        assert written[n - 1] == written[n]
        assert len(written) == 3
        assert adapter.calls == ["core", "adapter"]

    @pytest.mark.parametrize(("n", "stage"), ACKNOWLEDGEMENTS)
    async def test_a_witness_whose_reply_was_lost_is_found(self, faulty: FaultyStore, n: int, stage: Stage) -> None:
        """J-27: stored with a lost reply, it is confirmed by its identity and the walk goes on unheld."""
        faulty.fail(n, Fault.LOST_REPLY, of=AppendWitnesses)
        adapter = Adapter()
        async with open_main(faulty) as room, room.watch() as watch:
            job = await adapter.start(room, give, 5)
            assert await job.result() == 5
            assert (await observe_settlement(room, job.id)).settled
            names: list[str] = []
            async for event in watch:
                names.append(event.name)
                if event.name == "run.finished":
                    break

        assert "run.held" not in names
        assert len(faulty.written(AppendWitnesses)) == 2
        assert len(faulty.confirms) == 1
        assert adapter.calls == ["core", "adapter"]

    @pytest.mark.parametrize(("n", "stage"), ACKNOWLEDGEMENTS)
    @pytest.mark.parametrize("action", ["acknowledge", "retry"])
    async def test_a_witness_that_could_not_be_read_back_is_attested_by_its_row(
        self, faulty: FaultyStore, n: int, stage: Stage, action: Literal["acknowledge", "retry"]
    ) -> None:
        """J-27: if the reading fails, too, it is held; then the row attests it, or the same write is harmless."""
        faulty.fail(n, Fault.LOST_REPLY, of=AppendWitnesses)
        faulty.fail_confirm(1, of=AppendWitnesses)
        adapter = Adapter()
        async with open_main(faulty) as room:
            job = await adapter.start(room, give, 5)
            view = await wait_held(job)
            await recover_now(room, job, action)
            assert await job.result() == 5
            assert (await observe_settlement(room, job.id)).settled

        assert view.cleanup_stage is stage
        assert len(faulty.written(AppendWitnesses)) == (2 if action == "acknowledge" else 3)
        assert adapter.calls == ["core", "adapter"]


class TestTime:
    @pytest.mark.parametrize("stage", [Stage.CORE, Stage.CORE_ACK, Stage.TERMINAL, Stage.ADAPTER, Stage.ADAPTER_ACK])
    async def test_time_recovers_nothing(
        self, faulty: FaultyStore, spindel_clock: MockClock, wall_clock: ManualWallClock, stage: Stage
    ) -> None:
        """J-28: a day later the stage is held as before, under the same revision: no call and no write in between."""
        adapter = Adapter()
        if stage is Stage.CORE:
            adapter.core_errors.append(ValueError("no"))
        elif stage is Stage.ADAPTER:
            adapter.adapter_errors.append(ValueError("no"))
        elif stage is Stage.TERMINAL:
            faulty.fail(1, Fault.BEFORE, of=FinishRun)
        else:
            faulty.fail(1 if stage is Stage.CORE_ACK else 2, Fault.BEFORE, of=AppendWitnesses)
        async with open_main(faulty, wall_clock=wall_clock) as room:
            job = await adapter.start(room, give, 5)
            await wait_held(job)
            before = (recovery_state(room, job.id), list(adapter.calls), len(faulty.writes), len(faulty.confirms))
            await trio.sleep(24 * 3600)
            after = (recovery_state(room, job.id), list(adapter.calls), len(faulty.writes), len(faulty.confirms))
            view = job.view()
            await recover_now(room, job, "retry")
            await job.outcome()

        assert after == before
        assert (view.cleanup_stage, view.settled) == (stage, False)


@pytest.mark.parametrize("when", ["work", "core"])
async def test_callbacks_of_a_lost_room_are_not_called(faulty: FaultyStore, when: str) -> None:
    """J-17: a lost room calls no further callback and holds nothing; a Job's waiters are told that it was lost."""
    adapter = Adapter(core_gate=trio.Event())
    assert adapter.core_gate is not None
    errors: list[RoomOwnershipLostError] = []

    async def scenario(gate: trio.Event) -> None:
        async with open_room(faulty, name="main") as room:
            job = await adapter.start(room, park if when == "work" else give)
            await wait_all_tasks_blocked()
            faulty.lose("main")
            with trio.CancelScope(shield=True):
                with pytest.raises(AdmissionRefusedError):
                    await room.start(give)
                gate.set()
                with pytest.raises(RoomOwnershipLostError) as caught:
                    await job.outcome()
                errors.append(caught.value)
            assert room.held() == ()

    with pytest.raises(RoomOwnershipLostError):
        await scenario(adapter.core_gate)

    assert [error.room for error in errors] == ["main"]
    assert adapter.calls == ([] if when == "work" else ["core"])
    assert all(each.core is None or when == "core" for each in faulty.written(AppendWitnesses))  # type: ignore[attr-defined]


async def test_a_finished_job_can_not_be_recovered(faulty: FaultyStore) -> None:
    """J-22: what has no living owner, be it done, unknown or a plain Run, can't be recovered, and the error says so."""
    adapter = Adapter(core_errors=[ValueError("no")])
    async with open_main(faulty) as room:
        job = await adapter.start(room, give, 5)
        await wait_held(job)
        locator = recovery_state(room, job.id).locator
        await recover(room, locator, "acknowledge")
        await job.outcome()
        plain = await room.start(park)
        for job_id in (job.id, plain.id, _some_run()):
            with pytest.raises(JobNotFoundError):
                recovery_state(room, job_id)
            with pytest.raises(JobNotFoundError):
                await recover(room, attrs.evolve(locator, job_id=job_id), "retry")
        plain.cancel()

    assert adapter.calls == ["core", "adapter"]
