"""An operator who does what operators do, in no good order: looks at what is held, and acts on one of it at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, cast

import trio

from spindel.errors import SpindelError
from spindel.ids import RunId
from spindel.operator import abandon_held, reconcile_settlement, recover, recover_launch, recovery_state
from spindel.runs._states import HoldKind, LeasePhase
from spindel.testing.simulation._history import Operated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random  # noqa: TID251  for annotations

    from spindel.runs import Room
    from spindel.runs._holds import Hold
    from spindel.testing.simulation._history import History

__all__ = ["operate"]

Action = Literal["retry", "acknowledge"]

_PATIENCE: Final = 40
"""After so many attempts an operator gives everything up, so that a schedule ends."""


async def operate(room: Room, random: Random, history: History) -> None:
    """Take up whatever is held in a room, at random, until cancelled.

    It retries, attests, recovers launches, acts twice at once, goes away while it acts, and now and then gives up
    everything that is held. It reads first, so what it acts on may have changed.
    """
    attempts = 0
    while True:
        while not room.holds.present():
            await room.holds.changed.wait()
        await trio.sleep(random.expovariate(0.5))
        holds = room.holds.present()
        if not holds:
            continue
        attempts += 1
        if attempts > _PATIENCE or random.random() < 0.06:
            for facts in room.held():
                history.add(Operated(facts.run_id, facts.phase, "abandon"))
            abandon_held(room)
            continue
        hold = random.choice(holds)
        action: Action = "retry" if random.random() < 0.8 else "acknowledge"
        act = _read(room, hold, action, history)
        with trio.move_on_after(10.0 if random.random() < 0.8 else random.random() / 1000):
            async with trio.open_nursery() as nursery:
                if random.random() < 0.1:
                    nursery.start_soon(_attempt, act, history)
                await _attempt(act, history)


def _read(room: Room, hold: Hold, action: Action, history: History) -> Callable[[], Awaitable[object]]:
    """Read what is held now, and give what acts on exactly that."""
    run_id = hold.entry.run_id
    seen = Operated(RunId(run_id), hold.phase, action)
    revision = hold.revision
    if hold.kind is HoldKind.LAUNCH and hold.launch_id is not None and not _is_job(hold):
        launch_id = hold.launch_id

        async def act() -> object:
            history.add(Operated(run_id, seen.phase, "retry"))
            return await recover_launch(room, launch_id, revision=revision)

    elif hold.kind is HoldKind.LEASE:
        lease_id, phase = hold.entry.lease_id, LeasePhase(hold.phase)

        async def act() -> object:
            history.add(seen)
            return await reconcile_settlement(
                room, run_id, lease_id=lease_id, phase=phase, revision=revision, action=action
            )

    else:

        async def act() -> object:
            locator = recovery_state(room, run_id).locator
            history.add(seen)
            return await recover(room, locator, action)

    return act


def _is_job(hold: Hold) -> bool:
    return cast("Any", hold.entry.finisher) is not None


async def _attempt(act: Callable[[], Awaitable[object]], history: History) -> None:
    try:
        await act()
    except SpindelError as error:
        history.note(f"the operator is told {type(error).__name__}")
