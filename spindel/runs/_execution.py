"""A Run's own task: the body in its scope, the plain tasks, the decision, the end.

The task never raises into its parent's nursery: whatever the work did becomes the Run's outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

from spindel.runs._cancelling import request_cancel
from spindel.runs._finishing import finish, set_verdict
from spindel.runs._frontier import enter_run
from spindel.runs._outcome import Decision, combine, decide
from spindel.store import RunStatus

if TYPE_CHECKING:
    from spindel.runs._entry import Entry

__all__ = ["run_to_end"]

_COMPLETED: Final = Decision(RunStatus.COMPLETED, None, None)


@trio.lowlevel.enable_ki_protection
async def run_to_end(entry: Entry) -> None:
    """The task of an admitted Run."""
    enter_run(entry)
    problem: BaseException | None = None
    assert entry.scope is not None
    with entry.scope:
        # Caught inside the scope, so that the decision falls in the same turn as the end of the body.
        try:
            entry.value = await _work(entry)
        except BaseException as error:  # noqa: ASYNC103, BLE001  the Run's outcome; an interrupt leaves through the room
            problem = error
    entry.fn = None
    entry.args = ()
    if entry.host is not None:
        plain = await entry.host.join_tasks(cancel=problem is not None)
        if plain is not None:
            problem = _combine(problem, plain)
    _work_over(entry, problem)
    # The traceback of a stored problem holds this frame; without this line that would be a cycle.
    problem = None
    await finish(entry)


@trio.lowlevel.disable_ki_protection
async def _work(entry: Entry) -> Any:
    """The body: the one place in a Run's task where Ctrl-C may strike."""
    assert entry.fn is not None
    return await entry.fn(entry.handle(), *entry.args)


def _combine(problem: BaseException | None, plain: BaseException) -> BaseException | None:
    try:
        return combine(problem, plain)
    except BaseException as broken:  # noqa: ASYNC103, BLE001  a foreign group that can't be split is a failure like any
        return broken  # noqa: ASYNC104  decided in this task


def _decide(problem: BaseException, cancel_reason: str | None) -> Decision:
    try:
        return decide(problem, cancel_reason)
    except BaseException as broken:  # noqa: ASYNC103, BLE001  as above
        return Decision(RunStatus.FAILED, None, broken)  # noqa: ASYNC104  as above


def _work_over(entry: Entry, problem: BaseException | None) -> None:
    """Decide and seal, in one turn."""
    decision = _COMPLETED if problem is None else _decide(problem, entry.cancel_reason)
    entry.seal()
    family = entry.family
    if entry.on_child_failure == "cancel" and family is not None:
        # Decided when the family has returned; until then a child may still be the first to fail.
        entry.work = decision
        if decision.status is RunStatus.FAILED and entry.first_failure is None:
            entry.first_failure = []
            request_cancel(family.leases.values(), "work-failed")
    else:
        set_verdict(entry, decision)
    if decision.interrupt:
        assert decision.error is not None
        # After the decision, so that the request to all Runs doesn't meet this one as if it could still obey.
        entry.room.interrupt(decision.error)
