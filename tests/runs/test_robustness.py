"""What must not wedge a Run or its room: calls from threads, hostile exceptions, launches after the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import FamilySealedError, RunAbandonedError, RunWaiting
from spindel.observe import RunProgress
from spindel.operator import abandon_held
from spindel.runs import Run, open_room
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spindel.store import Store


async def leaf(run: Run[None]) -> None:
    await trio.lowlevel.checkpoint()


async def test_progress_can_be_told_from_a_thread(store: Store) -> None:
    """R-21: a native launch tells how far it is; the watcher in the loop sees it, in order, and nobody is wedged."""

    async def body(run: Run[None]) -> None:
        def work() -> None:
            for done in range(3):
                run.report_progress(done, 3, "step")

        await run.run_native(work)

    seen: list[float] = []
    async with open_room(store, name="main") as room:
        async with room.watch() as watch:
            run = await room.start(body)
            async for event in watch:
                if isinstance(event, RunProgress):
                    seen.append(event.done)
                if len(seen) == 3:
                    break
        await run.result()

    assert seen == [0, 1, 2]


@pytest.mark.parametrize("call", ["cancel", "start_soon", "started", "cancel_all"])
async def test_a_call_from_a_thread_is_refused_before_it_changes_anything(store: Store, call: str) -> None:
    """R-25: what belongs to the loop is refused in a thread with the way to do it, and the Run goes on unharmed."""

    async def body(run: Run[None]) -> None:
        calls: dict[str, Any] = {
            "cancel": lambda: run.cancel("x"),
            "start_soon": lambda: run.start_soon(trio.sleep_forever),
            "started": lambda: run.started(1),
            "cancel_all": room.cancel_all,
        }
        with pytest.raises(RuntimeError, match="from_thread"):
            await run.run_native(calls[call])
        assert not run.cancel_requested
        run.start_soon(trio.lowlevel.checkpoint)
        with pytest.raises(RuntimeError, match="from_thread"):
            await run.run_native(calls["start_soon"])
        await run.start_child(leaf)
        await run.run_native(trio.from_thread.run_sync, run.cancel, "asked-in-a-thread")
        await trio.sleep_forever()

    async with open_room(store, name="main") as room:
        run = await room.start(body)
        outcome = await run.outcome()

    assert (outcome.status, outcome.reason) == (RunStatus.CANCELLED, "asked-in-a-thread")


class NeedsHuman(RunWaiting):
    """Forgets to say why it waits."""

    def __init__(self, who: str) -> None:
        self.who = who


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Indivisible(BaseExceptionGroup[BaseException]):
    def derive(self, excs: Sequence[BaseException], /) -> Self:  # type: ignore[override]
        raise ValueError("can't be split")


@pytest.mark.parametrize(
    ("raised", "status", "reason"),
    [
        (NeedsHuman("bob"), RunStatus.WAITING, "waiting"),
        (UnprintableError(), RunStatus.FAILED, None),
        (Indivisible("both", [ValueError(), trio.TooSlowError()]), RunStatus.FAILED, None),
    ],
)
async def test_a_hostile_exception_still_ends_in_a_row(
    store: Store, raised: BaseException, status: RunStatus, reason: str | None
) -> None:
    """R-24: whatever an author's exception does when it is looked at, the Run ends with an outcome in its row."""

    async def body(run: Run[None]) -> None:
        raise raised

    async with open_room(store, name="main") as room:
        run = await room.start(body)
        outcome = await run.outcome()
        row = await room.load(run.id)

    assert (outcome.status, outcome.reason) == (status, reason)
    assert row is not None
    assert row.status is status


async def test_an_end_that_breaks_down_is_held_by_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-20: a bug in the end of a Run is held and named, so that the room can be ended by an operator."""

    async def broken(*_: object) -> str:
        raise LookupError("a bug of ours")

    monkeypatch.setattr("spindel.runs._finishing._persist", broken)
    async with open_room(store, name="main") as room:
        run = await room.start(leaf)
        await wait_all_tasks_blocked()
        (hold,) = room.held()
        abandon_held(room)
        with pytest.raises(RunAbandonedError):
            await run.result()

    assert (hold.run_id, hold.code) == (run.id, "LookupError")


async def test_an_ended_run_launches_nothing_more(store: Store) -> None:
    """R-76: a Run that has returned takes no thread and no process any more: nothing would answer for them."""
    entered: list[int] = []
    async with open_room(store, name="main") as room:
        run = await room.start(leaf)
        await run.wait_returned()
        with pytest.raises(FamilySealedError):
            await run.run_native(entered.append, 1)
        with pytest.raises(FamilySealedError):
            await run.run_process(["true"])

    assert entered == []
