"""Preparations, stores and operators that misbehave: whatever they do, nothing is lost, and what is held has a name."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AdmissionError,
    AdmissionUncertainError,
    ConstructionOwnerUnavailableError,
    InvalidRecordError,
    NotConstructedError,
    PreparationError,
    RoomOwnershipLostError,
    SpindelError,
    WriteRefusedError,
)
from spindel.operator import abandon_held, reconcile_settlement
from spindel.runs import (
    Acquisition,
    Disposal,
    LeaseFacts,
    LeasePhase,
    Preparation,
    Room,
    Run,
    observe_settlement,
    open_room,
)
from spindel.store import AdmitRun, Confirmation, FenceAdmission, FinishRun, RecordDisposal, RunStatus
from spindel.testing.clocks import ManualWallClock
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.ids import RunId


@attrs.frozen
class Does(Preparation[Any]):
    """Constructs as a test says."""

    fn: Callable[[RunId, Acquisition], Awaitable[Any]]

    async def construct(self, run_id: RunId, acquisition: Acquisition) -> Any:
        return await self.fn(run_id, acquisition)


async def nothing(run: Run[Any]) -> None:
    await trio.lowlevel.checkpoint()


async def parent_of(run: Run[Any], preparation: Preparation[Any], kept: list[AdmissionError]) -> None:
    try:
        await run.start_child(nothing, prepare=preparation)
    except AdmissionError as error:
        kept.append(error)


async def facts_of(room: Room, run_id: RunId) -> LeaseFacts:
    facts = (await observe_settlement(room, run_id)).admission
    assert facts is not None
    return facts


async def retry(room: Room, run_id: RunId, action: Any = "retry") -> LeaseFacts:
    facts = await facts_of(room, run_id)
    assert facts.revision is not None
    return await reconcile_settlement(
        room, run_id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision, action=action
    )


async def test_another_rooms_loss_in_a_disposal_is_an_error_like_any(faulty: FaultyStore) -> None:
    """R-60: a disposal that raises the loss of another room holds; this room is not lost, and no witness is minted."""
    problems: list[Exception] = [RoomOwnershipLostError("other", 1)]

    async def dispose() -> Disposal:
        if problems:
            raise problems.pop()
        return Disposal.DISCARDED

    async def construct(run_id: RunId, acquisition: Acquisition) -> None:
        acquisition.begin("thing", dispose)
        raise ValueError

    kept: list[AdmissionError] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(parent_of, Does(construct), kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        early = await room.load(run.id)
        await retry(room, hold.run_id)
        await run.result()

    assert (hold.phase, hold.code) == ("disposing", "RoomOwnershipLostError")
    assert early is not None
    assert (early.status, early.family_return_ack) == (RunStatus.RUNNING, None)
    assert isinstance(kept[0], PreparationError)
    assert kept[0].held


class TalkativeError(SpindelError):
    """Made by a callback, with a code that is no code."""

    def __init__(self, code: object) -> None:
        self.code = code
        super().__init__("whatever")


@pytest.mark.parametrize("code", ["a secret", "x" * 65, "", "Upper", 7, None, "line\n"])
async def test_only_a_proper_code_is_shown(faulty: FaultyStore, code: object) -> None:
    """R-85: a code is 1 to 64 of `[a-z0-9-]`; an error that carries anything else is named by its class."""

    async def publish(_: object) -> None:
        raise TalkativeError(code)

    async with open_room(faulty, name="main") as room:
        run = await room.start(nothing, publish=publish)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        facts = await facts_of(room, run.id)
        abandon_held(room)

    assert hold.code == facts.error == "TalkativeError"


async def test_a_class_can_not_be_named_without_end(faulty: FaultyStore) -> None:
    """R-85: the name of a class made at run time is cut like everything that is shown."""
    endless = type("E" * 1_000, (Exception,), {})

    async def publish(_: object) -> None:
        raise endless

    async with open_room(faulty, name="main") as room:
        await room.start(nothing, publish=publish)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        abandon_held(room)

    assert hold.code == "E" * 120


@pytest.mark.parametrize("who", ["root", "child"])
async def test_an_unaccounted_construction_is_fenced_first_and_then_held(faulty: FaultyStore, who: str) -> None:
    """R-54, R-67: an uncertain row is fenced even if nobody can dispose what was made; only a child's stays held."""

    async def construct(run_id: RunId, acquisition: Acquisition) -> str:
        return "made without a word"

    faulty.fail(1 if who == "root" else 2, Fault.LATE, of=AdmitRun)
    kept: list[AdmissionError] = []
    async with open_room(faulty, name="main") as room:
        if who == "root":
            with pytest.raises(AdmissionUncertainError) as caught:
                await room.start(nothing, prepare=Does(construct))
            run_id = caught.value.run_id
            assert caught.value.fenced
        else:
            await room.start(parent_of, Does(construct), kept)
            await wait_all_tasks_blocked()
            run_id = kept[0].run_id  # type: ignore[attr-defined]
            after = await retry(room, run_id)
            assert (after.held, after.error) == (True, "construction-owner-unavailable")
            with pytest.raises(ConstructionOwnerUnavailableError):
                await retry(room, run_id)
        (late,) = await faulty.arrive()
        row = await room.load(run_id)
        abandon_held(room)

    assert isinstance(late, WriteRefusedError)
    assert late.code == "terminal-fence"
    assert row is not None
    assert (row.status, row.reason, row.admission_disposal) == (RunStatus.FAILED, "admission-failed", None)


async def test_an_effect_after_the_construction_is_refused_before_it_happens(faulty: FaultyStore) -> None:
    """R-60: `begin` after construct has ended is refused, so no owner can be missed by the disposal."""
    late: list[type[BaseException]] = []

    async def construct(run_id: RunId, acquisition: Acquisition) -> None:
        async def dispose() -> Disposal:
            try:
                acquisition.begin("another", dispose)
            except RuntimeError as error:
                late.append(type(error))
            return Disposal.DISCARDED

        acquisition.begin("thing", dispose)
        raise ValueError

    kept: list[AdmissionError] = []
    async with open_room(faulty, name="main") as room:
        await (await room.start(parent_of, Does(construct), kept)).result()

    assert late == [RuntimeError]


async def test_an_uncallable_disposal_is_refused_when_it_is_announced(faulty: FaultyStore) -> None:
    """R-08: `begin` refuses what could never be called, before the effect."""

    async def construct(run_id: RunId, acquisition: Acquisition) -> None:
        acquisition.nothing()
        acquisition.begin("thing", "not a function")  # type: ignore[arg-type]

    kept: list[AdmissionError] = []
    async with open_room(faulty, name="main") as room:
        await (await room.start(parent_of, Does(construct), kept)).result()

    assert isinstance(kept[0].__cause__, InvalidRecordError)


async def test_a_reading_that_breaks_down_says_nothing(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-56: whatever a confirming read raises, the admission is held by name and can be fenced."""
    faulty.fail(2, Fault.BEFORE, of=AdmitRun)

    async def broken(mutation: object) -> Confirmation:
        raise OSError("the reader is gone")

    async def construct(run_id: RunId, acquisition: Acquisition) -> None:
        acquisition.nothing()

    monkeypatch.setattr(faulty, "confirm", broken)
    kept: list[AdmissionError] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(parent_of, Does(construct), kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        after = await retry(room, hold.run_id)
        await run.result()

    assert hold.phase == "starting"
    assert after.phase is LeasePhase.RELEASED


async def test_an_unknown_action_is_refused(faulty: FaultyStore) -> None:
    """R-62: an action that is neither retry nor acknowledge is refused, instead of being taken for a retry."""
    calls: list[int] = []

    async def publish(_: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError

    async with open_room(faulty, name="main") as room:
        run = await room.start(nothing, publish=publish)
        await run.wait_returned()
        await wait_all_tasks_blocked()
        with pytest.raises(InvalidRecordError, match="action"):
            await retry(room, run.id, action="acknowlege")
        assert calls == [1]
        await retry(room, run.id)

    assert calls == [1, 1]


async def test_abandoning_leaves_a_recovery_under_way_to_its_end(faulty: FaultyStore) -> None:
    """R-63: a claimed hold is its recovery's; `abandon_held` meanwhile gives up only what nobody is working on."""
    entered, go_on = trio.Event(), trio.Event()

    async def dispose() -> Disposal:
        entered.set()
        await go_on.wait()
        return Disposal.DISCARDED

    async def construct(run_id: RunId, acquisition: Acquisition) -> None:
        acquisition.begin("thing", dispose)

    faulty.fail(2, Fault.BEFORE, of=AdmitRun)
    kept: list[AdmissionError] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(parent_of, Does(construct), kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(retry, room, hold.run_id)
            await entered.wait()
            given_up = abandon_held(room)
            go_on.set()
        await run.result()

    assert given_up == ()
    assert len(faulty.written(RecordDisposal)) == 1


async def test_a_reservation_is_for_one_block(faulty: FaultyStore) -> None:
    """R-38: entering a reservation twice is refused, and the first lease goes with its block."""

    async def body(run: Run[None]) -> None:
        reservation = run.reserve()
        with reservation, pytest.raises(RuntimeError, match="one block"):
            reservation.__enter__()

    async with open_room(faulty, name="main") as room:
        await (await room.start(body)).result()

        assert room.live() == ()


async def test_a_block_left_inside_the_construction_leaves_no_lease(faulty: FaultyStore) -> None:
    """R-39: a reserve block that is left while its construction refuses drops the lease all the same."""

    async def body(run: Run[None]) -> None:
        with ExitStack() as stack:
            token = stack.enter_context(run.reserve())

            async def construct(run_id: RunId, acquisition: Acquisition) -> None:
                stack.close()
                raise NotConstructedError

            with pytest.raises(NotConstructedError):
                await run.admit(token, nothing, prepare=Does(construct))

    async with open_room(faulty, name="main") as room:
        await (await room.start(body)).result()


async def test_waits_inside_a_construction_that_could_never_end_are_refused(faulty: FaultyStore) -> None:
    """R-47: a construction is inside its admission: it may wait neither for the parent nor for its own lease."""
    refused: list[str] = []

    async def parent(run: Run[None]) -> None:
        run.started(run)
        await trio.sleep_forever()

    async with open_room(faulty, name="main") as room:
        run = await room.start(parent)
        await run.wait_started()

        async def construct(run_id: RunId, acquisition: Acquisition) -> None:
            acquisition.nothing()
            facts = await facts_of(room, run_id)
            for wait in (run.wait_returned, lambda: run.wait_lease(facts.lease_id)):
                with pytest.raises(Exception, match="self") as caught:
                    await wait()
                refused.append(type(caught.value).__name__)

        await run.start_child(nothing, prepare=Does(construct))
        run.cancel()

    assert refused == ["WaitRefusedError"] * 2


async def test_a_hold_of_a_lost_room_keeps_nothing(faulty: FaultyStore) -> None:
    """R-12: no recovery can be stored in a lost room, so its holds end with it, and the block raises."""
    faulty.fail(1, Fault.REFUSED, of=FinishRun, transient=False, code="constraint")

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            held = await room.start(nothing)
            await wait_all_tasks_blocked()
            assert [hold.phase for hold in room.held()] == ["terminal"]
            faulty.lose("main")
            await room.start(nothing)
            del held

    with trio.fail_after(10), pytest.raises((RoomOwnershipLostError, AdmissionError)):
        await scenario()

    assert faulty.written(FenceAdmission) == []


async def test_a_preparation_that_fails_in_a_lost_room_is_told_and_not_held(faulty: FaultyStore) -> None:
    """R-12: its fence can't be stored any more, so no operator could finish it; the error says that nothing is held."""

    async def dispose() -> Disposal:
        raise AssertionError("nothing is disposed before its fence")

    async def construct(run_id: RunId, acquisition: Acquisition) -> None:
        acquisition.begin("thing", dispose)
        faulty.lose("main")
        raise ValueError

    kept: list[AdmissionError] = []

    async def scenario() -> None:
        async with open_room(faulty, name="main") as room:
            run = await room.start(parent_of, Does(construct), kept)
            await run.result()

    with pytest.raises(RoomOwnershipLostError):
        await scenario()

    (error,) = kept
    assert isinstance(error, PreparationError)
    assert (error.disposal, error.held) == (None, False)


async def test_a_row_is_dated_when_it_is_issued_not_when_its_preparation_began(faulty: FaultyStore) -> None:
    """R-37: `created_at` is the admission's begin; `started_at` comes after whatever was constructed meanwhile."""
    wall = ManualWallClock()

    async def construct(run_id: RunId, acquisition: Acquisition) -> None:
        acquisition.nothing()
        wall.advance(7)

    async with open_room(faulty, name="main", wall_clock=wall) as room:
        run = await room.start(nothing, prepare=Does(construct))
        await run.result()
        row = await room.load(run.id)

    assert row is not None
    assert row.started_at - row.created_at == 7_000_000
