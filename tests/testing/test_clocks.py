"""Clocks of tests: jumping over waits, and standing still while something real is under way."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from spindel.clock import foreign_work
from spindel.testing.clocks import START_MICROS, ManualWallClock, autojump_clock


class TestAutojumpClock:
    @pytest.fixture
    def clock(self) -> trio.testing.MockClock:
        return autojump_clock()

    async def test_it_jumps_over_waits(self, clock: trio.testing.MockClock) -> None:
        before = trio.current_time()
        await trio.sleep(50_000)

        assert trio.current_time() - before == 50_000

    async def test_it_stands_still_while_work_is_outside_the_loop(self, clock: trio.testing.MockClock) -> None:
        """A thread that takes its time meets no deadline; Trio's own clock would have jumped over it."""
        release = threading.Event()
        foreign = foreign_work()
        foreign.begin()
        with trio.move_on_after(1) as scope:
            async with trio.open_nursery() as nursery:

                async def work() -> None:
                    await trio.to_thread.run_sync(release.wait)
                    foreign.end()

                nursery.start_soon(work)
                # Only once every task waits could the clock jump; it must not, even then.
                await trio.testing.wait_all_tasks_blocked(0.01)
                threading.Timer(0.05, release.set).start()

        assert not scope.cancelled_caught
        before = trio.current_time()
        await trio.sleep(10)
        assert trio.current_time() - before == 10

    async def test_it_stands_still_until_the_last_work_has_come_back(self, clock: trio.testing.MockClock) -> None:
        foreign = foreign_work()
        foreign.begin()
        foreign.begin()
        assert clock.autojump_threshold == float("inf")
        foreign.end()
        assert clock.autojump_threshold == float("inf")
        foreign.end()

        assert clock.autojump_threshold == 0


def test_clock_of_each_run_listens_to_that_run() -> None:
    async def sleep() -> float:
        await trio.sleep(5)
        return trio.current_time()

    assert [trio.run(sleep, clock=autojump_clock()) for _ in range(2)] == [5, 5]


class TestManualWallClock:
    def test_it_moves_only_when_told(self) -> None:
        clock = ManualWallClock()

        assert clock.now_micros() == clock.now_micros() == START_MICROS
        clock.advance(1.5)
        assert clock.now_micros() == START_MICROS + 1_500_000
        clock.advance(-3)
        assert clock.now_micros() == START_MICROS - 1_500_000

    def test_it_follows_a_loop_clock(self) -> None:
        loop_clock = trio.testing.MockClock()
        loop_clock.jump(7)
        clock = ManualWallClock(100, follows=loop_clock)

        assert clock.now_micros() == 100
        loop_clock.jump(2)
        clock.advance(1)
        assert clock.now_micros() == 3_000_100
