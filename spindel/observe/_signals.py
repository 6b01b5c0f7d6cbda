"""Named points in the code that a test can wait for, instead of sleeping until they were probably passed.

Production code calls `signal`; without a listener that is one comparison. What listens is in `spindel.testing`, which
nothing may import, so the port between them lies here. It is global on purpose: a context variable would not reach
launches, which run in a fresh context, and a variable of the loop would not reach threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["listen_to_signals", "signal"]

_listener: Callable[[str, object], None] | None = None


def signal(name: str, subject: object = None) -> None:
    """Tell a listening test that a named point was reached.

    Args:
        name: the point, such as `store.committed`.
        subject: what it is about, such as a Run's id.
    """
    if _listener is not None:
        _listener(name, subject)


def listen_to_signals(listener: Callable[[str, object], None] | None) -> None:
    """Hear every signal of this process, from any thread; None stops it.

    Raises:
        RuntimeError: somebody listens already; two tests at once would take each other's signals.
    """
    global _listener  # noqa: PLW0603  one port for the process, as explained above
    if listener is not None and _listener is not None:
        raise RuntimeError("somebody listens to signals already; end that test first")
    _listener = listener
