"""What became of a root Run: facts, its exit code, and how they are printed."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from attrs import frozen

from spindel.cli._exit import ExitCode, code_of_signal
from spindel.cli._text import clip, describe_counts, printable, seconds
from spindel.codec import NotPortableError, encode_json
from spindel.errors import RunCancelledError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from spindel.ids import RunId
    from spindel.runs import HeldObligation

__all__ = ["Report", "describe_error", "describe_held", "describe_traceback"]

_VALUE_CHARACTERS_MAX: Final = 2_000
_PACKAGE: Final = str(Path(__file__).parent.parent)


@frozen(kw_only=True)
class Report:
    """What became of a root Run.

    Attributes:
        status: the stored one; `running` if the Run was given up before its outcome was stored.
        ended: False if it was given up, or its room was lost: nobody may say what became of its cleanup.
        settled: whether all evidence of it was there when it had returned.
        witnesses: which of `family`, `core` and `adapter` are in its row.
        runs: how many Runs of this opening, by stored status.
        value: what the function returned.
        error: what it raised, as known to this process, or what makes the outcome unknown.
        held: what was held, also what was given up.
    """

    run_id: RunId
    name: str
    status: str
    reason: str | None
    ended: bool
    settled: bool
    witnesses: Sequence[str]
    runs: Mapping[str, int]
    value: Any
    error: BaseException | None
    held: Sequence[HeldObligation]
    duration_seconds: float

    def exit_code(self, signal_number: int | None) -> int:
        """Give the exit code, knowing which signal came first, if any."""
        if self.held or not self.ended:
            return ExitCode.UNKNOWN
        match self.status:
            case "completed":
                return ExitCode.DONE
            case "failed":
                return ExitCode.FAILED
            case "cancelled":
                return ExitCode.FAILED if signal_number is None else code_of_signal(signal_number)
            case _:
                return ExitCode.UNKNOWN

    def as_json(self) -> str:
        """Write the object of `--json`."""
        value: dict[str, Any]
        try:
            value = {"value": msgspec.Raw(encode_json(self.value).encode())}
        except NotPortableError:
            value = {"value_repr": _repr(self.value)}
        report = {
            "run_id": str(self.run_id),
            "status": self.status,
            "settled": self.settled,
            "witnesses": list(self.witnesses),
            "runs": dict(sorted(self.runs.items())),
            **value,
            "error": None if self.error is None else describe_error(self.error),
            "duration_seconds": round(self.duration_seconds, 6),
        }
        return msgspec.json.encode(report).decode()

    def as_text(self) -> str:
        """Write the summary for people."""
        reason = f" ({self.reason})" if self.reason else ""
        state = "settled" if self.settled else "not settled"
        lines = [
            f"{self.status}{reason}: {self.name}, {seconds(self.duration_seconds)}, {state}",
            f"run:   {self.run_id}",
            f"runs:  {describe_counts(self.runs)}",
            f"witnesses: {', '.join(self.witnesses) or 'none'}",
        ]
        if self.value is not None:
            lines.append(f"value: {printable(_repr(self.value))}")
        return "\n".join(lines)

    def value_text(self) -> str | None:
        """Write the value alone, for `--quiet`: text as it is, data as JSON, anything else as Python shows it."""
        if self.value is None or isinstance(self.value, str):
            return self.value
        try:
            return encode_json(self.value)
        except NotPortableError:
            return _repr(self.value)


def describe_error(error: BaseException) -> str:
    """Name an error by class and message: of a group the first and how many more, of a Run the reason why it failed."""
    more = 0
    while True:
        if isinstance(error, BaseExceptionGroup):
            error, *others = _flatten(cast("BaseExceptionGroup[BaseException]", error))
            more += len(others)
        elif isinstance(error, RunFailedError | RunCancelledError) and error.__cause__ is not None:
            error = error.__cause__
        else:
            break
    try:
        message = str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:  # noqa: BLE001  a broken __str__ of the user's class must not hide the class
        message = "its message can't be shown"
    text = f"{type(error).__qualname__}: {message}" if message else type(error).__qualname__
    return f"{text} (and {more} more)" if more else text


def describe_traceback(error: BaseException) -> str:
    """Write where an error came from, beginning in the user's own code."""
    lines = "".join(traceback.format_exception(type(error), error, _own_part(error.__traceback__))).splitlines()
    return "\n".join(map(printable, lines))


def describe_held(held: HeldObligation) -> str:
    """Name something that is held."""
    what = ""
    if held.launch_id is not None:
        what = f", launch {held.launch_id}"
    elif held.lease_id is not None:
        what = f", lease {held.lease_id}"
    return f"run {held.run_id}{what}, at {held.phase}: {printable(held.code)}"


def _flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Give the errors of a group and of the groups in it, in order."""
    found: list[BaseException] = []
    left: list[BaseException] = [group]
    while left:
        error = left.pop()
        if isinstance(error, BaseExceptionGroup):
            left.extend(reversed(cast("BaseExceptionGroup[BaseException]", error).exceptions))
        else:
            found.append(error)
    return found


def _own_part(entered: TracebackType | None) -> TracebackType | None:
    part = entered
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        part = part.tb_next
    return part or entered


def _repr(value: object) -> str:
    try:
        return clip(repr(value), _VALUE_CHARACTERS_MAX)
    except Exception:  # noqa: BLE001  a broken __repr__ of the user's class must not hide the outcome
        return f"<{type(value).__qualname__}, whose repr() raises>"
