"""What is stored and read: frozen records, exactly as in the tables."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import attrs

from spindel.errors import InvalidRecordError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from spindel.codec import JsonValue
    from spindel.ids import RunId

__all__ = [
    "ENDED",
    "ERROR_CHARACTERS_MAX",
    "FAMILY_VERSION",
    "JOB_VERSION",
    "LIMIT_MAX",
    "JobIdentity",
    "RoomRecord",
    "RunCursor",
    "RunPage",
    "RunQuery",
    "RunRecord",
    "RunStatus",
    "check_limit",
    "check_reason",
    "check_room_name",
]

FAMILY_VERSION: Final = 1
LIMIT_MAX: Final = 100
ERROR_CHARACTERS_MAX: Final = 2000
_ROOM_NAME: Final = re.compile(r"[a-z0-9._/-]{1,128}")
_REASON: Final = re.compile(r"[a-z0-9-]{1,64}")


class RunStatus(StrEnum):
    """How far a Run is. `cancelling` is a live Run's own view and is never stored."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """True for completed, failed and cancelled: the row has an end time."""
        return self in ENDED


ENDED: Final = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED})


@attrs.frozen(kw_only=True)
class RunRecord:
    """One row of `runs`. Times are UTC microseconds.

    Attributes:
        id: the Run; its identity is everything up to `started_at`, which never changes.
        family_version: None for a row from before families; such a row is never settled.
        status: never `cancelling`.
        reason: `[a-z0-9-]{1,64}`, such as `orphaned`, or None.
        error: text only, at most 2,000 characters.
        family_return_ack, job_core_cleanup_ack, job_adapter_cleanup_ack: the witnesses, or None.
        admission_disposal: `discarded` once a fenced admission's things are gone.
        caused_by: ids of Runs whose outcome this one consumed, sorted; filled by `load_run` only.
    """

    id: RunId
    room: str
    incarnation: UUID
    kind: str
    actor: str
    parent_id: RunId | None
    trigger_id: UUID | None
    provenance: Mapping[str, JsonValue]
    family_version: int | None
    job_version: int | None
    job_key: str | None
    job_offer: UUID | None
    job_experiment: UUID | None
    created_at: int
    started_at: int
    status: RunStatus
    reason: str | None
    error: str | None
    ended_at: int | None
    job_result_state: str | None
    job_scorecard: UUID | None
    family_return_ack: UUID | None
    job_core_cleanup_ack: UUID | None
    job_adapter_cleanup_ack: UUID | None
    admission_disposal: str | None
    updated_at: int
    caused_by: tuple[RunId, ...] = ()


@attrs.frozen(kw_only=True)
class RoomRecord:
    """One row of `rooms`.

    Attributes:
        owner: the recorded owning process (`pid`, `host`, `since`, ...), or None once closed.
    """

    name: str
    incarnation: UUID
    epoch: int
    owner: Mapping[str, JsonValue] | None
    opened_at: int
    closed_at: int | None


JOB_VERSION: Final = 1


@attrs.frozen
class JobIdentity:
    """What makes a Run a Job, in its first row; immutable.

    Attributes:
        key: what it was started under, or None.
        offer: hash of the whole invocation reference that asked for it, or None.
        experiment: content id of what it runs, or None.
    """

    key: str | None = None
    offer: UUID | None = None
    experiment: UUID | None = None


@attrs.frozen
class RunCursor:
    """Where a page ended: the next one starts below it."""

    started_at: int
    id: RunId


@attrs.frozen(kw_only=True)
class RunQuery:
    """Which Runs to list: newest start first, ids descending among equal starts; filtered before the limit.

    Attributes:
        status: only Runs of this stored status.
        parent: only its direct children.
        under: only this Run and its structural descendants.
        before: only what comes after this cursor in the order of the list.
        jobs: only Jobs.
        limit: 1 to 100.
    """

    room: str
    status: RunStatus | None = None
    parent: RunId | None = None
    under: RunId | None = None
    before: RunCursor | None = None
    jobs: bool = False
    limit: int = 20


@attrs.frozen
class RunPage:
    """A page of Runs and where the next one starts, None at the end."""

    runs: tuple[RunRecord, ...]
    next: RunCursor | None


def check_room_name(name: object) -> str:
    """Give the name back, as a plain text also if it is a member of an enumeration.

    Raises:
        InvalidRecordError: it isn't 1 to 128 of `[a-z0-9._/-]`.
    """
    if not isinstance(name, str) or _ROOM_NAME.fullmatch(name) is None:
        raise InvalidRecordError("room", f"{name!r} is not 1 to 128 characters of [a-z0-9._/-]")
    return str.__str__(name)


def check_reason(reason: object) -> str:
    """Give the reason back, as a plain text also if it is a member of an enumeration.

    Raises:
        InvalidRecordError: it isn't 1 to 64 of `[a-z0-9-]`.
    """
    if not isinstance(reason, str) or _REASON.fullmatch(reason) is None:
        raise InvalidRecordError("reason", f"{reason!r} is not 1 to 64 characters of [a-z0-9-]")
    return str.__str__(reason)


def check_limit(limit: object) -> int:
    """Give the limit back.

    Raises:
        InvalidRecordError: it isn't an int from 1 to 100.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= LIMIT_MAX:
        raise InvalidRecordError("limit", f"{limit!r} is not a number from 1 to {LIMIT_MAX}")
    return limit
