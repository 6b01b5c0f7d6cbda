"""Interrupted anywhere, failed anywhere: every admitted Run ends in a terminal row, or is named as held."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from spindel.errors import AdmissionError, RoomOwnershipLostError, WriteRefusedError
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.observe import RunCancelRequested, RunFinished, RunStarted
from spindel.operator import abandon_held
from spindel.runs import Child, Room, RoomState, Run, open_room
from spindel.store import AdmitRun, PostgresStore, RunQuery, RunStatus, SqliteStore
from spindel.testing.faults import Fault, FaultyStore
from spindel.testing.sweep import Steps, sweep_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

    from spindel.observe import RoomEvent
    from spindel.store import RunRecord, Store


async def leaf(_: Run[str], word: str) -> str:
    await trio.lowlevel.checkpoint()
    return word


async def broken(_: Run[None]) -> None:
    await trio.lowlevel.checkpoint()
    raise ValueError("broken on purpose")


async def plain() -> None:
    try:
        await trio.sleep(1)
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.5)


async def branch(run: Run[str], word: str) -> str:
    run.start_soon(plain)
    first = await run.start_child(leaf, word)
    await run.start_child(broken)
    with run.reserve() as token:
        second = await run.admit(token, leaf, word)
    await first.outcome()
    return await second.result()


async def program(run: Run[list[str]]) -> list[str]:
    """Three levels, plain tasks, a token, a group of children, results as causes, one failure."""
    run.start_soon(plain)
    branches = await run.start_children([Child.of(branch, "a"), Child.of(branch, "b")])
    return [await child.result() for child in branches if isinstance(child, Run)]


@attrs.define
class Attempt:
    """What one attempt showed: the room, its events, and all that was ever held."""

    room: Room
    events: list[RoomEvent] = attrs.Factory(list["RoomEvent"])
    held: set[RunId] = attrs.Factory(set[RunId])
    # Whose parents the rows don't tell: a held admission may have no row.
    parents: dict[RunId, RunId] = attrs.Factory(dict[RunId, RunId])

    async def listen(self, task_status: trio.TaskStatus[None]) -> None:
        async with self.room.watch(buffer=10_000) as watch:
            task_status.started()
            async for event in watch:
                self.events.append(event)


@pytest.fixture
def names() -> Iterator[str]:
    """Name the room of each attempt, so that one store serves them all."""
    return (f"sweep-{number}" for number in count(1))


async def check(store: Store, attempt: Attempt) -> dict[RunId, RunRecord]:
    """Check what holds whatever happened; give the rows."""
    page = await store.list_runs(RunQuery(room=attempt.room.name, limit=100))
    rows = {row.id: row for row in page.runs}
    events = attempt.events
    started = [event.run_id for event in events if isinstance(event, RunStarted)]
    finished = {event.run_id: event for event in events if isinstance(event, RunFinished)}
    requested = [event.run_id for event in events if isinstance(event, RunCancelRequested)]
    parents = {row.id: row.parent_id for row in rows.values() if row.parent_id is not None} | attempt.parents
    excused = {run_id for held in attempt.held for run_id in lineage(parents, held)}

    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert len(started) == len(set(started))
    assert len(requested) == len(set(requested))
    assert attempt.room.live() == ()
    assert attempt.room.held() == ()
    assert set(started) <= set(rows), "a Run that started has a row"
    for run_id, row in rows.items():
        if run_id in excused:
            continue
        assert row.status.terminal, f"run {run_id} is {row.status} and not held"
        if row.reason == "admission-failed":
            assert run_id not in started
            continue
        assert run_id in started
        assert finished[run_id].status == row.status
        assert row.family_return_ack == witness_id(WitnessStage.FAMILY_RETURN, run_id)
        assert row.ended_at is not None
        assert row.created_at <= row.started_at <= row.ended_at <= row.updated_at
        if row.parent_id in finished:
            assert finished[run_id].sequence < finished[RunId(row.parent_id)].sequence
    return rows


def lineage(parents: dict[RunId, RunId], run_id: RunId) -> list[RunId]:
    """Give a Run and all above it: what is owed for it holds them all."""
    found = [run_id]
    while found[-1] in parents:
        found.append(parents[found[-1]])
    return found


async def check_file(store: Store) -> None:
    if isinstance(store, SqliteStore | PostgresStore):
        report = await store.check()

        assert not [finding for finding in report.findings if finding.violation]


async def cancel_everywhere(store: Store, names: Iterator[str], kind: str, *, every: int = 1) -> int:
    """Run the program and cancel it, its room or the scope around it, after each of its steps in turn."""
    statuses: set[RunStatus] = set()

    async def scenario(steps: Steps) -> None:
        scope = trio.CancelScope()
        asked = trio.Event()
        attempt: Attempt | None = None

        async def close(room: Room) -> None:
            await asked.wait()
            await room.close(grace_seconds=100)

        if kind == "scope":
            steps.arm(scope.cancel)
        async with trio.open_nursery() as nursery:
            with scope:
                async with open_room(store, name=next(names)) as room:
                    attempt = Attempt(room)
                    with trio.CancelScope(shield=True):
                        await nursery.start(attempt.listen)
                    nursery.start_soon(close, room)
                    run = await room.start(program)
                    if kind == "run":
                        steps.arm(run.cancel)
                    if kind == "close":
                        steps.arm(asked.set)
            steps.disarm()
            asked.set()
        if attempt is None:
            return
        rows = await check(store, attempt)
        statuses.update(row.status for row in rows.values())

        assert attempt.room.state is RoomState.CLOSED
        assert all(row.reason != "admission-failed" for row in rows.values())

    acted = await sweep_steps(scenario, every=every)
    await check_file(store)

    assert statuses == {RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.FAILED}
    return acted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "scope", "close"])
async def test_cancelling_at_every_step_leaves_every_run_with_a_terminal_row(
    store: Store, names: Iterator[str], kind: str, spindel_clock: MockClock
) -> None:
    """R-15, R-16, R-18, R-26, R-30, R-42, R-50, R-51: whoever cancels, wherever: each Run ends, once, in order."""
    acted = await cancel_everywhere(store, names, kind)

    assert acted > 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "scope", "close"])
async def test_a_writer_in_a_thread_changes_nothing_about_that(
    threaded: Store, names: Iterator[str], kind: str, spindel_clock: MockClock
) -> None:
    """R-18, R-30: with real writes in flight at the moment of the request, the same holds."""
    acted = await cancel_everywhere(threaded, names, kind, every=7)

    assert acted > 10


async def attend(room: Room, attempt: Attempt) -> None:
    """Give up, as an operator would, whatever is still held when nothing else goes on."""
    while True:
        await trio.sleep(1000)
        attempt.held.update(hold.run_id for hold in abandon_held(room))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "transient"),
    [(Fault.REFUSED, True), (Fault.REFUSED, False), (Fault.BEFORE, True), (Fault.LOST_REPLY, True)],
)
async def test_failing_every_write_in_turn_leaves_every_run_with_a_terminal_row_or_a_named_hold(
    store: Store, names: Iterator[str], fault: Fault, transient: bool, spindel_clock: MockClock
) -> None:
    """R-23, R-31, R-32, R-55, R-56: whichever write fails, however: each Run ends once, or is named as held."""
    ever_held: set[RunId] = set()

    for n in count(1):
        faulty = FaultyStore(store)
        plan = faulty.fail(n, fault, transient=transient)
        name = next(names)
        attempt: Attempt | None = None
        async with trio.open_nursery() as nursery:
            try:
                async with open_room(faulty, name=name) as room:
                    attempt = Attempt(room)
                    await nursery.start(attempt.listen)
                    nursery.start_soon(attend, room, attempt)
                    await room.start(program)
            except (AdmissionError, WriteRefusedError):
                # The root Run's own row, or the adoption before the gate opened.
                pass
            nursery.cancel_scope.cancel()
        if not plan.fired:
            break
        if attempt is None:
            assert n == 1, "only an adoption that is refused for good keeps the room shut"
            continue
        attempt.parents = {
            RunId(row.id): RunId(row.parent_id)
            for row in faulty.written(AdmitRun)
            if isinstance(row, AdmitRun) and row.parent_id is not None
        }
        before = await check(store, attempt)
        ever_held |= attempt.held
        async with open_room(store, name=name) as room:
            after = {row.id: row for row in (await room.list_runs(limit=100)).runs}

        assert all(row.status.terminal for row in after.values())
        assert all(after[run_id] == row for run_id, row in before.items() if row.status.terminal)
        assert all(after[run_id].reason == "orphaned" for run_id, row in before.items() if not row.status.terminal)
    await check_file(store)

    assert n > 20
    # A transient refusal and a lost reply need nobody; what may still arrive, and what is refused for good, do.
    assert bool(ever_held) == (fault is Fault.BEFORE or not transient)


@pytest.mark.slow
async def test_losing_the_room_at_every_step_ends_every_run_without_a_claim(
    store: Store, names: Iterator[str], spindel_clock: MockClock
) -> None:
    """R-12: whenever a newer owner comes, all Runs return, what wasn't stored before stays running, the block says so."""
    lost = 0

    async def scenario(steps: Steps) -> None:
        nonlocal lost
        faulty = FaultyStore(store)
        name = next(names)
        room: Room | None = None
        try:
            async with open_room(faulty, name=name) as room:
                steps.arm(lambda: faulty.lose(name))
                await room.start(program)
        except RoomOwnershipLostError:
            lost += 1
        except AdmissionError as refused:
            raise AssertionError("the block says why") from refused
        steps.disarm()
        assert room is not None
        rows = (await store.list_runs(RunQuery(room=name, limit=100))).runs
        running = {row.id for row in rows if row.status is RunStatus.RUNNING}

        assert room.live() == ()
        assert room.held() == ()
        assert (room.state is RoomState.LOST) or not running
        assert all(row.family_return_ack is None for row in rows if row.id in running)
        # Nobody claims to have ended above somebody who didn't.
        assert all(row.parent_id in running for row in rows if row.id in running and row.parent_id is not None)

    acted = await sweep_steps(scenario)
    await check_file(store)

    assert 30 < lost <= acted
