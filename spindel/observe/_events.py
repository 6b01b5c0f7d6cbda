"""The catalogue of events: what a room tells whoever watches it.

Events are copies of scalars. They never hold a function, an exception, a revision or another live thing, and no
message of a foreign error. `sequence` counts the events of one room incarnation without a gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    from uuid import UUID

    from spindel.ids import RunId

__all__ = [
    "RoomEvent",
    "RoomFenced",
    "RoomHeld",
    "RoomSealed",
    "RunCancelRequested",
    "RunFinished",
    "RunHeld",
    "RunProgress",
    "RunRecovered",
    "RunStarted",
]


@attrs.frozen
class RoomEvent:
    """The base of all events.

    Attributes:
        name: the event's name in logs and in JSON.
        sequence: its number in this incarnation, from 1, without gaps.
        at: wall time in UTC microseconds.
    """

    name: ClassVar[str] = ""
    sequence: int
    at: int


@attrs.frozen
class RunStarted(RoomEvent):
    """A Run was admitted: its row is stored, its body has not begun.

    Attributes:
        run_id: the Run.
        parent_id: its structural parent, None for a root Run.
        kind: its kind.
        actor: its actor.
    """

    name: ClassVar[str] = "run.started"
    run_id: RunId
    parent_id: RunId | None
    kind: str
    actor: str


@attrs.frozen
class RunCancelRequested(RoomEvent):
    """A Run was asked to stop, once, whoever asked and however often.

    Attributes:
        run_id: the Run.
        reason: why.
    """

    name: ClassVar[str] = "run.cancel-requested"
    run_id: RunId
    reason: str


@attrs.frozen
class RunFinished(RoomEvent):
    """A Run's outcome is stored and its execution lease is gone.

    Attributes:
        run_id: the Run.
        status: completed, failed, cancelled or waiting.
        reason: the stored reason, or None.
    """

    name: ClassVar[str] = "run.finished"
    run_id: RunId
    status: str
    reason: str | None


@attrs.frozen
class RunHeld(RoomEvent):
    """Something owed by or for a Run waits for an operator.

    Attributes:
        run_id: the Run.
        phase: the phase, launch kind or stage.
        code: what went wrong, a code or a class name.
        again: True if it was held before and its recovery failed; nothing said in between that it had ended.
    """

    name: ClassVar[str] = "run.held"
    run_id: RunId
    phase: str
    code: str
    again: bool = False


@attrs.frozen
class RunRecovered(RoomEvent):
    """A hold ended, mostly by what an operator did. Each hold is told so once, however it ended.

    A hold that was given up is told, too: else whoever counts holds would count it for ever.

    Attributes:
        run_id: the Run.
        phase: the phase, launch kind or stage that it was last told to be held at.
        action: `retry`; `acknowledge`; `withdraw`, when whoever waited for a launch that had not begun was cancelled;
            or `abandon`, which recovered nothing: what was held, and often the Runs above it, never finish.
    """

    name: ClassVar[str] = "run.recovered"
    run_id: RunId
    phase: str
    action: str


@attrs.frozen
class RunProgress(RoomEvent):
    """A Run told how far it is. Never stored.

    Attributes:
        run_id: the Run.
        done: how much is done, in units of the Run's choice.
        total: how much there is, None if unknown.
        message: a short line for a human.
    """

    name: ClassVar[str] = "run.progress"
    run_id: RunId
    done: float
    total: float | None
    message: str


@attrs.frozen
class RoomSealed(RoomEvent):
    """The room's block ended normally: no more root Runs."""

    name: ClassVar[str] = "room.sealed"


@attrs.frozen
class RoomFenced(RoomEvent):
    """The room admits only what was reserved before.

    Attributes:
        reason: why, such as `room-closing`.
    """

    name: ClassVar[str] = "room.fenced"
    reason: str


@attrs.frozen
class RoomHeld(RoomEvent):
    """The room's block can't end because of a hold; told again every `report_seconds`.

    Attributes:
        run_id: the Run that owes it.
        lease_id: its admission lease, if it is one.
        launch_id: the launch, if it is one.
        phase: the phase, launch kind or stage.
        code: what went wrong.
    """

    name: ClassVar[str] = "room.held"
    run_id: RunId
    lease_id: UUID | None
    launch_id: UUID | None
    phase: str
    code: str
