"""Calling an async function in another context than the task's own.

A Job's work runs in the context of whoever started it; everything after runs in the room's. One task walks both, so
the coroutine of a callback is stepped inside the other context: its `ContextVar`s, and those of what it starts, are
the room's, while Trio goes on seeing one task.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from contextvars import Context

__all__ = ["call_in"]

R = TypeVar("R")


async def call_in(context: Context, fn: Callable[..., Awaitable[R]], *args: Any) -> R:
    """Await `fn(*args)` inside a context, from its first step to its last.

    Raises:
        BaseException: what `fn` raised.
    """

    async def call() -> R:
        return await fn(*args)

    return await _step(context, call())


@types.coroutine
def _step(context: Context, coroutine: Coroutine[Any, Any, R]) -> Generator[Any, Any, R]:
    step: Callable[..., Any] = coroutine.send
    given: Any = None
    while True:
        try:
            asked = context.run(step, given)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        try:
            given = yield asked
            step = coroutine.send
        except BaseException as error:  # noqa: ASYNC103, BLE001  thrown into the coroutine, which decides
            given = error
            step = coroutine.throw
