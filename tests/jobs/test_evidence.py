"""What proves that a Job is settled: witnesses, observed hot and cold, written once."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from uuid import UUID

import apsw
import attrs
import pytest
import trio

import spindel.operator
from spindel.errors import JobNotFoundError, RunWaiting, StageHeldError, WriteRefusedError
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.jobs import Job, Stage, get_job, list_jobs, observe_settlement, start_job
from spindel.operator import abandon_held, recover, recovery_state
from spindel.runs import Presence, WitnessFact, open_reader, open_room
from spindel.store import AdmitRun, AppendWitnesses, FinishRun, RunStatus
from spindel.testing.clocks import ManualWallClock
from spindel.testing.faults import Fault, FaultyStore
from tests.jobs.adapters import Adapter, open_main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spindel.runs import Outcome, Room, Run, SettlementReport
    from spindel.store import RunRecord, Store
    from spindel.testing.sweep import Steps
    from tests.conftest import Sweep

ALL_VALID = (WitnessFact.VALID,) * 3
ALL_ABSENT = (WitnessFact.ABSENT,) * 3
COLUMNS = "room, incarnation, kind, actor, provenance, family_version, job_version, created_at, started_at, updated_at"
BEGIN_WITH = (
    f"INSERT INTO runs (id, status, {COLUMNS}, {{0}}) SELECT 'another', 'running', {COLUMNS}, {{0}} FROM runs"
    " WHERE id = ?"
)


async def give(_: Run[str]) -> str:
    await trio.lowlevel.checkpoint()
    return "value"


async def fail(_: Run[None]) -> None:
    await trio.lowlevel.checkpoint()
    raise ValueError("a child's own fault")


async def pass_on(_: Outcome[Any]) -> None:
    await trio.lowlevel.checkpoint()


def witnesses(report: SettlementReport) -> tuple[WitnessFact, WitnessFact, WitnessFact]:
    return report.family, report.core, report.adapter


async def row_of(store: Store, job_id: RunId) -> RunRecord:
    row = await store.load_run("main", job_id)
    assert row is not None
    return row


async def test_nothing_of_a_job_leads_to_the_operators_door(store: Store) -> None:
    """J-29: what a Run or a Job exposes is no operator's function, and no revision; a view has neither, nor errors."""
    exposed: list[object] = []

    async def work(run: Run[None]) -> None:
        exposed.append(run)
        await trio.lowlevel.checkpoint()

    async with open_room(store, name="main") as room:
        job = await start_job(room, work)
        exposed.extend((job, job.view()))
        await job.outcome()
        exposed.extend((job.view(), await observe_settlement(room, job.id)))
    doors = [getattr(spindel.operator, name) for name in spindel.operator.__all__]
    for thing in exposed:
        for name in (name for name in dir(thing) if not name.startswith("_")):
            value = getattr(thing, name)
            assert not any(value is door for door in doors)
            assert "revision" not in name
            assert "locator" not in name

    for door in doors:
        assert next(iter(inspect.signature(door).parameters)) == "room"


@attrs.define
class Raw:
    """Sends witnesses of one Job past the walk."""

    room: Room
    store: Store

    async def code(self, job_id: RunId, **values: UUID | None) -> str:
        mutation = AppendWitnesses(room="main", epoch=self.room.epoch, id=job_id, at=self.room.now_micros(), **values)
        with pytest.raises(WriteRefusedError) as refused:
            await self.store.write(mutation)
        return refused.value.code


def named(job_id: RunId) -> dict[str, UUID]:
    return {
        "family": witness_id(WitnessStage.FAMILY_RETURN, job_id),
        "core": witness_id(WitnessStage.CORE_CLEANUP, job_id),
        "adapter": witness_id(WitnessStage.ADAPTER_CLEANUP, job_id),
    }


async def test_every_store_refuses_witnesses_out_of_order(store: Store) -> None:
    """J-34: another value, core after the end, the adapter before core or before the end: each refused, no change."""
    go_on = {name: trio.Event() for name in ("core", "adapter")}
    reached = {name: trio.Event() for name in ("core", "adapter")}

    async def core(_: Outcome[str]) -> None:
        reached["core"].set()
        await go_on["core"].wait()

    async def adapter(_: Outcome[str]) -> None:
        reached["adapter"].set()
        await go_on["adapter"].wait()

    async with open_room(store, name="main") as room:
        raw = Raw(room, store)
        job = await start_job(room, give, before_finish=core, on_settled=adapter)
        plain = await room.start(give)
        await plain.outcome()
        mine = named(job.id)
        await reached["core"].wait()
        assert await raw.code(job.id, core=mine["adapter"]) == "witness-invalid"
        assert await raw.code(job.id, core=named(plain.id)["core"]) == "witness-invalid"
        assert await raw.code(job.id, adapter=mine["adapter"]) == "adapter-order"
        assert await raw.code(job.id, core=mine["core"], adapter=mine["adapter"]) == "adapter-order"
        assert await raw.code(plain.id, core=named(plain.id)["core"]) == "witness-late"
        assert (await row_of(store, job.id)).job_core_cleanup_ack is None
        go_on["core"].set()
        await reached["adapter"].wait()
        terminal = await row_of(store, job.id)
        go_on["adapter"].set()
        await job.outcome()
        settled = await row_of(store, job.id)
        bare = await start_without_witnesses(room, store)
        assert await raw.code(bare, core=named(bare)["core"]) == "witness-late"
        assert await raw.code(bare, family=named(bare)["family"]) == "witness-late"
        assert await raw.code(bare, adapter=named(bare)["adapter"]) == "adapter-order"
        report = await observe_settlement(room, bare)
        view = await get_job(room, bare)

    assert (terminal.status, terminal.job_adapter_cleanup_ack) == (RunStatus.COMPLETED, None)
    assert (settled.family_return_ack, settled.job_core_cleanup_ack, settled.job_adapter_cleanup_ack) == (
        mine["family"],
        mine["core"],
        mine["adapter"],
    )
    assert (witnesses(report), report.settled) == (ALL_ABSENT, False)
    assert view is not None
    assert (view.status, view.settled) == (RunStatus.COMPLETED, False)


async def start_without_witnesses(room: Room, store: Store) -> RunId:
    """Write a Job's row that ended without any witness, as an older program might have."""
    now = room.now_micros()
    job_id = room.new_run_id()
    await store.write(
        AdmitRun(
            room="main",
            epoch=room.epoch,
            incarnation=room.incarnation,
            id=job_id,
            kind="job",
            actor="local",
            parent_id=None,
            trigger_id=None,
            provenance="{}",
            family_version=1,
            created_at=now,
            started_at=now,
            job_version=1,
        )
    )
    await store.write(
        FinishRun(
            room="main",
            epoch=room.epoch,
            id=job_id,
            status="completed",
            reason=None,
            error=None,
            ended_at=now,
            family_returned=False,
        )
    )
    return job_id


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("UPDATE runs SET job_core_cleanup_ack = NULL WHERE id = ?", "witness-fence"),
        ("UPDATE runs SET job_adapter_cleanup_ack = 'x' WHERE id = ?", "witness-fence"),
        ("UPDATE runs SET family_return_ack = NULL WHERE id = ?", "witness-fence"),
        (BEGIN_WITH.format("family_return_ack"), "witness-at-admission"),
        (BEGIN_WITH.format("job_core_cleanup_ack"), "witness-at-admission"),
        (BEGIN_WITH.format("job_adapter_cleanup_ack"), "witness-at-admission"),
    ],
)
async def test_the_file_keeps_a_settled_jobs_witnesses(tmp_path: Path, statement: str, code: str) -> None:
    """J-34: raw SQL can neither change nor remove a witness of a settled Job, nor begin a row with one."""
    path = tmp_path / "jobs.db"
    async with open_room(path, name="main") as room:
        job = await start_job(room, give)
        await job.outcome()
    connection = apsw.Connection(str(path))
    try:
        with pytest.raises(apsw.ConstraintError, match=code):
            connection.execute(statement, (str(job.id),))
    finally:
        connection.close()


async def test_a_witness_can_be_computed_again_and_another_value_proves_nothing(tmp_path: Path) -> None:
    """J-35: the stored witnesses are those of Job and stage; one planted in the file is invalid, so unsettled."""
    path = tmp_path / "jobs.db"
    async with open_room(path, name="main") as room:
        job = await start_job(room, give)
        await job.outcome()
        row = await row_of(room.store, job.id) if room.store is not None else None
    assert row is not None
    assert (row.family_return_ack, row.job_core_cleanup_ack, row.job_adapter_cleanup_ack) == tuple(
        named(job.id).values()
    )
    connection = apsw.Connection(str(path))
    try:
        triggers = list(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
        for name, _ in triggers:
            connection.execute(f'DROP TRIGGER "{name}"')
        connection.execute("UPDATE runs SET job_core_cleanup_ack = ? WHERE id = ?", (str(UUID(int=7)), str(job.id)))
        for _, text in triggers:
            connection.execute(str(text))
    finally:
        connection.close()
    async with open_room(path, name="main") as room:
        report = await observe_settlement(room, job.id)
        view = await get_job(room, job.id)

    assert witnesses(report) == (WitnessFact.VALID, WitnessFact.INVALID, WitnessFact.VALID)
    assert (report.lease, report.owner) == (Presence.ABSENT, Presence.ABSENT)
    assert not report.settled
    assert view is not None
    assert not view.settled


@pytest.mark.parametrize("stage", [Stage.CORE_ACK, Stage.ADAPTER_ACK, Stage.DONE])
async def test_the_next_owner_tells_how_far_the_last_one_came(reopen: Callable[[], Store], stage: Stage) -> None:
    """J-38, J-39, J-40: an end between a callback and its acknowledgement is unknown for ever; after both it is not."""
    adapter = Adapter()
    async with FaultyStore(reopen()) as store:
        if stage is not Stage.DONE:
            store.fail(1 if stage is Stage.CORE_ACK else 2, Fault.REFUSED, of=AppendWitnesses)
        async with open_main(store) as room:
            job = await adapter.start(room, give)
            view = await job.wait_done_or_held()
            abandon_held(room)
    calls = list(adapter.calls)
    seen: list[tuple[RunRecord, SettlementReport]] = []
    for _ in range(2):
        async with FaultyStore(reopen()) as store, open_room(store, name="main") as room:
            seen.append((await row_of(store, job.id), await observe_settlement(room, job.id)))
    (row, report), again = seen

    assert (view.stage, view.cleanup_required) == (stage, stage is not Stage.DONE)
    assert again == (row, report)
    assert adapter.calls == calls == (["core"] if stage is Stage.CORE_ACK else ["core", "adapter"])
    assert (report.lease, report.owner) == (Presence.ABSENT, Presence.ABSENT)
    assert report.settled == (stage is Stage.DONE)
    if stage is Stage.CORE_ACK:
        assert (row.status, row.reason, witnesses(report)) == (RunStatus.FAILED, "orphaned", ALL_ABSENT)
    else:
        present = WitnessFact.VALID if stage is Stage.DONE else WitnessFact.ABSENT
        assert (row.status, witnesses(report)) == (RunStatus.COMPLETED, (WitnessFact.VALID, WitnessFact.VALID, present))


async def test_a_failed_child_leaves_its_parents_evidence_whole(store: Store) -> None:
    """J-36: witnesses are of boundaries that were passed, not of success: the child is still failed."""
    children: list[RunId] = []

    async def work(run: Run[None]) -> None:
        children.append((await run.start_child(fail)).id)

    async with open_room(store, name="main") as room:
        job = await start_job(room, work)
        await job.outcome()
        report = await observe_settlement(room, job.id)
        child = await row_of(store, children[0])
        opened = [await get_job(room, RunId(value)) for value in named(job.id).values()]

    assert (witnesses(report), report.settled) == (ALL_VALID, True)
    assert child.status is RunStatus.FAILED
    assert opened == [None, None, None]


async def test_settled_is_seen_after_done_only_and_then_always(store: Store, sweep: Sweep) -> None:
    """J-37: observed after any step of its life, a Job is settled only once it is done, and from then on always."""

    async def scenario(steps: Steps) -> None:
        seen: list[tuple[Stage, SettlementReport]] = []

        async def observe() -> None:
            await go.wait()
            for _ in range(5):
                before = job.view().stage
                report = await observe_settlement(room, job.id)
                assert before is not None
                seen.append((before, report))

        go = trio.Event()
        async with open_room(store, name="main") as room, trio.open_nursery() as nursery:
            job = await start_job(room, give, before_finish=pass_on, on_settled=pass_on)
            nursery.start_soon(observe)
            steps.arm(go.set)
            await job.outcome()
            go.set()
        settled = [report.settled for _, report in seen]

        assert settled == sorted(settled)
        for stage, report in seen:
            if report.settled:
                assert job.view().stage is Stage.DONE
                assert (witnesses(report), report.lease, report.owner) == (ALL_VALID, Presence.ABSENT, Presence.ABSENT)
            if stage is Stage.DONE:
                assert report.settled

    assert await sweep(scenario) > 10


async def test_each_fact_stands_apart_at_each_stage(store: Store) -> None:
    """J-37: at work, in core, after the core witness and in the adapter, an observation says exactly what is there."""
    reports: dict[str, SettlementReport] = {}
    jobs: list[Job[str]] = []

    async def look(name: str) -> None:
        reports[name] = await observe_settlement(room, jobs[0].id)

    async def work(_: Run[str]) -> str:
        await started.wait()
        await look("work")
        return "value"

    async def core(_: Outcome[str]) -> None:
        await look("core")

    async def adapter(_: Outcome[str]) -> None:
        await look("adapter")

    started = trio.Event()
    async with open_room(store, name="main") as room:
        jobs.append(await start_job(room, work, before_finish=core, on_settled=adapter))
        started.set()
        await jobs[0].outcome()
        await look("done")

    def facts(name: str) -> tuple[Any, ...]:
        report = reports[name]
        outcome = None if report.outcome is None else report.outcome.status
        return (outcome, *witnesses(report), report.lease, report.owner, report.settled)

    absent, valid = WitnessFact.ABSENT, WitnessFact.VALID
    here, gone = Presence.PRESENT, Presence.ABSENT
    assert facts("work") == (None, absent, absent, absent, here, here, False)
    assert facts("core") == (None, absent, absent, absent, here, here, False)
    assert facts("adapter") == (RunStatus.COMPLETED, valid, valid, absent, here, here, False)
    assert facts("done") == (RunStatus.COMPLETED, valid, valid, valid, gone, gone, True)


async def test_a_waiting_job_was_done_and_is_never_settled(faulty: FaultyStore) -> None:
    """J-41: a waiting Job passes every stage without the adapter's witness; it isn't terminal, so never settled."""
    called: list[RunStatus] = []

    async def adapter(outcome: Outcome[None]) -> None:
        called.append(outcome.status)

    async def work(_: Run[None]) -> None:
        await trio.lowlevel.checkpoint()
        raise RunWaiting("approval")

    async with open_room(faulty, name="main") as room:
        job = await start_job(room, work, on_settled=adapter)
        outcome = await job.outcome()
        view = job.view()
        raw = Raw(room, faulty)
        code = await raw.code(job.id, adapter=named(job.id)["adapter"])
        live = await observe_settlement(room, job.id)
    async with open_room(faulty, name="main") as room:
        report = await observe_settlement(room, job.id)

    assert (outcome.status, view.stage, view.settled, called) == (
        RunStatus.WAITING,
        Stage.DONE,
        False,
        [RunStatus.WAITING],
    )
    assert code == "adapter-order"
    assert witnesses(report) == (WitnessFact.VALID, WitnessFact.VALID, WitnessFact.ABSENT)
    assert (live.settled, report.settled) == (False, False)
    assert report.outcome is not None
    assert report.outcome.status is RunStatus.WAITING


async def test_a_job_is_observed_in_its_own_room(tmp_path: Path, store: Store) -> None:
    """J-42: through another room it doesn't exist; a plain Run is no Job; a reader knows no lease, so never settled."""
    async with open_room(store, name="main") as room, open_room(store, name="other") as other:
        job = await start_job(room, give)
        plain = await room.start(give)
        await job.outcome()
        await plain.outcome()
        hot = await observe_settlement(room, job.id)
        for place, job_id in ((other, job.id), (room, plain.id), (room, room.new_run_id())):
            with pytest.raises(JobNotFoundError):
                await observe_settlement(place, job_id)
            assert await get_job(place, job_id) is None
        async with open_reader(store, name="main") as reader:
            cold = await observe_settlement(reader, job.id)
            view = await get_job(reader, job.id)
            page = await list_jobs(reader)

    assert (hot.settled, cold.settled) == (True, False)
    assert (cold.lease, cold.owner) == (Presence.UNKNOWN, Presence.UNKNOWN)
    assert witnesses(cold) == ALL_VALID
    assert view is not None
    assert (view.settled, view.stage) == (False, None)
    assert [seen.id for seen in page.jobs] == [job.id]


async def test_settled_jobs_stay(store: Store) -> None:
    """J-47: a year and a restart later every row is there, still settled; nothing removes what is old."""
    clock = ManualWallClock()
    async with open_room(store, name="main", wall_clock=clock) as room:
        jobs = [await start_job(room, give, key=f"k{number}") for number in range(3)]
        for job in jobs:
            await job.outcome()
        before = [await row_of(store, job.id) for job in jobs]
    clock.advance(365 * 24 * 3600)
    async with open_room(store, name="main", wall_clock=clock) as room:
        after = [await row_of(store, job.id) for job in jobs]
        settled = [(await observe_settlement(room, job.id)).settled for job in jobs]
        page = await list_jobs(room)

    assert after == before
    assert settled == [True, True, True]
    assert {view.id for view in page.jobs} == {job.id for job in jobs}


async def test_a_retried_adapter_keeps_the_observation_unsettled_until_done(faulty: FaultyStore) -> None:
    """J-37: a hold after the outcome keeps the Job unsettled however often it is observed."""
    errors = [ValueError("one"), ValueError("two")]

    async def adapter(_: Outcome[str]) -> None:
        if errors:
            raise errors.pop()

    async with open_room(faulty, name="main") as room:
        job = await start_job(room, give, on_settled=adapter)
        while not (view := await job.wait_done_or_held()).settled:
            assert view.cleanup_stage is Stage.ADAPTER
            assert not (await observe_settlement(room, job.id)).settled
            try:
                await recover(room, recovery_state(room, job.id).locator, "retry")
            except StageHeldError:
                assert errors == []
            await trio.lowlevel.checkpoint()

        assert (await observe_settlement(room, job.id)).settled
