"""Where a store's blocking work runs: in threads of its own, or right in the loop.

A commit waits for the disk. In production that happens in a thread, so the loop goes on; a thread hop costs about as
much as a quick disk's sync, and real threads are no part of a deterministic simulation, so the same work can run
inline, too. The rest of the store doesn't know the difference: it submits a piece of work and gets the result
delivered in the loop, pieces of one lane strictly in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

import outcome
import trio

from spindel.clock import foreign_work

__all__ = ["Executor", "InlineExecutor", "Lane", "ThreadExecutor", "choose_executor", "refuse_abort", "run_in_lane"]

T = TypeVar("T")


class Lane(Protocol):
    """Does pieces of blocking work, one at a time, in the order in which they were submitted."""

    def submit(self, work: Callable[[], T], deliver: Callable[[T], object]) -> None:
        """Run `work`, then `deliver(result)` in the loop. Called in the loop; never waits for a thread.

        `work` must not raise. An inline lane delivers before this returns.
        """
        ...

    def close(self) -> None:
        """End the lane. Everything submitted was delivered before."""
        ...


class Executor(Protocol):
    """Opens lanes for a store. The port by which a test or a program chooses where blocking work runs."""

    def open_lane(self, name: str) -> Lane:
        """Open a lane; called in the loop that the results go to."""
        ...


class ThreadExecutor:
    """One thread for each lane: the loop goes on while the disk is waited for."""

    def open_lane(self, name: str) -> Lane:
        """Start the lane's thread."""
        return _ThreadLane(name, trio.lowlevel.current_trio_token())


class InlineExecutor:
    """Work runs in the loop and stops every task meanwhile: for simulations, tests and very quick disks."""

    def open_lane(self, name: str) -> Lane:  # noqa: ARG002  there is no thread to name
        """Give a lane that needs nothing."""
        return _InlineLane()


class _InlineLane:
    __slots__ = ()

    def submit(self, work: Callable[[], T], deliver: Callable[[T], object]) -> None:
        deliver(work())

    def close(self) -> None:
        pass


class _ThreadLane:
    __slots__ = ("_queue", "_thread", "_token")

    def __init__(self, name: str, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], object]] | None] = queue.SimpleQueue()
        # The lane's owner always joins the thread. It is a daemon for the one case in which nobody can: a loop that
        # broke down. The interpreter would wait for ever for a thread that waits for work; SQLite's file is safe
        # whenever a process ends.
        self._thread = threading.Thread(target=self._run, name=f"spindel {name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], deliver: Callable[[T], object]) -> None:
        self._queue.put((work, deliver))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, deliver = item
            result = work()
            try:
                self._token.run_sync_soon(deliver, result)
            except trio.RunFinishedError:
                return
            del item, work, deliver, result


_EXECUTORS: Final[dict[str, Callable[[], Executor]]] = {"thread": ThreadExecutor, "inline": InlineExecutor}


def choose_executor(executor: Literal["thread", "inline"] | Executor) -> Executor:
    """Give the executor of that name, or the one that was passed.

    Raises:
        ValueError: there is none of that name.
    """
    if not isinstance(executor, str):
        return executor
    if executor not in _EXECUTORS:
        raise ValueError(f"executor {executor!r} is neither 'thread' nor 'inline', nor an Executor object")
    return _EXECUTORS[executor]()


def refuse_abort(_raise_cancel: object) -> trio.lowlevel.Abort:
    """Refuse to be cancelled while parked: what was handed over happens, so its result must be heard."""
    return trio.lowlevel.Abort.FAILED


async def run_in_lane(lane: Lane, fn: Callable[..., T], *args: Any, stop: Callable[[], object] | None = None) -> T:
    """Run `fn(*args)` in a lane and wait for it.

    Cancellation: it goes on waiting. `stop`, if there is one, is called once and may make `fn` end sooner; else keep
    `fn` short, or check before.
    """
    task = trio.lowlevel.current_task()
    foreign = foreign_work()

    def deliver(result: outcome.Outcome[T]) -> None:
        foreign.end()
        trio.lowlevel.reschedule(task, result)

    def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
        if stop is not None:
            stop()
        return trio.lowlevel.Abort.FAILED

    foreign.begin()
    # Not submitted from here: an inline lane would resume this task before it is parked.
    token = trio.lowlevel.current_trio_token()
    token.run_sync_soon(lane.submit, partial(outcome.capture, fn, *args), deliver)
    result: T = await trio.lowlevel.wait_task_rescheduled(abort)
    return result
