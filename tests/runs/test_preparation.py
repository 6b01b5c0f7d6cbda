"""Preparations: what is constructed before the first row, and what becomes of it if the Run never begins."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AdmissionError,
    AdmissionRefusedError,
    AdmissionUncertainError,
    ConstructionOwnerUnavailableError,
    DuplicateRunError,
    NotConstructedError,
    PreparationError,
    RunAbandonedError,
)
from spindel.operator import abandon_held, reconcile_settlement
from spindel.runs import (
    Acquisition,
    Child,
    Disposal,
    LeaseFacts,
    LeasePhase,
    Preparation,
    Room,
    Run,
    Ticket,
    observe_settlement,
    open_room,
    prepare,
)
from spindel.store import AdmitRun, FenceAdmission, RecordDisposal, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.runs import Launch

THINGS = ("workspace", "grant", "context")


class Things(Preparation[str]):
    """Takes a workspace, a grant and a context, in this order, and notes all that happens."""

    def __init__(
        self, *, fail: str | None = None, answers: dict[str, list[Any]] | None = None, log: list[str] | None = None
    ) -> None:
        self.fail = fail
        self.answers = answers or {}
        self.log: list[str] = [] if log is None else log
        self.entered = trio.Event()

    async def construct(self, run_id: RunId, acquisition: Acquisition) -> str:
        for thing in THINGS:
            self._fail_at(f"before {thing}")
            acquisition.begin(thing, partial(self._dispose, thing))
            self._fail_at(f"inside {thing}")
            self.log.append(thing)
            self._fail_at(f"after {thing}")
            if self.fail == f"sleep after {thing}":
                self.entered.set()
                await trio.sleep_forever()
        return "ready"

    async def _dispose(self, thing: str) -> Disposal:
        self.log.append(f"dispose {thing}")
        answers = self.answers.get(thing)
        answer = answers.pop(0) if answers else Disposal.DISCARDED
        if isinstance(answer, Exception):
            raise answer
        return cast("Disposal", answer)

    def _fail_at(self, place: str) -> None:
        if self.fail == place:
            raise ValueError(f"a secret about {place}")


async def body(run: Run[Any]) -> object:
    return run.resource


def disposals(log: list[str]) -> list[str]:
    return [line.removeprefix("dispose ") for line in log if line.startswith("dispose ")]


async def lease_of(room: Room, run_id: RunId) -> LeaseFacts:
    facts = (await observe_settlement(room, run_id)).admission
    assert facts is not None
    return facts


async def retry(room: Room, run_id: RunId) -> LeaseFacts:
    facts = await lease_of(room, run_id)
    assert facts.revision is not None
    return await reconcile_settlement(room, run_id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision)


async def start_failing(run: Run[Any], preparation: Preparation[Any], kept: list[BaseException]) -> None:
    try:
        await run.start_child(body, prepare=preparation)
    except AdmissionError as error:
        kept.append(error)


async def test_a_start_goes_in_the_fixed_order(faulty: FaultyStore) -> None:
    """R-37: reservation, workspace, grant, context, row and body come in this order."""
    log: list[str] = []
    things = Things(log=log)

    async def child(run: Run[Any]) -> None:
        log.append("row" if await faulty.load_run("main", run.id) else "no row")
        log.append(f"body with {run.resource}")

    async def parent(run: Run[None]) -> None:
        with run.reserve() as token:
            log.append("reserved")
            rows = await faulty.load_run("main", token.run_id)
            log.append("no row yet" if rows is None else "early row")
            await run.admit(token, child, prepare=things)

    async with open_room(faulty, name="main") as room:
        await (await room.start(parent)).result()

    assert log == ["reserved", "no row yet", "workspace", "grant", "context", "row", "body with ready"]


@pytest.mark.parametrize(
    ("place", "disposed"),
    [
        ("inside workspace", ["workspace"]),
        ("after workspace", ["workspace"]),
        ("before grant", ["workspace"]),
        ("inside grant", ["grant", "workspace"]),
        ("after grant", ["grant", "workspace"]),
        ("before context", ["grant", "workspace"]),
        ("inside context", ["context", "grant", "workspace"]),
        ("after context", ["context", "grant", "workspace"]),
    ],
)
async def test_what_was_begun_is_disposed_in_reverse(faulty: FaultyStore, place: str, disposed: list[str]) -> None:
    """R-52: a construction that fails before, inside or after an effect is undone: what was begun, in reverse."""
    things = Things(fail=place)
    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(start_failing, things, kept)
        await run.result()
    (error,) = kept

    assert isinstance(error, PreparationError)
    assert (error.disposal, error.held) == ("discarded", False)
    assert disposals(things.log) == disposed
    row = await faulty.load_run("main", error.run_id)
    assert row is not None
    assert (row.status, row.reason, row.admission_disposal) == (RunStatus.FAILED, "admission-failed", "discarded")
    assert row.error == f"ValueError: a secret about {place}"
    assert row.family_return_ack is None


async def test_nothing_declared_owes_nothing(faulty: FaultyStore) -> None:
    """R-52: a construction that fails before everything, having declared nothing, owes nothing but its fence."""

    class Declares(Preparation[None]):
        async def construct(self, run_id: RunId, acquisition: Acquisition) -> None:
            acquisition.nothing()
            raise ValueError("too early")

    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        await (await room.start(start_failing, Declares(), kept)).result()

    assert isinstance(kept[0], PreparationError)
    assert (kept[0].disposal, kept[0].held) == ("nothing", False)
    assert len(faulty.written(FenceAdmission)) == 1
    assert faulty.written(RecordDisposal) == []


async def test_refusing_before_any_effect_leaves_no_trace(faulty: FaultyStore) -> None:
    """R-39: `NotConstructedError` before any `begin` is a refusal: no row, no lease, and the family returns."""

    class Refuses(Preparation[None]):
        async def construct(self, run_id: RunId, acquisition: Acquisition) -> None:
            raise NotConstructedError("no room on the shelf")

    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(start_failing, Refuses(), kept)
        await run.result()

        assert isinstance(kept[0], NotConstructedError)
        assert [type(write).__name__ for write in faulty.written()] == ["AdoptOrphans", "AdmitRun", "FinishRun"]
        assert room.held() == ()


async def test_not_constructed_after_an_effect_is_undone_like_any_failure(faulty: FaultyStore) -> None:
    """R-52: `NotConstructedError` after a `begin` is no refusal any more: the effect is disposed."""
    log: list[str] = []

    async def dispose() -> Disposal:
        log.append("disposed")
        return Disposal.DISCARDED

    class Late(Preparation[None]):
        async def construct(self, run_id: RunId, acquisition: Acquisition) -> None:
            acquisition.begin("thing", dispose)
            raise NotConstructedError

    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        await (await room.start(start_failing, Late(), kept)).result()

    assert isinstance(kept[0], PreparationError)
    assert log == ["disposed"]


async def test_a_refused_row_disposes_without_a_fence(faulty: FaultyStore) -> None:
    """R-53: a constructed value whose row is refused is disposed; there is nothing to fence."""
    faulty.fail(2, Fault.REFUSED, of=AdmitRun, code="constraint", transient=False)
    things = Things()
    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        await (await room.start(start_failing, things, kept)).result()

    assert isinstance(kept[0], AdmissionRefusedError)
    assert kept[0].code == "constraint"
    assert disposals(things.log) == ["context", "grant", "workspace"]
    assert faulty.written(FenceAdmission) == []


async def test_effects_without_an_owner_stay_unknown_for_ever(faulty: FaultyStore) -> None:
    """R-54: effects without `begin` are held as construction-owner-unavailable; nobody can reconcile them."""

    class Secretive(Preparation[None]):
        async def construct(self, run_id: RunId, acquisition: Acquisition) -> None:
            raise ValueError("something may exist now")

    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(start_failing, Secretive(), kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        facts = await lease_of(room, hold.run_id)
        with pytest.raises(ConstructionOwnerUnavailableError):
            await retry(room, hold.run_id)
        abandon_held(room)
        with pytest.raises(RunAbandonedError):
            await run.result()

    assert (hold.phase, hold.code) == ("preparing", "construction-owner-unavailable")
    assert facts.held
    assert isinstance(kept[0], PreparationError)
    assert kept[0].held
    assert await faulty.load_run("main", hold.run_id) is None

    async with open_room(faulty, name="main") as room:
        report = await observe_settlement(room, hold.run_id)
        assert (report.outcome, report.settled, room.held()) == (None, False, ())


@pytest.mark.parametrize("answer", [Disposal.INCOMPLETE, Disposal.LOST, Disposal.GONE, None, ValueError("secret")])
async def test_only_discarded_lets_go(faulty: FaultyStore, answer: Any) -> None:
    """R-60: any other answer, or an error, holds the disposal; join and close wait; a retry calls only the rest."""
    things = Things(fail="after context", answers={"grant": [answer]})
    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(start_failing, things, kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        first = disposals(things.log)
        with trio.move_on_after(0) as waited:
            await run.wait_returned()
        after = await retry(room, hold.run_id)
        await run.result()

    assert waited.cancelled_caught
    assert hold.phase == "disposing"
    assert "secret" not in hold.code
    assert first == ["context", "grant"]
    assert disposals(things.log) == ["context", "grant", "grant", "workspace"]
    assert after.phase is LeasePhase.RELEASED
    row = await faulty.load_run("main", hold.run_id)
    assert row is not None
    assert row.admission_disposal == "discarded"


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY])
async def test_a_failed_projection_repeats_alone(faulty: FaultyStore, fault: Fault) -> None:
    """R-61: a projection that fails before or after its commit is repeated alone; nothing is disposed again."""
    faulty.fail(1, fault, of=RecordDisposal)
    things = Things(fail="inside grant")
    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(start_failing, things, kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        disposed = disposals(things.log)
        after = await retry(room, hold.run_id)
        await run.result()

    assert hold.phase == "projecting"
    assert disposed == disposals(things.log) == ["grant", "workspace"]
    first, second = faulty.written(RecordDisposal)
    assert first == second
    assert after.phase is LeasePhase.RELEASED


async def test_a_lost_disposal_answer_is_asked_for_again(faulty: FaultyStore) -> None:
    """R-61: a dispose callback whose answer was lost is idempotent and is asked again."""
    things = Things(fail="inside workspace", answers={"workspace": [ConnectionError("reply lost")]})
    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        run = await room.start(start_failing, things, kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        await retry(room, hold.run_id)
        await run.result()

    assert disposals(things.log) == ["workspace", "workspace"]


async def test_a_cancelled_construction_is_undone_and_the_cancel_goes_on(faulty: FaultyStore) -> None:
    """R-42: cancelled in construct, what was begun is disposed before `Cancelled` goes on."""
    things = Things(fail="sleep after grant")

    async def parent(run: Run[None]) -> None:
        await run.start_child(body, prepare=things)

    async with open_room(faulty, name="main") as room:
        run = await room.start(parent)
        await things.entered.wait()
        run.cancel()
        outcome = await run.outcome()

    assert outcome.status is RunStatus.CANCELLED
    assert disposals(things.log) == ["grant", "workspace"]
    (fence,) = faulty.written(FenceAdmission)
    row = await faulty.load_run("main", fence.admission.id)  # type: ignore[attr-defined]
    assert row is not None
    assert (row.reason, row.error, row.admission_disposal) == ("admission-failed", "cancelled", "discarded")


async def test_a_group_with_preparations_decides_each(faulty: FaultyStore) -> None:
    """R-52: in a group, a child whose construction fails takes its own place; the others are admitted."""
    good, bad = Things(), Things(fail="inside grant")
    kept: list[Any] = []

    async def parent(run: Run[None]) -> None:
        children: list[Child[Any]] = [Child.of(body, prepare=good), Child.of(body, prepare=bad), Child.of(body)]
        kept.extend(await run.start_children(children))

    async with open_room(faulty, name="main") as room:
        await (await room.start(parent)).result()

    first, second, third = kept
    assert first.outcome_nowait().value == "ready"
    assert isinstance(second, PreparationError)
    assert third.outcome_nowait().status is RunStatus.COMPLETED
    assert disposals(bad.log) == ["grant", "workspace"]
    assert disposals(good.log) == []


async def test_a_group_cancelled_in_a_construction_decides_each_first(faulty: FaultyStore) -> None:
    """R-42: `start_children` raises `Cancelled` only when each child is decided: begun ones start, others never."""
    good, slow, never = Things(), Things(fail="sleep after workspace"), Things()

    async def parent(run: Run[None]) -> None:
        children: list[Child[Any]] = [Child.of(body, prepare=thing) for thing in (good, slow, never)]
        await run.start_children(children)

    async with open_room(faulty, name="main") as room:
        run = await room.start(parent)
        await slow.entered.wait()
        run.cancel()
        outcome = await run.outcome()

    assert outcome.status is RunStatus.CANCELLED
    assert disposals(slow.log) == ["workspace"]
    assert (good.log, never.log) == (list(THINGS), [])
    assert len(faulty.written(AdmitRun)) == 2


async def test_a_root_run_tells_its_cleanup_and_holds_nothing(faulty: FaultyStore) -> None:
    """R-67: a root Run's failed preparation gets one fence and one disposal; both are told, nothing is held."""
    things = Things(fail="inside grant", answers={"workspace": [Disposal.LOST]})
    async with open_room(faulty, name="main") as room:
        with pytest.raises(PreparationError) as caught:
            await room.start(body, prepare=things)

        assert (caught.value.disposal, caught.value.held) == ("lost", False)
        assert room.held() == ()
    assert len(faulty.written(FenceAdmission)) == 1
    assert disposals(things.log) == ["grant", "workspace"]


async def test_a_root_runs_uncertain_row_gets_one_fence(faulty: FaultyStore) -> None:
    """R-67: a root Run's uncertain row is fenced once, then what was prepared is disposed once; both are told."""
    faulty.fail(1, Fault.BEFORE, of=AdmitRun)
    things = Things()
    async with open_room(faulty, name="main") as room:
        with pytest.raises(AdmissionUncertainError) as caught:
            await room.start(body, prepare=things)

        assert (caught.value.fenced, caught.value.disposal) == (True, "discarded")
        assert room.held() == ()
    assert len(faulty.written(FenceAdmission)) == 1
    assert disposals(things.log) == ["context", "grant", "workspace"]


async def test_a_root_runs_failed_fence_is_held_by_the_room(faulty: FaultyStore) -> None:
    """R-67: if the fence fails too, the error names it and the room shows it as held; an operator can finish it."""
    faulty.fail(1, Fault.BEFORE, of=AdmitRun)
    faulty.fail(1, Fault.BEFORE, of=FenceAdmission)
    things = Things()
    async with open_room(faulty, name="main") as room:
        with pytest.raises(AdmissionUncertainError) as caught:
            await room.start(body, prepare=things)
        (hold,) = room.held()
        early = disposals(things.log)
        after = await retry(room, hold.run_id)

    assert not caught.value.fenced
    assert (caught.value.lease_id, caught.value.run_id) == (hold.lease_id, hold.run_id)
    assert (hold.phase, early) == ("fencing", [])
    assert after.phase is LeasePhase.RELEASED
    assert disposals(things.log) == ["context", "grant", "workspace"]


async def test_an_ordinary_function_can_prepare(faulty: FaultyStore) -> None:
    """A function wrapped by `prepare` declares that it takes nothing outside, and its value is the resource."""

    async def load(name: str) -> str:
        await trio.lowlevel.checkpoint()
        return f"settings of {name}"

    async with open_room(faulty, name="main") as room:
        run = await room.start(body, prepare=prepare(load, "x"))

        assert await run.result() == "settings of x"


async def test_a_child_owns_what_it_was_given(faulty: FaultyStore) -> None:
    """R-50: once admitted, the child has its things, and the family never disposes them, however it ends."""
    things = Things()

    async def failing(run: Run[Any]) -> None:
        raise ValueError("the child's own business")

    async def parent(run: Run[None]) -> None:
        child = await run.start_child(failing, prepare=things)
        await child.outcome()

    async with open_room(faulty, name="main") as room:
        await (await room.start(parent)).result()

    assert disposals(things.log) == []


async def test_a_taken_id_disposes_what_was_prepared(faulty: FaultyStore) -> None:
    """R-53: a row refused because the id is taken is told as such, after the disposal."""
    things = Things()
    kept: list[BaseException] = []

    async def parent(run: Run[None]) -> None:
        first = await run.start_child(body)
        await first.wait_returned()
        try:
            await run.start_child(body, run_id=first.id, prepare=things)
        except DuplicateRunError as error:
            kept.append(error)

    async with open_room(faulty, name="main") as room:
        await (await room.start(parent)).result()

    assert len(kept) == 1
    assert disposals(things.log) == ["context", "grant", "workspace"]


async def test_without_a_store_only_the_disposal_is_due() -> None:
    """R-80: a room without a store has no row to fence; what was begun is disposed all the same."""
    things = Things(fail="inside grant")
    kept: list[BaseException] = []
    async with open_room(name="main", durable=False) as room:
        await (await room.start(start_failing, things, kept)).result()

    assert isinstance(kept[0], PreparationError)
    assert kept[0].disposal == "discarded"
    assert disposals(things.log) == ["grant", "workspace"]


async def test_an_abandoned_cleanup_launch_needs_no_second_word(faulty: FaultyStore) -> None:
    """R-74: giving up the launch of a cleanup gives up the lease that it was for; nothing was disposed."""

    class Refuses:
        def construct(self, launch: Launch) -> Ticket:
            raise OSError("no worker")

        def submit(self, ticket: Ticket) -> None:
            raise AssertionError

    things = Things(fail="inside grant")
    kept: list[BaseException] = []
    async with open_room(faulty, name="main") as room:
        room.pool.tasks = Refuses()
        run = await room.start(start_failing, things, kept)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        abandon_held(room)
        with pytest.raises(RunAbandonedError):
            await run.result()
        assert room.held() == ()

    assert hold.phase == "cleanup"
    assert isinstance(kept[0], PreparationError)
    assert disposals(things.log) == []
