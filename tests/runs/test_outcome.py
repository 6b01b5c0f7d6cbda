"""How an end is decided and described: pure functions."""

from __future__ import annotations

from uuid import UUID

import pytest
import trio

from spindel.errors import RunCancelledError, RunFailedError, RunWaiting, RunWaitingError
from spindel.ids import RunId
from spindel.runs import Outcome
from spindel.runs._outcome import combine, decide, error_text, without_cancelled
from spindel.store import RunStatus

RUN = RunId(UUID(int=1))


@pytest.fixture
async def cancelled() -> trio.Cancelled:
    """A Cancelled as Trio makes it."""
    kept: list[trio.Cancelled] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            kept.append(error)
            raise
    return kept[0]


@pytest.mark.parametrize("value", [None, False, 0, "", 7])
def test_the_value_of_a_completed_run_is_given_as_it_is(value: object) -> None:
    assert Outcome(RUN, RunStatus.COMPLETED, value, None).unwrap() is value


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (RunStatus.FAILED, RunFailedError),
        (RunStatus.CANCELLED, RunCancelledError),
        (RunStatus.WAITING, RunWaitingError),
    ],
)
def test_any_other_end_is_an_error_that_names_run_and_reason(status: RunStatus, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{RUN}.*because") as caught:
        Outcome(RUN, status, None, None, "because").unwrap()

    assert caught.value.__cause__ is None


async def test_cancelled_leaves_count_nowhere(cancelled: trio.Cancelled) -> None:
    error = ValueError("x")
    mixed = BaseExceptionGroup("g", [cancelled, BaseExceptionGroup("h", [cancelled, error])])
    rest = without_cancelled(mixed)

    assert without_cancelled(cancelled) is None
    assert without_cancelled(BaseExceptionGroup("g", [cancelled])) is None
    assert without_cancelled(error) is error
    assert isinstance(rest, ExceptionGroup)
    assert rest.exceptions[0].exceptions == (error,)


def test_a_group_without_cancelled_stays_itself() -> None:
    group = ExceptionGroup("g", [ValueError("x")])

    assert without_cancelled(group) is group
    assert decide(group, None).error is group


def test_one_error_of_body_or_plain_task_stays_itself_and_several_are_a_group() -> None:
    body, plain = ValueError("body"), KeyError("plain")

    assert combine(None, ExceptionGroup("trio", [plain])) is plain
    together = combine(body, ExceptionGroup("trio", [plain]))
    assert isinstance(together, ExceptionGroup)
    assert together.exceptions == (body, plain)


async def test_only_cancelled_from_everywhere_is_a_cancelled(cancelled: trio.Cancelled) -> None:
    assert combine(cancelled, BaseExceptionGroup("trio", [cancelled])) is cancelled
    assert combine(None, BaseExceptionGroup("trio", [cancelled])) is None
    assert combine(cancelled, BaseExceptionGroup("trio", [error := ValueError("x")])) is error


def test_a_text_names_class_and_message_of_each_leaf_on_one_line() -> None:
    group = ExceptionGroup("g", [ValueError("one"), ExceptionGroup("h", [KeyError("two"), RuntimeError()])])

    assert error_text(group) == "ValueError: one; KeyError: 'two'; RuntimeError"
    assert error_text(None) is None


def test_a_text_is_bounded_and_ends_in_an_ellipsis() -> None:
    text = error_text(ValueError("x" * 3000))

    assert text is not None
    assert len(text) == 2000
    assert text.endswith("x…")
    assert error_text(ValueError("x" * 1988)) == "ValueError: " + "x" * 1988


@pytest.mark.parametrize(("message", "text"), [("a\0b", "a\\0b"), ("\ud800", "\\ud800"), ("ä🙂", "ä🙂")])
def test_a_text_fits_into_a_row(message: str, text: str) -> None:
    assert error_text(ValueError(message)) == f"ValueError: {text}"


def test_a_waiting_signal_counts_before_a_request_and_only_alone() -> None:
    signal = RunWaiting("for-rain")

    assert decide(signal, "stop").status is RunStatus.WAITING
    assert decide(ExceptionGroup("g", [signal]), None).reason == "for-rain"
    assert decide(ExceptionGroup("g", [signal, signal]), None).status is RunStatus.FAILED
