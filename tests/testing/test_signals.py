"""Named points: they cost nothing unheard, and a test that hears them waits for facts."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from spindel.observe._signals import signal
from spindel.testing.signals import open_signals


def test_signal_that_nobody_hears_is_nothing() -> None:
    signal("point", object())


async def test_signal_before_and_after_the_wait_is_heard() -> None:
    with open_signals() as signals:
        signal("point", 1)
        assert await signals.wait("point") == 1
        async with trio.open_nursery() as nursery:
            heard: list[object] = []

            async def wait() -> None:
                heard.append(await signals.wait("point"))

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            signal("other", 2)
            await trio.testing.wait_all_tasks_blocked()
            assert heard == []
            signal("point", 3)

    assert heard == [3]
    assert signals.seen == [("point", 1), ("other", 2), ("point", 3)]
    assert (signals.count("point"), signals.count("never")) == (2, 0)


async def test_each_signal_is_given_to_one_wait_in_order() -> None:
    with open_signals() as signals:
        for number in range(3):
            signal("point", number)
        first = [await signals.wait("point") for _ in range(2)]
        with trio.CancelScope() as scope:
            scope.cancel()
            await signals.wait("point")

        assert first == [0, 1]
        assert scope.cancelled_caught
        assert await signals.wait("point") == 2


async def test_signals_of_a_thread_are_heard() -> None:
    with open_signals() as signals:
        await trio.to_thread.run_sync(signal, "point", "from a thread")

        assert await signals.wait("point") == "from a thread"


async def test_second_listener_is_refused_and_a_later_one_is_not() -> None:
    with open_signals(), pytest.raises(RuntimeError, match="already"), open_signals():
        pass
    signal("point", "unheard")
    with open_signals() as signals:
        signal("point", "heard")

        assert await signals.wait("point") == "heard"
        assert signals.count("point") == 1
