"""Rules that no schedule may break: told of a history's records one by one, each says when it is broken.

Subclass `Invariant` for a rule of your own, and pass it beside those of `INVARIANTS`:

    class StockIsNeverNegative(Invariant):
        def noted(self, text: str) -> None:
            if text.startswith("stock -"):
                self.fail(text)

    simulate(program, invariants=[*INVARIANTS, StockIsNeverNegative])

Names of functions that a program records for its Runs mean: `construct`, `body`, `task ...`, `native ...` and `core`
belong before the outcome, `adapter` before the lease goes, `publish` after it and before the parent's outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from spindel.store import Confirmation, Together
from spindel.testing.simulation._history import (
    Answered,
    Called,
    Closed,
    Confirmed,
    Happened,
    Issued,
    Noted,
    Observed,
    Operated,
    Recorded,
    Restarted,
    Returned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.observe import RoomEvent
    from spindel.runs import SettlementReport
    from spindel.store import RunRecord
    from spindel.testing.simulation._history import History

__all__ = ["Invariant", "InvariantError", "check_invariants", "flat"]


class InvariantError(AssertionError):
    """A rule was broken.

    Attributes:
        rule: its name.
    """

    def __init__(self, rule: str, what: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {what}")


class Invariant:
    """A rule over a history. Made anew for each history; whatever isn't overridden is no concern of it.

    A mutation that holds others is told as those.
    """

    def fail(self, what: str) -> NoReturn:
        """Say that the rule is broken.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(type(self).__name__, what)

    def issued(self, number: int, mutation: Any) -> None:
        """Hear that a mutation went to the store."""

    def stored(self, mutation: Any) -> None:
        """Hear that a mutation was acknowledged, or read back."""

    def answered(self, number: int, answer: str) -> None:
        """Hear what became of a write: `stored`, `refused` or `uncertain`."""

    def happened(self, room: str, event: RoomEvent) -> None:
        """Hear an event."""

    def called(self, run_id: RunId, function: str) -> None:
        """Hear that a function of the program was entered for a Run."""

    def returned(self, run_id: RunId, function: str, error: str | None) -> None:
        """Hear that it was left, and the class of what it raised."""

    def operated(self, run_id: RunId, phase: str, action: str) -> None:
        """Hear that an operator acts on what is held."""

    def observed(self, report: SettlementReport) -> None:
        """Hear what somebody saw of a Run's settlement."""

    def noted(self, text: str) -> None:
        """Hear a note of the program."""

    def closed(self, room: str, state: str) -> None:
        """Hear that a room's block was left."""

    def restarted(self) -> None:
        """Hear that the program is started again."""

    def ended(self, rows: Mapping[UUID, RunRecord]) -> None:
        """Look at the rows at the end, if they were read."""


def check_invariants(history: History, rules: Iterable[type[Invariant]]) -> None:
    """Tell rules what happened, in order.

    Args:
        history: what happened.
        rules: such as `INVARIANTS`.

    Raises:
        InvariantError: the first that is broken.
    """
    made = [rule() for rule in rules]
    for record in history.records:
        tell = _TELL.get(type(record))
        if tell is not None:
            for rule in made:
                tell(rule, record)
    if history.rows is not None:
        for rule in made:
            rule.ended(history.rows)


def flat(mutation: Any) -> Iterator[Any]:
    """Give a mutation, or those that it holds."""
    if isinstance(mutation, Together):
        for inner in mutation.mutations:
            yield from flat(inner)
    else:
        yield mutation


def _tell_issued(rule: Invariant, record: Issued) -> None:
    for mutation in flat(record.mutation):
        rule.issued(record.number, mutation)


def _tell_answered(rule: Invariant, record: Answered) -> None:
    rule.answered(record.number, record.answer)
    if record.answer == "stored":
        for mutation in flat(record.mutation):
            rule.stored(mutation)


def _tell_confirmed(rule: Invariant, record: Confirmed) -> None:
    if record.confirmation is Confirmation.PRESENT:
        for mutation in flat(record.mutation):
            rule.stored(mutation)


_TELL: dict[type[Recorded], Callable[[Invariant, Any], None]] = {
    Issued: _tell_issued,
    Answered: _tell_answered,
    Confirmed: _tell_confirmed,
    Happened: lambda rule, record: rule.happened(record.room, record.event),
    Called: lambda rule, record: rule.called(record.run_id, record.function),
    Returned: lambda rule, record: rule.returned(record.run_id, record.function, record.error),
    Operated: lambda rule, record: rule.operated(record.run_id, record.phase, record.action),
    Observed: lambda rule, record: rule.observed(record.report),
    Noted: lambda rule, record: rule.noted(record.text),
    Closed: lambda rule, record: rule.closed(record.room, record.state),
    Restarted: lambda rule, _: rule.restarted(),
}
