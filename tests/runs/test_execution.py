"""From the first row to the decision: bodies, plain tasks, children, and what their ends come to."""

from __future__ import annotations

import contextvars
import functools
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AdmissionRefusedError,
    DuplicateRunError,
    FamilyCancelledError,
    FamilySealedError,
    InvalidRecordError,
    RunCancelledError,
    RunFailedError,
    RunWaiting,
    RunWaitingError,
)
from spindel.ids import RunId
from spindel.observe import RunCancelRequested, RunProgress, RunStarted
from spindel.runs import Child, Room, RoomState, Run, current_run, observe_settlement, open_room
from spindel.store import AdmitRun, RunRecord, RunStatus
from spindel.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from spindel.observe import RoomEvent
    from spindel.store import Store

WORD: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("word", default="none")


async def park(_: Run[None]) -> None:
    await trio.sleep_forever()


async def give(_: Run[int], value: int) -> int:
    return value


async def fail(_: Run[None]) -> None:
    raise ValueError("failed on purpose")


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


async def sleep_then_fail(seconds: float, error: BaseException) -> None:
    await trio.sleep(seconds)
    raise error


async def row_of(room: Room, run: Run[Any]) -> RunRecord:
    record = await room.load(run.id)
    assert record is not None
    return record


async def collect(
    room: Room, events: list[RoomEvent], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with room.watch(buffer=10_000) as watch:
        task_status.started()
        async for event in watch:
            events.append(event)  # noqa: PERF401  seen as it comes, not at the end


class TestStart:
    async def test_the_row_comes_before_the_event_and_the_event_before_the_body(
        self, faulty: FaultyStore, nursery: trio.Nursery
    ) -> None:
        """R-23, R-37: reservation, acknowledged row, `run.started`, body: in this order, for root Runs and children."""
        at_body: dict[RunId, int] = {}
        in_flight: list[tuple[int, int]] = []
        events: list[RoomEvent] = []

        async def body(run: Run[None]) -> None:
            at_body[run.id] = room.events.sequence
            row = await room.load(run.id)
            assert row is not None
            assert row.status is RunStatus.RUNNING

        async def root(run: Run[None]) -> None:
            await body(run)
            held = faulty.hold(of=AdmitRun)
            nursery.start_soon(run.start_child, body)
            await held.wait_reached()
            await wait_all_tasks_blocked()
            in_flight.append((len(room.live()), room.events.sequence))
            held.release()

        async with open_room(faulty, name="r") as room:
            await nursery.start(collect, room, events)
            await (await room.start(root)).result()

        started = {event.run_id: event.sequence for event in events if isinstance(event, RunStarted)}
        assert in_flight == [(1, 1)]
        assert started == at_body
        assert list(started.values()) == [1, 2]

    @pytest.mark.parametrize("who", ["root", "child", "children"])
    async def test_a_refused_row_leaves_no_body_event_or_entry(
        self, faulty: FaultyStore, nursery: trio.Nursery, who: str
    ) -> None:
        """R-23: a start whose row is refused leaves nothing: no body, no event, no entry, and the parent goes on."""
        entered: list[RunId] = []
        events: list[RoomEvent] = []
        errors: list[AdmissionRefusedError] = []

        async def body(run: Run[None]) -> None:
            entered.append(run.id)

        async def parent(run: Run[str]) -> str:
            faulty.fail(of=AdmitRun, fault=Fault.REFUSED, code="no-room-left", transient=True)
            if who == "children":
                results = await run.start_children([Child.of(body), Child.of(body)])
                errors.extend(result for result in results if isinstance(result, AdmissionRefusedError))
                assert isinstance(results[1], Run)
                return "went on"
            with pytest.raises(AdmissionRefusedError) as caught:
                await run.start_child(body)
            errors.append(caught.value)
            return "went on"

        async with open_room(faulty, name="r") as room:
            await nursery.start(collect, room, events)
            if who == "root":
                faulty.fail(of=AdmitRun, fault=Fault.REFUSED, code="no-room-left", transient=True)
                with pytest.raises(AdmissionRefusedError) as caught:
                    await room.start(body)
                errors.append(caught.value)
            else:
                assert await (await room.start(parent)).result() == "went on"
            live = room.live()
            row = await room.load(errors[0].run_id)

        (error,) = errors
        assert (error.code, error.transient) == ("no-room-left", True)
        assert error.run_id not in entered
        assert error.run_id not in {event.run_id for event in events if isinstance(event, RunStarted)}
        assert live == ()
        assert row is None

    async def test_a_caller_cancelled_before_the_row_starts_nothing(self, faulty: FaultyStore) -> None:
        async with open_room(faulty, name="r") as room:
            parent = await room.start(park)
            with trio.CancelScope() as scope:
                scope.cancel()
                await parent.start_child(park)
            live = room.live()
            parent.cancel()

        assert scope.cancelled_caught
        assert len(live) == 1
        assert len(faulty.written(AdmitRun)) == 1

    async def test_a_caller_cancelled_while_the_row_is_written_gets_its_run(
        self, faulty: FaultyStore, nursery: trio.Nursery
    ) -> None:
        """R-23: once the row is issued the admission is decided, whatever happens to whoever asked for it."""
        got: list[Run[int]] = []
        scope = trio.CancelScope()

        async def start(parent: Run[None]) -> None:
            with scope:
                got.append(await parent.start_child(give, 1))

        async with open_room(faulty, name="r") as room:
            parent = await room.start(park)
            held = faulty.hold(of=AdmitRun)
            nursery.start_soon(start, parent)
            await held.wait_reached()
            scope.cancel()
            held.release()
            await wait_all_tasks_blocked()
            parent.cancel()

        assert got[0].outcome_nowait().value == 1

    async def test_a_child_reserved_before_a_leaf_ended_starts_after_it_and_is_joined(self, store: Store) -> None:
        """R-41: a Run without a family of its own takes a child that was reserved before its work was over."""
        event = trio.Event()

        async with open_room(store, name="r") as room:
            parent = await room.start(wait_for, event)
            with parent.reserve() as token:
                event.set()
                await wait_all_tasks_blocked()
                child = await parent.admit(token, give, 7)
                status = parent.status
            value = await child.result()
            await parent.result()

        assert status is RunStatus.RUNNING
        assert value == 7

    async def test_a_given_id_is_used_once(self, store: Store) -> None:
        mine = RunId(UUID(int=77))

        async with open_room(store, name="r") as room:
            run = await room.start(give, 1, run_id=mine)
            with pytest.raises(DuplicateRunError):
                await room.start(give, 2, run_id=mine)
            value = await run.result()
            with pytest.raises(DuplicateRunError):
                await room.start(give, 3, run_id=mine)
            live = room.live()

        assert run.id == mine
        assert value == 1
        assert live == ()

    async def test_the_body_runs_in_a_copy_of_the_given_context_or_of_the_starters(self, store: Store) -> None:
        seen: list[tuple[str, bool]] = []

        async def body(run: Run[None]) -> None:
            seen.append((WORD.get(), current_run() is run))
            WORD.set("changed")

        given = contextvars.copy_context()
        given.run(WORD.set, "given")
        WORD.set("starter")
        async with open_room(store, name="r") as room:
            await (await room.start(body)).result()
            await (await room.start(body, context=given)).result()
            await (await room.start(body, context=given)).result()

        assert seen == [("starter", True), ("given", True), ("given", True)]
        assert WORD.get() == "starter"
        assert given[WORD] == "given"

    @pytest.mark.parametrize("kind", ["root", "child", "children"])
    async def test_what_cannot_be_called_is_refused_before_anything_is_stored(self, store: Store, kind: str) -> None:
        faulty = FaultyStore(store)
        nothing: Any = 5

        async def parent(run: Run[None]) -> None:
            with pytest.raises(InvalidRecordError, match="fn: a int is no async function"):
                if kind == "child":
                    await run.start_child(nothing)
                else:
                    await run.start_children([Child.of(give, 1), Child(nothing)])

        async with open_room(faulty, name="r") as room:
            if kind == "root":
                with pytest.raises(InvalidRecordError, match="fn: a int is no async function"):
                    await room.start(nothing)
            else:
                await (await room.start(parent)).result()
            live = room.live()

        assert live == ()
        assert len(faulty.written(AdmitRun)) == (0 if kind == "root" else 1)

    async def test_a_body_that_is_not_async_fails_its_run_and_nobody_else(self, store: Store) -> None:
        def plain(_: Run[Any]) -> Any:
            return 3

        async with open_room(store, name="r") as room:
            run = await room.start(plain)
            other = await room.start(give, 1)
            outcome = await run.outcome()
            row = await row_of(room, run)
            value = await other.result()

        assert outcome.status is RunStatus.FAILED
        assert isinstance(outcome.error, TypeError)
        assert row.error is not None
        assert row.error.startswith("TypeError")
        assert value == 1

    async def test_a_body_may_be_any_callable_whatever_its_text(self, store: Store) -> None:
        class Evil:
            def __repr__(self) -> str:
                raise RuntimeError("no text")

            def __call__(self, run: Run[int], value: int) -> Awaitable[int]:
                return give(run, value)

            async def method(self, run: Run[int], value: int) -> int:
                return value

        evil = Evil()
        bodies: list[Any] = [evil, evil.method, functools.partial(evil), functools.partial(evil.method)]
        async with open_room(store, name="r") as room:
            values = [await (await room.start(body, 4)).result() for body in bodies]

        assert values == [4, 4, 4, 4]


class TestDecision:
    CASES: Final = (
        # what the work does; its end without a request; its end after one
        ("value", "completed", "completed"),
        ("none", "completed", "completed"),
        ("false", "completed", "completed"),
        ("zero", "completed", "completed"),
        ("error", "failed", "cancelled"),
        ("cancelled", "cancelled", "cancelled"),
        ("group", "failed", "cancelled"),
        ("group with cancelled", "failed", "cancelled"),
        ("group of cancelled", "cancelled", "cancelled"),
        ("waiting", "waiting", "waiting"),
        ("waiting in a group with cancelled", "waiting", "waiting"),
        ("waiting beside an error", "failed", "cancelled"),
        ("waiting error of another", "failed", "cancelled"),
    )

    @pytest.mark.parametrize("requested", [False, True])
    @pytest.mark.parametrize(("work", "alone", "after"), CASES)
    async def test_what_the_work_does_decides_how_its_run_ends(
        self, store: Store, work: str, alone: str, after: str, requested: bool
    ) -> None:
        """R-24: value, None, False, 0, error, Cancelled, groups and RunWaiting, without and after a request."""
        seen: list[str] = []

        async def body(run: Run[Any]) -> Any:
            cancelled: list[BaseException] = []
            with trio.CancelScope() as scope:
                scope.cancel()
                try:
                    await trio.lowlevel.checkpoint()
                except trio.Cancelled as error:
                    cancelled.append(error)
            if requested:
                run.cancel("please-stop")
            row = await store.load_run("r", run.id) if not requested else None
            seen.append(run.status)
            assert row is None or row.status is RunStatus.RUNNING
            values = {"value": 7, "none": None, "false": False, "zero": 0}
            if work in values:
                return values[work]
            errors: dict[str, BaseException] = {
                "error": ValueError("x"),
                "cancelled": cancelled[0],
                "group": ExceptionGroup("g", [ValueError("x"), KeyError("y")]),
                "group with cancelled": BaseExceptionGroup("g", [ValueError("x"), cancelled[0]]),
                "group of cancelled": BaseExceptionGroup("g", [BaseExceptionGroup("h", [cancelled[0]])]),
                "waiting": RunWaiting("for-a-friend"),
                "waiting in a group with cancelled": BaseExceptionGroup(
                    "g", [RunWaiting("for-a-friend"), cancelled[0]]
                ),
                "waiting beside an error": ExceptionGroup("g", [RunWaiting("for-a-friend"), ValueError("x")]),
                "waiting error of another": RunWaitingError(RunId(UUID(int=3)), "other"),
            }
            raise errors[work]

        async with open_room(store, name="r") as room:
            run = await room.start(body)
            outcome = await run.outcome()
            row = await row_of(room, run)

        expected = after if requested else alone
        assert outcome.status == expected
        assert row.status == expected
        assert seen == ["cancelling" if requested else "running"]
        assert run.status == expected
        values = {"value": 7, "none": None, "false": False, "zero": 0}
        assert outcome.value is values.get(work)
        if expected == "cancelled":
            assert row.reason == ("please-stop" if requested else "cancelled")
            with pytest.raises(RunCancelledError):
                outcome.unwrap()
        if expected == "failed":
            assert row.reason is None
            with pytest.raises(RunFailedError) as caught:
                outcome.unwrap()
            assert caught.value.__cause__ is outcome.error
        if expected == "completed":
            assert outcome.unwrap() is values[work]
        assert not contains_cancelled(outcome.error)
        assert "Cancelled" not in (row.error or "")
        assert (row.ended_at is None) == (expected == "waiting")

    async def test_work_that_waits_ends_for_good_and_unsettled(self, store: Store) -> None:
        """R-35: a Run that raises RunWaiting has a waiting row with its witness, no lease, and stays so."""

        async def body(run: Run[None]) -> None:
            await run.start_child(give, 1)
            raise RunWaiting("for-a-human")

        async with open_room(store, name="r") as room:
            run = await room.start(body)
            outcome = await run.outcome()
            row = await row_of(room, run)
            report = await observe_settlement(room, run.id)
            live = room.find(run.id)
            again = run.cancel()
        async with open_room(store, name="r") as room:
            later = await room.load(run.id)

        assert (outcome.status, outcome.reason) == (RunStatus.WAITING, "for-a-human")
        with pytest.raises(RunWaitingError, match="for-a-human"):
            outcome.unwrap()
        assert (row.status, row.reason, row.ended_at) == (RunStatus.WAITING, "for-a-human", None)
        assert row.family_return_ack is not None
        assert not report.settled
        assert live is None
        assert not again
        assert later == row

    async def test_a_reason_to_wait_that_no_row_may_hold_fails_the_run_where_it_is_made(self, store: Store) -> None:
        async def body(_: Run[None]) -> None:
            raise RunWaiting("For a Human!")

        async with open_room(store, name="r") as room:
            outcome = await (await room.start(body)).outcome()

        assert outcome.status is RunStatus.FAILED
        assert isinstance(outcome.error, InvalidRecordError)

    async def test_an_error_text_that_no_row_may_hold_is_made_to_fit(self, store: Store) -> None:
        class BrokenError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        texts = []
        async with open_room(store, name="r") as room:
            for error in (BrokenError(), ValueError("\ud800\0"), ValueError("x" * 5000)):
                run = await room.start(raise_it, error)
                await run.wait_returned()
                texts.append((await row_of(room, run)).error or "")

        assert "can't be shown" in texts[0]
        assert "\0" not in texts[1]
        assert len(texts[2]) == 2000


async def raise_it(_: Run[None], error: BaseException) -> None:
    raise error


def contains_cancelled(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(contains_cancelled(part) for part in error.exceptions)
    return isinstance(error, trio.Cancelled)


class TestPlainTasks:
    async def test_one_that_raises_cancels_body_and_plain_tasks_but_no_child(
        self, store: Store, spindel_clock: MockClock
    ) -> None:
        """R-27: a plain task that raises cancels the work; the child completes; its error is the Run's."""
        ends: list[str] = []
        error = ValueError("of a plain task")

        async def other() -> None:
            try:
                await trio.sleep_forever()
            finally:
                ends.append("plain task")

        async def child(_: Run[str]) -> str:
            await trio.sleep(10)
            ends.append("child")
            return "done"

        async def body(run: Run[None]) -> None:
            children.append(await run.start_child(child))
            run.start_soon(other)
            run.start_soon(sleep_then_fail, 1, error)
            try:
                await trio.sleep_forever()
            finally:
                ends.append("body")

        children: list[Run[str]] = []
        async with open_room(store, name="r") as room:
            run = await room.start(body)
            outcome = await run.outcome()

        assert outcome.status is RunStatus.FAILED
        assert outcome.error is error
        assert sorted(ends[:2]) == ["body", "plain task"]
        assert ends[2] == "child"
        assert children[0].outcome_nowait().value == "done"
        assert run.cancel_requested is False

    async def test_a_failing_body_cancels_the_plain_tasks(self, store: Store, spindel_clock: MockClock) -> None:
        """R-27: in the other direction, too; children go on."""
        ends: list[str] = []
        event = trio.Event()

        async def other() -> None:
            try:
                await trio.sleep_forever()
            finally:
                ends.append("plain task")
                event.set()

        async def body(run: Run[None]) -> None:
            children.append(await run.start_child(wait_for, event))
            run.start_soon(other)
            await trio.sleep(1)
            raise ValueError("of the body")

        children: list[Run[None]] = []
        async with open_room(store, name="r") as room:
            outcome = await (await room.start(body)).outcome()

        assert str(outcome.error) == "of the body"
        assert ends == ["plain task"]
        assert children[0].status is RunStatus.COMPLETED

    async def test_several_errors_of_the_work_are_a_group(self, store: Store) -> None:
        """R-27: body and plain task that both raise give a group; Cancelled is in none of it."""

        async def plain() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("plain")

        async def body(run: Run[None]) -> None:
            run.start_soon(plain)
            run.start_soon(trio.sleep_forever)
            await wait_all_tasks_blocked()
            raise ValueError("body")

        async with open_room(store, name="r") as room:
            run = await room.start(body)
            outcome = await run.outcome()
            row = await row_of(room, run)

        assert isinstance(outcome.error, ExceptionGroup)
        assert sorted(type(leaf).__name__ for leaf in outcome.error.exceptions) == ["KeyError", "ValueError"]
        assert row.error is not None
        assert "ValueError: body" in row.error
        assert "KeyError: 'plain'" in row.error

    async def test_they_are_joined_before_the_decision(self, store: Store, spindel_clock: MockClock) -> None:
        order: list[str] = []

        async def plain(run: Run[int]) -> None:
            await trio.sleep(5)
            order.append(f"plain, {run.status}")

        async def body(run: Run[int]) -> int:
            run.start_soon(plain, run)
            order.append("body")
            return 3

        async with open_room(store, name="r") as room:
            value = await (await room.start(body)).result()

        assert value == 3
        assert order == ["body", "plain, running"]

    async def test_a_plain_task_may_start_others_after_the_body_and_children_too(
        self, store: Store, spindel_clock: MockClock
    ) -> None:
        order: list[str] = []

        async def second(run: Run[None]) -> None:
            await trio.sleep(1)
            await run.start_child(give, 1)
            order.append("second")

        async def first(run: Run[None]) -> None:
            await trio.sleep(1)
            run.start_soon(second, run)
            order.append("first")

        async def body(run: Run[None]) -> None:
            run.start_soon(first, run)

        async with open_room(store, name="r") as room:
            run = await room.start(body)
            await run.result()
            rows = (await room.list_runs(parent=run.id)).runs

        assert order == ["first", "second"]
        assert len(rows) == 1

    async def test_after_the_decision_none_is_taken(self, store: Store) -> None:
        """R-26: a Run that has decided takes no plain task, whoever asks, with and without a host of its own."""
        event = trio.Event()

        async def with_child(run: Run[None]) -> None:
            await run.start_child(wait_for, event)

        async def with_policy(run: Run[None]) -> None:
            await run.start_child(wait_for, event)

        async with open_room(store, name="r") as room:
            leaf = await room.start(give, 1)
            await leaf.result()
            joining = await room.start(with_child)
            deciding = await room.start(with_policy, on_child_failure="cancel")
            await wait_all_tasks_blocked()
            for run in (leaf, joining, deciding):
                with pytest.raises(FamilySealedError, match=str(run.id)):
                    run.start_soon(trio.sleep_forever)
            event.set()

        assert room.state is RoomState.CLOSED

    async def test_the_turn_between_the_last_plain_task_and_the_decision_takes_none(self, store: Store) -> None:
        """R-26: wherever another task asks, it is either taken and joined, or refused as sealed."""
        answers: set[str] = set()

        async def body(run: Run[None]) -> None:
            run.start_soon(trio.lowlevel.checkpoint)

        async with open_room(store, name="r") as room:
            for turns in range(12):
                run = await room.start(body)
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                done: list[bool] = []
                try:
                    run.start_soon(note, done)
                except FamilySealedError:
                    answers.add("sealed")
                else:
                    await run.wait_returned()
                    answers.add("joined")
                    assert done == [True]
                await run.wait_returned()

        assert answers == {"sealed", "joined"}

    async def test_tasks_queued_before_the_host_is_open_start_in_trios_manner(self, store: Store) -> None:
        """What was asked for before the family has its nursery starts all the same, each with its own context."""
        seen: list[tuple[int, str, bool]] = []

        async def plain(run: Run[None], number: int) -> None:
            seen.append((number, WORD.get(), current_run() is run))

        async def body(run: Run[None]) -> None:
            for number in range(3):
                WORD.set(str(number))
                run.start_soon(plain, run, number)

        async with open_room(store, name="r") as room:
            await (await room.start(body)).result()

        assert sorted(seen) == [(0, "0", True), (1, "1", True), (2, "2", True)]

    async def test_one_started_by_another_run_belongs_to_the_run_it_was_started_in(self, store: Store) -> None:
        seen: list[RunId] = []

        async def plain() -> None:
            run = current_run()
            assert run is not None
            seen.append(run.id)

        async def guest(_: Run[None], host: Run[None]) -> None:
            host.start_soon(plain)
            await trio.lowlevel.checkpoint()
            host.start_soon(plain)

        event = trio.Event()
        async with open_room(store, name="r") as room:
            host = await room.start(wait_for, event)
            await (await room.start(guest, host)).result()
            event.set()

        assert seen == [host.id, host.id]

    @pytest.mark.parametrize("opened", [False, True])
    async def test_one_that_cannot_be_started_fails_the_work(self, store: Store, opened: bool) -> None:
        """A plain function, or wrong arguments, fail as Trio's nursery would say, before and after the host is open."""
        started: list[bool] = []

        def plain() -> None:
            raise AssertionError("Trio looks at what it returns")

        async def needs_one(_: object) -> None:
            pass

        async def body(run: Run[None], wrong: Any) -> None:
            if opened:
                await run.start_child(give, 1)
            run.start_soon(wrong)
            run.start_soon(note, started)
            await trio.sleep_forever()

        async with open_room(store, name="r") as room:
            outcomes = [await (await room.start(body, wrong)).outcome() for wrong in (needs_one, lambda: None)]
            other = await (await room.start(give, 2)).result()

        assert [outcome.status for outcome in outcomes] == [RunStatus.FAILED, RunStatus.FAILED]
        assert [type(outcome.error) for outcome in outcomes] == [TypeError, TypeError]
        assert other == 2

    async def test_one_started_in_the_cleanup_of_a_cancelled_body_starts_cancelled_and_is_joined(
        self, store: Store
    ) -> None:
        """R-24: under a cancelled Run a plain task still starts, meets the request at its first checkpoint, is joined."""
        order: list[str] = []

        async def plain() -> None:
            order.append("plain began")
            try:
                await trio.lowlevel.checkpoint()
                order.append("plain went on")
            finally:
                order.append("plain ended")

        async def body(run: Run[None], with_host: bool) -> None:
            if with_host:
                run.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                run.start_soon(plain)
                order.append("body ended")

        async with open_room(store, name="r") as room:
            for with_host in (False, True):
                run = await room.start(body, with_host)
                await wait_all_tasks_blocked()
                run.cancel()
                await run.wait_returned()
                order.append(run.status)

        assert order == ["body ended", "plain began", "plain ended", "cancelled"] * 2


async def note(done: list[bool]) -> None:
    await trio.lowlevel.checkpoint()
    done.append(True)


class TestChildFailure:
    async def test_under_isolate_a_failure_cancels_nobody(self, store: Store) -> None:
        """R-28: with `isolate` siblings and parent complete beside a failed child, and children beside a failed body."""
        event = trio.Event()
        runs: dict[str, Run[Any]] = {}

        async def parent(run: Run[str], broken: bool) -> str:
            runs["failed"] = await run.start_child(fail)
            runs["sibling"] = await run.start_child(wait_for, event)
            await runs["failed"].wait_returned()
            await run.start_child(give, 1)
            if broken:
                raise ValueError("the body")
            event.set()
            return "fine"

        async with open_room(store, name="r") as room:
            value = await (await room.start(parent, False)).result()
            sibling = runs["sibling"].status
            event = trio.Event()
            run = await room.start(parent, True, on_child_failure="isolate")
            await wait_all_tasks_blocked()
            joined = run.status
            event.set()
            outcome = await run.outcome()

        assert value == "fine"
        assert sibling is RunStatus.COMPLETED
        assert joined is RunStatus.RUNNING
        assert str(outcome.error) == "the body"
        assert runs["sibling"].status is RunStatus.COMPLETED

    async def test_under_cancel_the_first_failing_child_cancels_the_rest(self, store: Store) -> None:
        """R-28: with `cancel` a failing child cancels siblings and work; new children are refused; `child-failed`."""
        refused: list[type[Exception]] = []
        runs: dict[str, Run[Any]] = {}

        async def parent(run: Run[None]) -> None:
            runs["sibling"] = await run.start_child(park)
            run.start_soon(trio.sleep_forever)
            runs["failed"] = await run.start_child(fail)
            try:
                await trio.sleep_forever()
            finally:
                try:
                    await run.start_child(give, 1)
                except FamilyCancelledError as error:
                    refused.append(type(error))

        async with open_room(store, name="r") as room:
            run = await room.start(parent, on_child_failure="cancel")
            outcome = await run.outcome()
            row = await row_of(room, run)
            sibling = await row_of(room, runs["sibling"])

        assert (outcome.status, outcome.reason) == (RunStatus.FAILED, "child-failed")
        assert isinstance(outcome.error, ExceptionGroup)
        assert [str(leaf) for leaf in outcome.error.exceptions] == ["failed on purpose"]
        assert (row.status, row.reason, row.error) == ("failed", "child-failed", "ValueError: failed on purpose")
        assert (sibling.status, sibling.reason) == ("cancelled", "child-failed")
        assert run.cancel_reason == "child-failed"
        assert refused == [FamilyCancelledError]

    async def test_under_cancel_a_child_that_fails_after_the_body_still_decides(self, store: Store) -> None:
        """R-28: the decision follows the join, so a child that fails first after a returned body fails the Run."""
        event = trio.Event()

        async def child(_: Run[None]) -> None:
            await event.wait()
            raise ValueError("late")

        async def parent(run: Run[str]) -> str:
            siblings.append(await run.start_child(park))
            await run.start_child(child)
            return "fine"

        siblings: list[Run[None]] = []
        async with open_room(store, name="r") as room:
            run = await room.start(parent, on_child_failure="cancel")
            await wait_all_tasks_blocked()
            event.set()
            outcome = await run.outcome()

        assert (outcome.status, outcome.reason, outcome.value) == (RunStatus.FAILED, "child-failed", None)
        assert siblings[0].outcome_nowait().reason == "child-failed"

    async def test_under_cancel_the_work_that_fails_first_cancels_the_children_and_is_the_error(
        self, store: Store
    ) -> None:
        """R-28: work first: its own error, and children that then fail change nothing."""
        error = ValueError("the work")

        async def child(_: Run[None]) -> None:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise KeyError("and then") from None

        async def parent(run: Run[None]) -> None:
            children.append(await run.start_child(park))
            children.append(await run.start_child(child))
            await wait_all_tasks_blocked()
            raise error

        children: list[Run[None]] = []
        async with open_room(store, name="r") as room:
            run = await room.start(parent, on_child_failure="cancel")
            outcome = await run.outcome()

        assert outcome.status is RunStatus.FAILED
        assert outcome.error is error
        assert outcome.reason is None
        assert [child.status for child in children] == [RunStatus.CANCELLED, RunStatus.CANCELLED]
        assert children[0].cancel_reason == "work-failed"

    @pytest.mark.parametrize("end", ["cancelled", "waiting"])
    async def test_under_cancel_only_a_failure_counts(self, store: Store, end: str) -> None:
        """R-28: a child that is cancelled or waits is no failure."""

        async def wait(_: Run[None]) -> None:
            raise RunWaiting

        async def parent(run: Run[str]) -> str:
            child = await run.start_child(wait if end == "waiting" else park)
            if end == "cancelled":
                child.cancel()
            await child.wait_returned()
            await run.start_child(give, 1)
            return "fine"

        async with open_room(store, name="r") as room:
            run = await room.start(parent, on_child_failure="cancel")
            value = await run.result()

        assert value == "fine"
        assert not run.cancel_requested

    async def test_under_cancel_a_grandchild_counts_only_through_its_parent(self, store: Store) -> None:
        """R-28: the policy looks at children; one that isolates its own failing child completes."""

        async def middle(run: Run[int]) -> int:
            child = await run.start_child(fail)
            await child.wait_returned()
            return 5

        async def parent(run: Run[int]) -> int:
            return await (await run.start_child(middle)).result()

        async with open_room(store, name="r") as room:
            value = await (await room.start(parent, on_child_failure="cancel")).result()

        assert value == 5

    async def test_under_cancel_the_work_of_a_run_that_was_asked_to_stop_decides(self, store: Store) -> None:
        """R-28: a request by somebody else cancels as ever; no failure is made of it."""

        async def parent(run: Run[None]) -> None:
            await run.start_child(park)
            await trio.sleep_forever()

        async with open_room(store, name="r") as room:
            run = await room.start(parent, on_child_failure="cancel")
            await wait_all_tasks_blocked()
            run.cancel("enough")
            outcome = await run.outcome()

        assert (outcome.status, outcome.reason, outcome.error) == (RunStatus.CANCELLED, "enough", None)


class TestInterrupts:
    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    @pytest.mark.parametrize("policy", ["isolate", "cancel"])
    async def test_an_interrupt_in_a_grandchild_ends_every_run_with_a_row_and_leaves_through_the_block(
        self, store: Store, kind: type[BaseException], policy: Any, nursery: trio.Nursery
    ) -> None:
        """R-29: the grandchild is failed/interrupted, all others are cancelled, and the block raises what it raised."""
        error = kind("stop it")
        runs: dict[str, Run[Any]] = {}
        events: list[RoomEvent] = []

        async def grandchild(run: Run[None]) -> None:
            await wait_all_tasks_blocked()
            raise error

        async def child(run: Run[None]) -> None:
            runs["grandchild"] = await run.start_child(grandchild)
            await trio.sleep_forever()

        async def root(run: Run[None]) -> None:
            runs["child"] = await run.start_child(child, on_child_failure=policy)
            await trio.sleep_forever()

        with pytest.raises(kind) as caught:
            async with open_room(store, name="r") as room:
                await nursery.start(collect, room, events)
                runs["root"] = await room.start(root)
                runs["other"] = await room.start(park)
                await trio.sleep_forever()
        rows = {name: await store.load_run("r", run.id) for name, run in runs.items()}

        assert caught.value is error
        assert room.state is RoomState.CLOSED
        found = {name: (row.status, row.reason) for name, row in rows.items() if row is not None}
        expected_child = ("cancelled", "room-closing") if policy == "isolate" else ("failed", "child-failed")
        assert found == {
            "root": ("cancelled", "room-closing"),
            "child": expected_child,
            "grandchild": ("failed", "interrupted"),
            "other": ("cancelled", "room-closing"),
        }
        # It has decided, so nobody asks it any more.
        asked = {event.run_id for event in events if isinstance(event, RunCancelRequested)}
        assert asked == {runs[name].id for name in ("root", "child", "other")}

    async def test_an_interrupt_among_the_leaves_of_a_group_counts(self, store: Store) -> None:
        """R-29: of a group the leaves count, however deep."""
        group = BaseExceptionGroup("g", [ValueError(1), BaseExceptionGroup("h", [KeyboardInterrupt()])])

        with pytest.raises(BaseExceptionGroup) as caught:
            async with open_room(store, name="r") as room:
                run = await room.start(raise_it, group)
                await trio.sleep_forever()
        row = await store.load_run("r", run.id)

        assert caught.value is group
        assert row is not None
        assert (row.status, row.reason) == ("failed", "interrupted")

    async def test_an_interrupt_in_a_plain_task_is_the_runs(self, store: Store) -> None:
        """R-29: a plain task's KeyboardInterrupt leaves as if the body had raised it."""
        error = KeyboardInterrupt()

        async def body(run: Run[None]) -> None:
            run.start_soon(sleep_then_fail, 0, error)
            await trio.sleep_forever()

        with pytest.raises(KeyboardInterrupt) as caught:
            async with open_room(store, name="r") as room:
                run = await room.start(body)
        row = await store.load_run("r", run.id)

        assert caught.value is error
        assert row is not None
        assert (row.status, row.reason) == ("failed", "interrupted")

    async def test_a_body_error_is_kept_as_the_cause_of_an_interrupt(self, store: Store) -> None:
        """R-29: the interrupt leaves; what the block's own body raised meanwhile is told with it."""
        with pytest.raises(KeyboardInterrupt) as caught:
            async with open_room(store, name="r") as room:
                await room.start(raise_it, KeyboardInterrupt())
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError("in the body")

        assert isinstance(caught.value.__cause__, ValueError)

    async def test_a_second_interrupt_does_not_replace_the_first(self, store: Store) -> None:
        first, second = KeyboardInterrupt("first"), SystemExit("second")

        async def stubborn(_: Run[None]) -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise second

        with pytest.raises(KeyboardInterrupt) as caught:
            async with open_room(store, name="r") as room:
                await room.start(stubborn)
                await wait_all_tasks_blocked()
                await room.start(raise_it, first)
                await trio.sleep_forever()

        assert caught.value is first


class TestReadiness:
    async def test_a_run_says_that_it_is_ready_and_the_value_reaches_who_waits(self, store: Store) -> None:
        async def body(run: Run[None]) -> None:
            await wait_all_tasks_blocked()
            run.started(42)
            await trio.sleep_forever()

        async with open_room(store, name="r") as room:
            run = await room.start(body)
            values = [await run.wait_started(), await run.wait_started()]
            run.cancel()
            await run.wait_returned()
            values.append(await run.wait_started())

        assert values == [42, 42, 42]

    async def test_it_says_so_once(self, store: Store) -> None:
        async def body(run: Run[None]) -> None:
            run.started()
            with pytest.raises(RuntimeError, match="before"):
                run.started()

        async with open_room(store, name="r") as room:
            run = await room.start(body)
            value = await run.wait_started()
            outcome = await run.outcome()

        assert value is None
        assert outcome.status is RunStatus.COMPLETED

    @pytest.mark.parametrize(
        ("body", "error"), [(fail, RunFailedError), (park, RunCancelledError), (give, RunFailedError)]
    )
    @pytest.mark.parametrize("early", [False, True])
    async def test_one_that_ends_without_saying_so_tells_how_it_ended(
        self, store: Store, body: Callable[..., Awaitable[Any]], error: type[Exception], early: bool
    ) -> None:
        async with open_room(store, name="r") as room:
            run: Run[Any] = await (room.start(body, 1) if body is give else room.start(body))
            if body is park:
                run.cancel()
            if not early:
                await run.wait_returned()
            with pytest.raises(error) as caught:
                await run.wait_started()

        if body is give:
            assert "never-started" in str(caught.value)

    async def test_progress_is_an_event_and_nothing_else(self, store: Store, nursery: trio.Nursery) -> None:
        events: list[RoomEvent] = []

        async def body(run: Run[None]) -> None:
            run.report_progress(1)
            run.report_progress(2, 4, "half")

        async with open_room(store, name="r") as room:
            await nursery.start(collect, room, events)
            run = await room.start(body)
            await run.result()

        told = [event for event in events if isinstance(event, RunProgress)]
        assert [(event.run_id, event.done, event.total, event.message) for event in told] == [
            (run.id, 1, None, ""),
            (run.id, 2, 4, "half"),
        ]
        assert run.outcome_nowait().status is RunStatus.COMPLETED
