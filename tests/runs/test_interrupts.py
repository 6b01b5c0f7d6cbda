"""Ctrl-C while a room opens, works and ends."""

from __future__ import annotations

import signal

import trio

from spindel.runs import Run, open_room
from spindel.store import MemoryStore, RunQuery, RunStatus

STEPS_MAX = 500


class InterruptAt(trio.abc.Instrument):
    """Raises SIGINT in this very process before the n-th step of any task."""

    def __init__(self, number: int) -> None:
        self._left = number

    @property
    def fired(self) -> bool:
        return self._left <= 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)


async def leaf(run: Run[None]) -> None:
    await trio.lowlevel.checkpoint()


async def parent(run: Run[None]) -> None:
    run.start_soon(trio.lowlevel.checkpoint)
    await (await run.start_child(leaf)).wait_returned()


async def program(store: MemoryStore, interrupt: InterruptAt) -> None:
    trio.lowlevel.add_instrument(interrupt)
    async with open_room(store, name="main") as room:
        await (await room.start(parent)).wait_returned()


async def statuses(store: MemoryStore) -> set[RunStatus]:
    return {record.status for record in (await store.list_runs(RunQuery(room="main", limit=100))).runs}


def test_a_ctrl_c_at_any_step_leaves_as_itself_after_the_last_return() -> None:
    """R-29: wherever Ctrl-C strikes, in opening, work or end, every Run has a row that ended and it leaves ungrouped."""
    interrupted = number = 0
    while True:
        number += 1
        store, interrupt = MemoryStore(), InterruptAt(number)
        try:
            trio.run(program, store, interrupt)
        except KeyboardInterrupt:
            interrupted += 1
        if not interrupt.fired:
            break
        assert number < STEPS_MAX

        assert trio.run(statuses, store) <= {RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.FAILED}

    assert interrupted > 10
