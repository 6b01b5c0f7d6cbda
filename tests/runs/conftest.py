"""What the tests of rooms and runs share: every store, and a way to act after every single step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest
import trio

from spindel.store import MemoryStore, SqliteStore
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from spindel.store import Store

STEPS_MAX = 5_000


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Every store, open. The one on disk writes in the loop, so that a test's turns are its own."""
    inner = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db", executor="inline")
    async with inner as opened:
        yield opened


@pytest.fixture
def faulty(store: Store) -> FaultyStore:
    """Every store, wrapped so that its writes can fail, wait and be counted."""
    return FaultyStore(store)


class Steps(trio.abc.Instrument):
    """Acts once, after so many steps of whatever task, counted from `arm`."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._action: Callable[[], object] | None = None
        self._problem: BaseException | None = None
        self.fired = False

    def arm(self, action: Callable[[], object]) -> None:
        """Count from here on."""
        self._action = action

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a step; the action falls between two steps, where any other task might have acted."""
        if self._action is None or self.fired:
            return
        self._left -= 1
        if self._left > 0:
            return
        self.fired = True
        try:
            self._action()
        except BaseException as problem:  # noqa: BLE001  Trio would only log what an instrument raises
            self._problem = problem

    def check(self) -> None:
        """Raise what the action raised."""
        if self._problem is not None:
            raise self._problem


class Sweep(Protocol):
    def __call__(self, scenario: Callable[[Steps], Awaitable[object]]) -> Awaitable[int]: ...


@pytest.fixture
def sweep() -> Sweep:
    """Run a scenario again and again, acting after its first step, then after its second, until it has no more."""

    async def run(scenario: Callable[[Steps], Awaitable[object]]) -> int:
        for number in range(1, STEPS_MAX):
            steps = Steps(number)
            trio.lowlevel.add_instrument(steps)
            try:
                await scenario(steps)
            finally:
                trio.lowlevel.remove_instrument(steps)
            steps.check()
            if not steps.fired:
                return number - 1
        raise AssertionError(f"the scenario took more than {STEPS_MAX} steps")

    return run
