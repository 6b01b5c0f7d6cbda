"""The rules about one row, in a table of small functions, each of which gives the sentence that describes its breach."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from spindel.codec import decode_json
from spindel.errors import InvalidRecordError
from spindel.ids import WitnessStage, witness_text
from spindel.store._records import ENDED, ERROR_CHARACTERS_MAX, RunStatus, check_reason

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OWN_COLUMNS", "RULES", "UUID_FORM", "Row"]

UUID_FORM: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class Row(NamedTuple):
    """A row of `runs` as it is stored, ids as texts, and what it refers to as far as that is there."""

    id: str
    room: str
    incarnation: str
    parent_id: str | None
    trigger_id: str | None
    provenance: str
    family_version: int | None
    job_version: int | None
    job_offer: str | None
    job_experiment: str | None
    created_at: int
    started_at: int
    status: str
    reason: str | None
    error: str | None
    ended_at: int | None
    job_result_state: str | None
    job_scorecard: str | None
    family_return_ack: str | None
    job_core_cleanup_ack: str | None
    job_adapter_cleanup_ack: str | None
    admission_disposal: str | None
    updated_at: int
    # Of the room and of the parent, as far as there are any.
    room_incarnation: str | None
    parent_room: str | None
    parent_incarnation: str | None
    parent_status: str | None
    parent_reason: str | None
    parent_ended_at: int | None
    parent_witness: str | None

    @property
    def fence(self) -> bool:
        return self.status == RunStatus.FAILED and self.reason == "admission-failed"


_REASONS_OF_FAILED: Final = frozenset({"admission-failed", "orphaned", "child-failed", "interrupted"})
OWN_COLUMNS: Final = Row._fields[: Row._fields.index("room_incarnation")]


# -- rules of one row: each gives what is wrong, or None ---------------------------------------------------------------


def _ids(row: Row) -> str | None:
    values = (
        row.id,
        row.incarnation,
        row.parent_id,
        row.trigger_id,
        row.job_offer,
        row.job_experiment,
        row.job_scorecard,
    )
    wrong = next((value for value in values if value is not None and not UUID_FORM.fullmatch(value)), None)
    return None if wrong is None else f"{wrong!r} is no UUID in canonical form"


def _end_time(row: Row) -> str | None:
    if row.status not in ENDED and row.status not in {RunStatus.RUNNING, RunStatus.WAITING}:
        return f"{row.status!r} is no status that is ever stored"
    if (row.ended_at is not None) != (row.status in ENDED):
        return f"it is {row.status} and its end time is {row.ended_at}"
    return None


def _times(row: Row) -> str | None:
    if not row.created_at <= row.started_at <= row.updated_at:
        return f"created {row.created_at}, started {row.started_at}, updated {row.updated_at}: time went backwards"
    if row.ended_at is not None and not row.started_at <= row.ended_at <= row.updated_at:
        return f"started {row.started_at}, ended {row.ended_at}, updated {row.updated_at}: time went backwards"
    return None


def _outcome(row: Row) -> str | None:
    if row.status == RunStatus.RUNNING and (row.reason is not None or row.error is not None):
        return "it is running and has a reason or an error"
    if row.reason in _REASONS_OF_FAILED and row.status not in {RunStatus.FAILED, RunStatus.RUNNING}:
        return f"it is {row.status} with the reason {row.reason}, which only a failed Run has"
    if row.ended_at is None and (row.job_result_state is not None or row.job_scorecard is not None):
        return "it has not ended and has a Job's result"
    if row.reason == "orphaned" and row.job_offer is not None and row.job_result_state != "unavailable":
        return "it was orphaned with an offer, so its result should be unavailable"
    return None


def _texts(row: Row) -> str | None:
    try:
        if row.reason is not None:
            check_reason(row.reason)
    except InvalidRecordError as problem:
        return str(problem)
    if row.error is not None and len(row.error) > ERROR_CHARACTERS_MAX:
        return f"its error has {len(row.error)} characters, more than {ERROR_CHARACTERS_MAX}"
    return None


def _provenance(row: Row) -> str | None:
    try:
        value = decode_json(row.provenance)
    except ValueError:
        return "its provenance is no JSON"
    return None if isinstance(value, dict) else "its provenance is no JSON object"


def _witness_values(row: Row) -> str | None:
    for stage, value in (
        (WitnessStage.FAMILY_RETURN, row.family_return_ack),
        (WitnessStage.CORE_CLEANUP, row.job_core_cleanup_ack),
        (WitnessStage.ADAPTER_CLEANUP, row.job_adapter_cleanup_ack),
    ):
        if value is not None and value != witness_text(stage, row.id):
            return f"its {stage} witness is {value}, which is not the witness of that stage and Run"
    return None


def _witness_order(row: Row) -> str | None:
    if row.family_return_ack is not None and row.family_version is None:
        return "it has a family witness and no family version"
    if row.family_return_ack is not None and row.job_version is None and not _returned(row):
        return "it has a family witness although it never stored an end of its own"
    if row.job_adapter_cleanup_ack is not None and (row.job_core_cleanup_ack is None or row.ended_at is None):
        return "it has the adapter's witness without the core's, or before its end"
    return None


def _returned(row: Row) -> bool:
    """True if the Run itself stored how it ended, as a plain one does in the write that brings the witness."""
    return row.status != RunStatus.RUNNING and row.reason != "orphaned"


def _fence(row: Row) -> str | None:
    marks = (
        row.family_return_ack,
        row.job_core_cleanup_ack,
        row.job_adapter_cleanup_ack,
        row.job_result_state,
        row.job_scorecard,
    )
    if row.fence and any(mark is not None for mark in marks):
        return "its admission was fenced, so it never ran, and yet it has a witness or a result"
    return None


def _disposal(row: Row) -> str | None:
    if row.admission_disposal is None or (row.fence and row.admission_disposal == "discarded"):
        return None
    return f"it has the disposal {row.admission_disposal!r}, which only a fenced admission has, as 'discarded'"


def _parent(row: Row) -> str | None:
    if row.parent_id is None:
        return None
    if row.parent_status is None:
        return f"its parent {row.parent_id} is not in the file"
    if (row.parent_room, row.parent_incarnation) != (row.room, row.incarnation):
        return f"its parent {row.parent_id} is of another room or opening"
    if row.parent_status == RunStatus.FAILED and row.parent_reason == "admission-failed":
        return f"its parent {row.parent_id} was fenced and never ran"
    return None


def _outlived_parent(row: Row) -> str | None:
    # Of one opening: orphans of an earlier one are adopted in any order.
    if row.status == RunStatus.RUNNING and row.parent_status not in {None, RunStatus.RUNNING}:
        return f"it is running although its parent {row.parent_id} is {row.parent_status}"
    return None


def _after_parent(row: Row) -> str | None:
    # A parent's end is dated after its family was joined, and a room's times never go backwards.
    if row.parent_witness is None or row.parent_ended_at is None:
        return None
    if max(row.started_at, row.ended_at or 0) > row.parent_ended_at:
        return f"it started or ended after its parent {row.parent_id}, whose witness says that its family had returned"
    return None


RULES: Final[tuple[tuple[str, Callable[[Row], str | None]], ...]] = (
    ("id-form", _ids),
    ("end-time", _end_time),
    ("times", _times),
    ("outcome", _outcome),
    ("text-form", _texts),
    ("provenance", _provenance),
    ("witness-value", _witness_values),
    ("witness-order", _witness_order),
    ("fence-executed", _fence),
    ("disposal", _disposal),
    ("parent", _parent),
    ("outlived-parent", _outlived_parent),
    ("after-parent", _after_parent),
)
