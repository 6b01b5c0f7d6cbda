"""How a Run ended, and how that is decided from what its work did. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import attrs
import trio

from spindel.errors import InvalidRecordError, RunCancelledError, RunFailedError, RunWaiting, RunWaitingError
from spindel.ids import RunId
from spindel.store import ERROR_CHARACTERS_MAX, RunStatus, check_reason

__all__ = ["Decision", "Outcome", "combine", "decide", "error_text", "without_cancelled"]

T_co = TypeVar("T_co", covariant=True)


@attrs.frozen
class Outcome(Generic[T_co]):
    """The end of a Run.

    Attributes:
        run_id: the Run.
        status: completed, failed, cancelled or waiting.
        value: what the work returned, if completed.
        error: what the work raised, without `trio.Cancelled`; known to the process that ran it only.
        reason: the stored reason, such as `cancel-requested`, or None.
    """

    run_id: RunId
    status: RunStatus
    value: T_co | None
    error: BaseException | None
    reason: str | None = None

    def unwrap(self) -> T_co:
        """Give the value of a completed Run.

        Raises:
            RunFailedError: it failed; its own error is the cause.
            RunCancelledError: it was cancelled.
            RunWaitingError: it ended waiting.
        """
        if self.status is RunStatus.COMPLETED:
            return cast("T_co", self.value)
        if self.status is RunStatus.WAITING:
            raise RunWaitingError(self.run_id, self.reason)
        if self.status is RunStatus.CANCELLED:
            raise RunCancelledError(self.run_id, self.reason) from self.error
        raise RunFailedError(self.run_id, self.reason) from self.error


@attrs.frozen
class Decision:
    """What the end of the work means.

    Attributes:
        status: completed, failed, cancelled or waiting.
        reason: the reason to store, or None.
        error: the error without its `Cancelled` leaves, or None.
        interrupt: True if a `KeyboardInterrupt` or the like must leave through the room.
    """

    status: RunStatus
    reason: str | None
    error: BaseException | None
    interrupt: bool = False


def decide(problem: BaseException, cancel_reason: str | None) -> Decision:
    """Decide the outcome of work that raised.

    Args:
        problem: what it raised; a group counts without its `Cancelled` leaves.
        cancel_reason: why the Run was asked to stop, None if it wasn't.
    """
    error = without_cancelled(problem)
    if error is None:
        return Decision(RunStatus.CANCELLED, cancel_reason or "cancelled", None)
    leaves = _leaves(error)
    if any(not isinstance(leaf, Exception) for leaf in leaves):
        return Decision(RunStatus.FAILED, "interrupted", error, interrupt=True)
    signal = leaves[0]
    if len(leaves) == 1 and isinstance(signal, RunWaiting):
        return Decision(RunStatus.WAITING, _waiting_reason(signal), None)
    if cancel_reason is not None:
        return Decision(RunStatus.CANCELLED, cancel_reason, error)
    return Decision(RunStatus.FAILED, None, error)


def combine(problem: BaseException | None, plain: BaseException) -> BaseException | None:
    """Join the errors of body and plain tasks as a nursery would; a single one that isn't `Cancelled` stays itself.

    Cancelled plain tasks say nothing: a value of the body is one, whichever scope the request came through.
    """
    parts = _parts(plain)
    if problem is not None:
        parts.insert(0, problem)
    rest = without_cancelled(BaseExceptionGroup("the work of a run failed", parts))
    if rest is None:
        return problem
    several = _parts(rest)
    return several[0] if len(several) == 1 else rest


def without_cancelled(problem: BaseException) -> BaseException | None:
    """Take the `Cancelled` leaves out of a group; None if nothing else is in it."""
    if isinstance(problem, trio.Cancelled):
        return None
    if not isinstance(problem, BaseExceptionGroup):
        return problem
    cancelled, rest = cast("BaseExceptionGroup[BaseException]", problem).split(trio.Cancelled)
    # A group that holds none stays itself: whoever raised it may look for that very object.
    return cast("BaseException | None", problem if cancelled is None else rest)


def error_text(error: BaseException | None) -> str | None:
    """Describe an error for its row: class and message, of a group those of its leaves; bounded."""
    if error is None:
        return None
    text = "; ".join(_one_line(leaf) for leaf in _leaves(error))
    # A row must take it whatever an exception's message holds.
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[: ERROR_CHARACTERS_MAX - 1] + "…"


def _waiting_reason(signal: RunWaiting) -> str:
    """Give the reason, also of a subclass that lost it, or changed it to what no row may hold."""
    try:
        return check_reason(getattr(signal, "reason", None))
    except InvalidRecordError:
        return "waiting"


def _one_line(error: BaseException) -> str:
    try:
        message = str(error)
    except BaseException:  # noqa: ASYNC103, BLE001  a broken __str__ of a foreign class must not cost a Run its row
        message = "its message can't be shown"
    name = type(error).__qualname__
    return f"{name}: {message}" if message else name


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in _parts(cast("BaseException", error)) for leaf in _leaves(part)]


def _parts(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return list(cast("BaseExceptionGroup[BaseException]", error).exceptions)
