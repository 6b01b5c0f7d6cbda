"""Witnesses and settlement: what a family's return proves, and what an observer may conclude from a row."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import RunWaiting
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.operator import abandon_held
from spindel.runs import (
    Child,
    Finishing,
    LaunchKind,
    LeaseFacts,
    LeasePhase,
    Outcome,
    Presence,
    Publication,
    Room,
    RoomReader,
    Run,
    SettlementReport,
    TerminalOutcome,
    WitnessFact,
    observe_settlement,
    open_room,
    prepare,
)
from spindel.runs._entry import FamilyState
from spindel.runs._settlement import _Live, _report
from spindel.store import (
    AdmitRun,
    AppendWitnesses,
    FenceAdmission,
    FinishRun,
    MemoryStore,
    RoomClaim,
    RunRecord,
    RunStatus,
)
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spindel.observe import RoomEvent
    from spindel.store import Mutation, Store

EXAMPLE: Final = RunId(UUID("00000000-0000-4000-8000-000000000001"))
SECRET: Final = "secret-token"
STAGES: Final = {
    "family": WitnessStage.FAMILY_RETURN,
    "core": WitnessStage.CORE_CLEANUP,
    "adapter": WitnessStage.ADAPTER_CLEANUP,
}


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


async def row_of(room: Room, run: Run[Any]) -> RunRecord:
    record = await room.load(run.id)
    assert record is not None
    return record


# -- witnesses -------------------------------------------------------------------------------------------------------


def test_witnesses_of_the_example_have_the_agreed_values() -> None:
    """R-77: anybody can compute them."""
    assert {stage.value: str(witness_id(stage, EXAMPLE)) for stage in WitnessStage} == {
        "family-return": "5facb6b4-ca34-5e42-a1af-0724f1e194d8",
        "core-cleanup": "99ddd28c-f6f5-5d0b-8392-c154a2131492",
        "adapter-cleanup": "13977513-016c-5db2-b000-9f70fa40f817",
    }


async def test_a_plain_run_has_its_witness_in_the_write_of_its_outcome(faulty: FaultyStore) -> None:
    """R-77: one write carries both; a plain Run has no other witness."""
    async with open_room(faulty, name="r") as room:
        run = await room.start(give, run_id=EXAMPLE)
        await run.wait_returned()
        record = await row_of(room, run)

    (finish,) = faulty.written(FinishRun)
    assert isinstance(finish, FinishRun)
    assert finish.family_returned
    assert faulty.written(AppendWitnesses) == []
    assert str(record.family_return_ack) == "5facb6b4-ca34-5e42-a1af-0724f1e194d8"
    assert (record.job_core_cleanup_ack, record.job_adapter_cleanup_ack) == (None, None)


async def test_a_witness_whose_write_fails_is_repeated_and_nothing_is_called_again(faulty: FaultyStore) -> None:
    """R-81: lost before, then after its commit: the identical write again, and no callback twice."""
    called: list[object] = []

    async def publish(outcome: Outcome[Any]) -> None:
        called.append(outcome.value)

    async def body(_: Run[int]) -> int:
        called.append("body")
        return 7

    faulty.fail(1, Fault.BEFORE, of=FinishRun)
    faulty.fail(2, Fault.LOST_REPLY, of=FinishRun)
    async with open_room(faulty, name="r") as room:
        run = await room.start(body, publish=publish)
        await run.wait_returned()
        record = await row_of(room, run)

    first, *repeats = faulty.written(FinishRun)
    assert len(repeats) == 2
    assert all(repeat is first for repeat in repeats)
    assert record.family_return_ack == witness_id(WitnessStage.FAMILY_RETURN, run.id)
    assert called == ["body", 7]


@pytest.mark.parametrize("version", [None, 0, 2])
async def test_an_owner_without_a_supported_family_state_mints_no_witness(
    faulty: FaultyStore, version: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R-79: no family state, an older or a newer one: the Run ends without a witness, logged, never settled."""
    monkeypatch.setattr("spindel.runs._entry.FAMILY_VERSION", version)

    async def parent(run: Run[None]) -> None:
        await run.start_child(give)

    async with open_room(faulty, name="r") as room:
        run = await room.start(parent)
        with caplog.at_level(logging.WARNING, logger="spindel.runs"):
            await run.wait_returned()
        record = await row_of(room, run)
        report = await observe_settlement(room, run.id)

    assert record.status is RunStatus.COMPLETED
    assert record.family_version == version
    assert record.family_return_ack is None
    assert report.family is WitnessFact.ABSENT
    assert not report.settled
    assert any(str(run.id) in message for message in caplog.messages)


# -- what must have come back ----------------------------------------------------------------------------------------


class Patient:
    """Keeps the execution lease after the outcome was stored, until it is told to let go."""

    def __init__(self) -> None:
        self.stored = trio.Event()
        self.let_go = trio.Event()

    async def finish(self, finishing: Finishing) -> None:
        await finishing.join()
        await finishing.persist_outcome()
        self.stored.set()
        await self.let_go.wait()
        finishing.release_lease()


@attrs.frozen
class Owed:
    """A parent, something that its family owes, and what brings that back."""

    room: Room
    parent: Run[None]
    store: FaultyStore
    nursery: trio.Nursery

    async def admission(self) -> Callable[[], object]:
        held = self.store.hold(of=AdmitRun)

        async def start() -> None:
            await self.parent.start_child(give)

        self.nursery.start_soon(start)
        await held.wait_reached()
        return held.release

    async def callback(self) -> Callable[[], object]:
        block = self.parent.reserve()
        token = block.__enter__()
        child = await self.parent.admit(token, give)
        await child.wait_returned()
        return lambda: block.__exit__(None, None, None)

    async def preparation(self) -> Callable[[], object]:
        constructed = trio.Event()

        async def start() -> None:
            await self.parent.start_child(give, prepare=prepare(constructed.wait))

        self.nursery.start_soon(start)
        await wait_all_tasks_blocked()
        return constructed.set

    async def child(self) -> Callable[[], object]:
        done = trio.Event()
        await self.parent.start_child(wait_for, done)
        return done.set

    async def publication(self) -> Callable[[], object]:
        published = trio.Event()

        async def publish(_: Outcome[Any]) -> None:
            await published.wait()

        child = await self.parent.start_child(give, publish=publish)
        await child.wait_returned()
        return published.set


PHASES: Final = {
    "admission": LeasePhase.STARTING,
    "callback": LeasePhase.RETURNED,
    "preparation": LeasePhase.PREPARING,
    "child": LeasePhase.ADMITTED,
    "publication": LeasePhase.PUBLISHING,
}


@pytest.mark.parametrize("what", PHASES)
async def test_there_is_no_witness_while_anything_of_the_family_is_open(faulty: FaultyStore, what: str) -> None:
    """R-78: one open obligation keeps the witness away; then it is there, while the Run's own lease is still held."""
    stop, patient = trio.Event(), Patient()
    async with open_room(faulty, name="r") as room, trio.open_nursery() as nursery:
        parent = await room.start(wait_for, stop, finisher=patient)
        bring_back = await getattr(Owed(room, parent, faulty, nursery), what)()
        stop.set()
        await wait_all_tasks_blocked()
        before, record = await observe_settlement(room, parent.id), await row_of(room, parent)
        bring_back()
        await patient.stored.wait()
        witnessed = await observe_settlement(room, parent.id)
        patient.let_go.set()
        await parent.wait_returned()
        after = await observe_settlement(room, parent.id)

    assert [lease.phase for lease in before.leases] == [PHASES[what]]
    assert (before.outcome, before.family, before.lease) == (None, WitnessFact.ABSENT, Presence.PRESENT)
    assert record.family_return_ack is None
    assert not before.settled
    assert witnessed.outcome is not None
    assert (witnessed.family, witnessed.lease) == (WitnessFact.VALID, Presence.PRESENT)
    assert witnessed.leases == ()
    assert not witnessed.settled
    assert (after.family, after.lease) == (WitnessFact.VALID, Presence.ABSENT)
    assert after.settled


async def test_a_lease_goes_after_all_that_it_refers_to(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-78: when the family counts a lease as returned, it refers to nothing any more; only then is there a witness."""
    dropped: list[tuple[object, ...]] = []
    drop = FamilyState.drop

    def looking_drop(family: FamilyState, key: int) -> None:
        lease = family.leases[key]
        dropped.append((lease.admission, lease.publish, lease.home, lease.custody, lease.fn, lease.scope))
        assert faulty.written(FinishRun)[-1].identity[1] == str(lease.run_id)
        drop(family, key)

    async def publish(_: Outcome[Any]) -> None:
        pass

    async def parent(run: Run[None]) -> None:
        await run.start_child(give, publish=publish, prepare=prepare(trio.lowlevel.checkpoint))

    monkeypatch.setattr(FamilyState, "drop", looking_drop)
    async with open_room(faulty, name="r") as room:
        await (await room.start(parent)).wait_returned()

    assert dropped == [(None,) * 6] * 2


async def test_a_waiting_run_has_a_witness_and_is_not_settled(store: Store) -> None:
    """R-35, R-83: its family has returned, but its end is no terminal one."""

    async def pause(_: Run[None]) -> None:
        raise RunWaiting("approval")

    async with open_room(store, name="r") as room:
        run = await room.start(pause)
        await run.wait_returned()
        report = await observe_settlement(room, run.id)

    assert report.outcome == TerminalOutcome(RunStatus.WAITING, "approval", None)
    assert (report.family, report.lease) == (WitnessFact.VALID, Presence.ABSENT)
    assert not report.settled


# -- every combination -----------------------------------------------------------------------------------------------


class Scripted(MemoryStore):
    """A store whose row of every Run is the one that the test sets."""

    row: RunRecord | None = None
    loads = 0

    def __init__(self, *, durable: bool) -> None:
        super().__init__()
        self.durable = durable

    async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        self.loads += 1
        await trio.lowlevel.checkpoint()
        return self.row


WITNESSES: Final = (WitnessFact.VALID, WitnessFact.ABSENT, WitnessFact.INVALID)
STATUSES: Final = (
    RunStatus.RUNNING,
    RunStatus.WAITING,
    RunStatus.COMPLETED,
    RunStatus.FAILED,
    RunStatus.CANCELLED,
)


def column(fact: WitnessFact, stage: str, run_id: RunId) -> UUID | None:
    if fact is WitnessFact.ABSENT:
        return None
    return witness_id(STAGES[stage], run_id) if fact is WitnessFact.VALID else UUID(int=13)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("lease", Presence)
async def test_settled_is_what_all_facts_together_say(durable: bool, lease: Presence) -> None:
    """R-83: terminal, every witness that applies, lease and owner absent, some evidence: no fact stands for another."""
    store, stop, settled = Scripted(durable=durable), trio.Event(), 0
    async with open_room(store, name="r") as room:
        live = await room.start(wait_for, stop)
        ended = await room.start(give)
        await ended.wait_returned()
        run_id = live.id if lease is Presence.PRESENT else ended.id
        observed: Room | RoomReader = RoomReader(store, "r") if lease is Presence.UNKNOWN else room
        plain = await MemoryStore.load_run(store, "r", ended.id)
        assert plain is not None
        template = attrs.evolve(plain, id=run_id)
        for status, family, core, adapter, job_version, family_version in itertools.product(
            STATUSES, WITNESSES, WITNESSES, WITNESSES, (None, 1), (None, 1)
        ):
            store.row = attrs.evolve(
                template,
                status=status,
                ended_at=5 if status.terminal else None,
                reason="why",
                family_version=family_version,
                job_version=job_version,
                family_return_ack=column(family, "family", run_id),
                job_core_cleanup_ack=column(core, "core", run_id),
                job_adapter_cleanup_ack=column(adapter, "adapter", run_id),
            )
            report = await observe_settlement(observed, run_id)
            expected = (
                status in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)
                and (family_version, family) == (1, WitnessFact.VALID)
                and (job_version is None or (core, adapter) == (WitnessFact.VALID, WitnessFact.VALID))
                and lease is Presence.ABSENT
            )

            assert report.settled == expected
            assert report.lease is lease
            assert report.owner is (Presence.UNKNOWN if lease is Presence.UNKNOWN else Presence.ABSENT)
            assert report.evidence == ("durable" if durable else "memory")
            assert report.family is (WitnessFact.ABSENT if family_version is None else family)
            assert report.core is (WitnessFact.NOT_APPLICABLE if job_version is None else core)
            assert report.adapter is (WitnessFact.NOT_APPLICABLE if job_version is None else adapter)
            if status is RunStatus.RUNNING:
                assert report.outcome is None
            else:
                assert report.outcome == TerminalOutcome(status, "why", 5 if status.terminal else None)
            settled += report.settled
        store.row = None
        unknown = await observe_settlement(observed, run_id)
        stop.set()

    # Three ends, of a plain Run with any job columns and of a Job with both witnesses.
    assert settled == (3 * (9 + 1) if lease is Presence.ABSENT else 0)
    assert (unknown.outcome, unknown.settled) == (None, False)


@pytest.mark.parametrize("owner", Presence)
@pytest.mark.parametrize("lease", Presence)
@pytest.mark.parametrize("evidence", ["durable", "memory", "none"])
async def test_neither_lease_nor_owner_nor_evidence_stands_for_another(
    lease: Presence, owner: Presence, evidence: str
) -> None:
    """R-83: a row that is all in order settles nothing while somebody may still be at it, or without evidence."""
    async with open_room(name="r") as room:
        run = await room.start(give)
        await run.wait_returned()
        row = await row_of(room, run)
    store = None if evidence == "none" else Scripted(durable=evidence == "durable")
    report = _report("r", store, run.id, row, _Live(lease, owner))

    assert report.settled == (lease is owner is Presence.ABSENT and evidence != "none")
    assert (report.lease, report.owner, report.evidence) == (lease, owner, evidence)


async def test_without_a_store_there_is_no_evidence_and_nothing_settled() -> None:
    """R-83, R-80: what left no row proves nothing, however well it ended."""
    stop = trio.Event()
    async with open_room(name="r", durable=False) as room:
        run = await room.start(wait_for, stop)
        live = await observe_settlement(room, run.id)
        stop.set()
        await run.wait_returned()
        ended = await observe_settlement(room, run.id)

    assert (live.lease, live.evidence, live.outcome) == (Presence.PRESENT, "none", None)
    assert (ended.lease, ended.evidence, ended.outcome) == (Presence.ABSENT, "none", None)
    assert ended.family is WitnessFact.NOT_APPLICABLE
    assert not ended.settled


def admitted(room: str, epoch: int, number: int, *, incarnation: UUID, job: bool) -> AdmitRun:
    return AdmitRun(
        room=room,
        epoch=epoch,
        incarnation=incarnation,
        id=UUID(int=number),
        kind="run",
        actor="local",
        parent_id=None,
        trigger_id=None,
        provenance="{}",
        family_version=1,
        created_at=1,
        started_at=1,
        job_version=1 if job else None,
        job_key="key" if job else None,
        job_offer=UUID(int=99) if job else None,
    )


def finish(row: AdmitRun, status: str, *, family: bool) -> FinishRun:
    return FinishRun(
        room=row.room,
        epoch=row.epoch,
        id=row.id,
        status=status,
        reason=None,
        error=None,
        ended_at=2,
        family_returned=family,
        job_result_state="available" if row.job_version and status == "completed" else None,
    )


def witness(row: AdmitRun, *stages: str) -> AppendWitnesses:
    values = {stage: witness_id(STAGES[stage], row.id) for stage in stages}
    return AppendWitnesses(room=row.room, epoch=row.epoch, id=row.id, at=2, **values)


def histories(row: AdmitRun) -> list[tuple[list[Mutation[Any]], bool]]:
    """Give what may have been written about a Run, and whether it is settled by it."""
    if row.job_version is None:
        ends: list[tuple[list[Mutation[Any]], bool]] = [
            ([finish(row, status, family=family)], family and status != "waiting")
            for status in ("completed", "failed", "cancelled", "waiting")
            for family in (True, False)
        ]
        return [*ends, ([FenceAdmission(admission=row, error=None, ended_at=2)], False), ([], False)]
    both, end = witness(row, "core", "family"), finish(row, "completed", family=False)
    return [
        ([both, end, witness(row, "adapter")], True),
        ([both, end], False),
        ([both], False),
        ([witness(row, "core"), end, witness(row, "adapter")], False),
        ([witness(row, "family"), end], False),
        ([end], False),
        ([both, finish(row, "waiting", family=False)], False),
    ]


async def test_rows_that_are_in_a_store_are_settled_as_their_facts_say(store: Store) -> None:
    """R-83: rows written by an earlier owner, in every way that a store allows, seen by the present one and cold."""
    claim = RoomClaim("r", UUID(int=1_000), 1)
    expected: dict[RunId, bool] = {}
    async with store.claim_room(claim) as epoch:
        number = 0
        for job in (False, True):
            count = len(histories(admitted("r", epoch, 1, incarnation=claim.incarnation, job=job)))
            for index in range(count):
                number += 1
                row = admitted("r", epoch, number, incarnation=claim.incarnation, job=job)
                mutations, settled = histories(row)[index]
                for mutation in (row, *mutations):
                    await store.write(mutation)
                expected[RunId(row.id)] = settled
    async with open_room(store, name="r") as room:
        owned = {run_id: (await observe_settlement(room, run_id)).settled for run_id in expected}
        cold = {run_id: await observe_settlement(RoomReader(store, "r"), run_id) for run_id in expected}

    assert owned == expected
    assert sum(expected.values()) == 4
    assert not any(report.settled for report in cold.values())
    assert {report.evidence for report in cold.values()} == {"durable" if store.durable else "memory"}
    assert all(report.outcome is not None for report in cold.values())


async def test_live_facts_that_change_while_the_row_is_read_are_read_again() -> None:
    """R-83: a report is of one moment; the lease that went meanwhile isn't told beside the older row."""
    faulty, stop = FaultyStore(MemoryStore()), trio.Event()
    loads: list[RunId] = []

    class Slow(FaultyStore):
        async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
            loads.append(run_id)
            record = await super().load_run(room, run_id)
            stop.set()
            await wait_all_tasks_blocked()
            return record

    async with open_room(Slow(faulty.store), name="r") as room:
        run = await room.start(wait_for, stop)
        report = await observe_settlement(room, run.id)

    assert loads == [run.id, run.id]
    assert (report.lease, report.settled) == (Presence.ABSENT, True)


async def test_a_family_that_never_rests_can_not_keep_a_report_from_ending() -> None:
    """R-83: leases that change at every reading end in a report of the last one; lease and owner are still of one moment."""
    stop, loads = trio.Event(), 0
    parents: list[Run[None]] = []

    class Restless(FaultyStore):
        async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
            nonlocal loads
            loads += 1
            record = await super().load_run(room, run_id)
            await parents[0].start_child(wait_for, stop)
            return record

    async with open_room(Restless(MemoryStore()), name="r") as room:
        parents.append(await room.start(wait_for, stop))
        report = await observe_settlement(room, parents[0].id)
        stop.set()

    assert (report.lease, report.settled) == (Presence.PRESENT, False)
    assert len(report.leases) == loads <= 10


async def test_an_end_in_the_last_reading_is_read_once_more() -> None:
    """R-83: however often a family has changed, a lease that goes while the row is read isn't told beside that row."""
    stop = trio.Event()
    parents: list[Run[None]] = []
    loads: list[RunStatus] = []

    class Restless(FaultyStore):
        async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
            record = await super().load_run(room, run_id)
            assert record is not None
            loads.append(record.status)
            if len(loads) < 10:
                await parents[0].start_child(wait_for, stop)
            else:
                stop.set()
                await wait_all_tasks_blocked()
            return record

    async with open_room(Restless(MemoryStore()), name="r") as room:
        parents.append(await room.start(wait_for, stop))
        report = await observe_settlement(room, parents[0].id)

    assert loads == [RunStatus.RUNNING] * 10 + [RunStatus.COMPLETED]
    assert (report.lease, report.settled) == (Presence.ABSENT, True)


async def test_observing_writes_nothing(faulty: FaultyStore) -> None:
    """R-83: neither the owner's nor a cold observation changes anything."""
    stop = trio.Event()
    async with open_room(faulty, name="r") as room:
        run = await room.start(wait_for, stop)
        before = (len(faulty.writes), room.events.sequence)
        await observe_settlement(room, run.id)
        await observe_settlement(RoomReader(faulty, "r"), run.id)
        after = (len(faulty.writes), room.events.sequence)
        stop.set()

    assert after == before


# -- many, and nothing secret ----------------------------------------------------------------------------------------


async def test_a_report_shows_a_hundred_leases_and_counts_the_rest(store: Store) -> None:
    """R-85: of 1,000 leases 100 are shown, in the order of their admission, and 900 are counted."""
    stop = trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        children = await parent.start_children([Child(wait_for, (stop,), {})] * 1_000)
        report = await observe_settlement(room, parent.id)
        stop.set()

    assert [lease.run_id for lease in report.leases] == [child.id for child in children[:100] if isinstance(child, Run)]
    assert report.omitted == 900
    assert {lease.phase for lease in report.leases} == {LeasePhase.ADMITTED}


async def test_a_report_shows_a_hundred_launches_and_counts_the_rest(store: Store) -> None:
    """R-85: launches are bounded as leases are; those that are left out of either are counted together."""
    async with open_room(store, name="r", threads_max=1) as room:

        async def launch(run: Run[None]) -> None:
            await run.run_native(enough.wait)

        async def body(run: Run[None]) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(150):
                    nursery.start_soon(launch, run)
                await wait_all_tasks_blocked()
                reports.append(await observe_settlement(room, run.id))
                nursery.cancel_scope.cancel()
                enough.set()

        reports: list[SettlementReport] = []
        enough = threading.Event()
        await room.start(body)

    (report,) = reports
    assert len(report.launches) == 100
    assert report.omitted == 50
    assert {launch.kind for launch in report.launches} == {LaunchKind.NATIVE}


class Aloud(Exception):  # noqa: N818  its name is the point
    """An error whose message says too much."""


async def fail(*_: object) -> None:
    raise Aloud(SECRET)


def shown(things: Sequence[object]) -> str:
    return "\n".join(map(repr, things))


async def test_a_secret_in_an_error_is_in_no_fact_event_or_log(
    faulty: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """R-85: whatever fails, facts, events and logs name codes and classes, never a message."""
    stop = trio.Event()
    events: list[RoomEvent] = []
    facts: list[object] = []
    caplog.set_level(logging.DEBUG)

    def callback(_: str) -> None:
        raise Aloud(SECRET)

    class Loud:
        def __init__(self, room: Room) -> None:
            self.executor = room.pool.tasks

        def construct(self, launch: Any) -> Any:
            return self.executor.construct(launch)

        def submit(self, ticket: Any) -> None:
            if ticket.launch.kind is LaunchKind.JOIN:
                raise Aloud(SECRET)
            self.executor.submit(ticket)

    async def parent(run: Run[None]) -> None:
        await run.start_child(wait_for, stop)
        child = await run.start_child(fail, publish=fail)
        await child.wait_returned()
        faulty.fail(of=FinishRun, fault=Fault.REFUSED, times=2)

    async with open_room(faulty, name="r") as room:
        room.pool.tasks = Loud(room)
        async with room.watch() as watch:
            other = await room.start(wait_for, trio.Event())
            other.add_cancel_callback("loud", callback)
            other.cancel()
            run = await room.start(parent)
            await wait_all_tasks_blocked()
            run.cancel()
            report = await observe_settlement(room, run.id)
            facts += [report, *room.held(), room.live(), repr(run), watch.snapshot]
            facts += [await observe_settlement(room, lease.run_id) for lease in report.leases]
            held = {obligation.phase for obligation in room.held()}
            abandon_held(room)
            stop.set()
            await room.close()
            while watch._subscription._events:
                events.append(await anext(watch))

    errors = [lease.error for lease in report.leases] + [launch.error for launch in report.launches]
    assert held == {"join", "publishing"}
    assert "Aloud" in errors
    assert {event.name for event in events} >= {"run.held", "run.recovered", "run.cancel-requested", "run.finished"}
    assert any("cancel callback" in message for message in caplog.messages)
    for text in (shown(facts), shown(events), caplog.text, shown([record.__dict__ for record in caplog.records])):
        assert SECRET not in text


async def test_the_name_of_an_error_is_bounded_as_well(store: Store) -> None:
    """R-85: a fact has at most 120 characters of it."""
    long = type("E" * 500, (Exception,), {})

    async def publish(_: Outcome[Any]) -> None:
        raise long

    async with open_room(store, name="r") as room:
        run = await room.start(give, publish=publish)
        await wait_all_tasks_blocked()
        admission = (await observe_settlement(room, run.id)).admission
        abandon_held(room)

    assert admission is not None
    assert admission.error == "E" * 120


async def test_a_runs_own_admission_is_told_from_its_reservation_to_its_release(store: Store) -> None:
    """R-84: an observer finds the lease also before the Run begins and after it ended, as long as it is owed."""
    seen: list[LeaseFacts | None] = []
    published, done, stop = trio.Event(), trio.Event(), trio.Event()

    async def publish(_: Outcome[Any]) -> None:
        await published.wait()

    async with open_room(store, name="r") as room:

        async def look() -> None:
            seen.append((await observe_settlement(room, token.run_id)).admission)

        parent = await room.start(wait_for, stop)
        with parent.reserve() as token:
            await look()
            child = await parent.admit(token, wait_for, done, publish=publish)
            await look()
            done.set()
            await child.wait_returned()
            await look()
            published.set()
            await wait_all_tasks_blocked()
            await look()
        await look()
        stop.set()

    assert [(facts.phase, facts.callback_exited, facts.publication) if facts else None for facts in seen] == [
        (LeasePhase.RESERVED, False, Publication.NONE),
        (LeasePhase.ADMITTED, False, Publication.PENDING),
        (LeasePhase.PUBLISHING, False, Publication.PENDING),
        (LeasePhase.RETURNED, False, Publication.ACKNOWLEDGED),
        None,
    ]
    assert len({facts.lease_id for facts in seen if facts}) == 1
