"""How this package waits, beyond Trio's own: parked tasks that refuse every abort, and one of several events.

A shield scope around each wait of a finishing Run costs more than the wait. Refusing the abort says the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from trio_util import wait_any

from spindel.store._executor import refuse_abort

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["park", "require_loop", "sleep_shielded", "wait_any"]


async def park(register: Callable[[Callable[[], None]], object]) -> None:
    """Sleep until the registered function is called.

    Args:
        register: gets the function that resumes this task; whoever has it must call it exactly once.

    Cancellation: none; it can't be cancelled.
    """
    task = trio.lowlevel.current_task()
    register(lambda: trio.lowlevel.reschedule(task))
    await trio.lowlevel.wait_task_rescheduled(refuse_abort)


def require_loop(call: str) -> None:
    """Refuse a call from a thread before it touches any state, which belongs to the loop.

    Raises:
        RuntimeError: there is no running loop here.
    """
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError(f"{call} was called outside the loop; in a thread use trio.from_thread.run_sync")


async def sleep_shielded(seconds: float) -> None:
    """Sleep on Trio's clock. Not cancellable; for retries of writes that must happen."""
    with trio.CancelScope(shield=True):
        await trio.sleep(seconds)
