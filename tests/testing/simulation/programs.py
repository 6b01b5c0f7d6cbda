"""Programs for the tests of the simulation: one that is right, and some that are wrong on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from spindel.runs import Run
    from spindel.testing.simulation import World


async def counter(world: World) -> None:
    """Two Runs read, think and write, one of them a step later: a lost update, in some orders only."""
    total = 0

    async def add(_: Run[None], number: int) -> None:
        nonlocal total
        for _step in range(number):
            await trio.lowlevel.checkpoint()
        seen = total
        await trio.lowlevel.checkpoint()
        total = seen + 1

    async with world.open_room("counter") as room:
        runs = [await room.start(add, number) for number in range(2)]
        for run in runs:
            await run.wait_returned()
    assert total == 2, f"two additions gave {total}"


async def parked(world: World) -> None:
    """Wait for what nobody does."""
    async with world.open_room("parked"):
        await trio.sleep_forever()


async def endless(_: World) -> None:
    """Go on for ever."""
    while True:  # noqa: ASYNC110  that is what it is about
        await trio.lowlevel.checkpoint()


async def patient(_: World) -> None:
    """Sleep for longer than any schedule lasts."""
    while True:
        await an_hour()


async def an_hour() -> None:
    await trio.sleep(3600)
