"""What a room's events come to, also after some were missed."""

from __future__ import annotations

import trio
import trio.testing

from spindel.cli._display import WatchingDisplay, describe_tally
from spindel.cli._tally import Tally
from spindel.observe import RunHeld, RunRecovered
from spindel.operator import abandon_held, reconcile_settlement
from spindel.runs import Room, Run, observe_settlement, open_room


async def leaf(run: Run[None]) -> None:
    run.report_progress(1, 2, "half\x1b[0m")
    await trio.sleep_forever()


async def two_leaves(run: Run[None]) -> None:
    for _ in range(2):
        await run.start_child(leaf, kind="leaf")


async def nothing(run: Run[None]) -> None:
    pass


class StillDisplay(WatchingDisplay):
    async def refresh(self, room: Room) -> None:
        await trio.lowlevel.checkpoint()


async def test_live_runs_are_a_tree_and_ended_ones_a_count() -> None:
    tally = Tally()
    async with open_room(name="main") as room, room.watch() as watch:
        tally.restart(watch.snapshot)
        root = await room.start(two_leaves, kind="root")
        await trio.testing.wait_all_tasks_blocked()
        while root.id not in tally.live or len(tally.live) < 3 or tally.progress is None:
            tally.apply(await anext(watch))
        grown = describe_tally(tally)
        names = [(node.kind, [child.kind for child in node.children.values()]) for node in tally.roots.values()]
        room.cancel_all()
        while tally.live:
            tally.apply(await anext(watch))

    assert grown == "3 running; 1/2 half\\x1b[0m"
    assert names == [("root", ["leaf", "leaf"])]
    assert tally.counts() == {"completed": 1, "cancelled": 2}
    assert tally.roots == {}


async def test_what_is_held_again_is_still_one_hold() -> None:
    """R-21: a hold whose recovery failed is told again, and counts once; given up, it counts no more."""
    counts: list[int] = []
    tally = Tally()

    async def publish(_: object) -> None:
        raise ConnectionError

    async with open_room(name="main") as room, room.watch() as watch:
        run = await room.start(nothing, publish=publish)
        await trio.testing.wait_all_tasks_blocked()
        facts = (await observe_settlement(room, run.id)).admission
        assert facts is not None
        assert facts.revision is not None
        await reconcile_settlement(room, run.id, lease_id=facts.lease_id, phase=facts.phase, revision=facts.revision)
        abandon_held(room)
        actions: list[str] = []
        while not actions:
            event = await anext(watch)
            tally.apply(event)
            if isinstance(event, RunHeld):
                counts.append(tally.held)
            elif isinstance(event, RunRecovered):
                actions.append(event.action)

    assert counts == [1, 1]
    assert tally.held == 0
    assert actions == ["abandon"]


async def test_a_display_that_fell_behind_begins_again_and_says_that_its_counts_are_too_low() -> None:
    display = StillDisplay()
    async with open_room(name="main") as room, trio.open_nursery() as nursery:
        ready = trio.Event()
        nursery.start_soon(display.follow, room, ready)
        await ready.wait()

        async def flood(run: Run[None]) -> None:
            for number in range(20_000):
                run.report_progress(number)
            await trio.sleep_forever()

        run = await room.start(flood)
        while display.tally.exact or run.id not in display.tally.live:  # noqa: ASYNC110  a display tells nobody
            await trio.lowlevel.checkpoint()
        run.cancel()
        nursery.cancel_scope.cancel()

    assert "(at least)" in describe_tally(display.tally)
