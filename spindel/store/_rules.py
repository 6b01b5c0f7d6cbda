"""What no record may hold, whichever store keeps it: the check of a mutation before it is queued.

Mutations are Structs that don't check their fields when they are made, and a row that holds a function or a task would
be found out only where it is bound to a statement, or never. So every store calls `check_mutation` first. The types of
a mutation's fields are looked at as one tuple, which is right almost always because an equal one was right before.

What depends on stored rows is not here: those rules hold inside the serialized turn only.
"""

from __future__ import annotations

import types
import typing
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from msgspec.structs import astuple

from spindel.codec import decode_json
from spindel.errors import InvalidRecordError
from spindel.ids import WitnessStage, witness_id
from spindel.store._mutations import (
    AdmitRun,
    AdoptOrphans,
    AppendWitnesses,
    FenceAdmission,
    FinishRun,
    RecordCauses,
    RecordDisposal,
    Together,
)
from spindel.store._records import ENDED, ERROR_CHARACTERS_MAX, RunStatus, check_reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.store._mutations import Mutation

__all__ = ["ADOPTED_MAX", "OUTCOMES", "check_mutation", "witnesses_valid"]

OUTCOMES: Final = ENDED | {RunStatus.WAITING}
"""What a Run can end as; `waiting` ends it without an end time."""

ADOPTED_MAX: Final = 500
"""How many orphans one mutation adopts at most, so that a batch stays short."""

_DISPOSALS: Final = frozenset({"discarded"})
_INT_END: Final = 2**63


def check_mutation(mutation: Mutation[Any]) -> None:
    """Check that a mutation holds only what its row may hold.

    A mutation of another part is left to that part.

    Raises:
        InvalidRecordError: a field holds something else; the error names it.
    """
    kind = type(mutation)
    shapes = _known_shapes.get(kind)
    if shapes is None:
        return
    shape = tuple(map(type, astuple(mutation)))  # type: ignore[arg-type]
    if shape not in shapes:
        _check_types(kind, shape)
        shapes.add(shape)
    _value_checks[kind](mutation)


def witnesses_valid(mutation: AppendWitnesses) -> bool:
    """Tell whether each value is the witness of its stage and this Run; no database of ours can compute that."""
    return all(
        value is None or value == witness_id(stage, mutation.id)
        for stage, value in (
            (WitnessStage.FAMILY_RETURN, mutation.family),
            (WitnessStage.CORE_CLEANUP, mutation.core),
            (WitnessStage.ADAPTER_CLEANUP, mutation.adapter),
        )
    )


def _allowed_types(hint: object) -> frozenset[type]:
    """Give the exact types that a field with this annotation may hold."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return frozenset(kind for option in typing.get_args(hint) for kind in _allowed_types(option))
    if origin is not None:
        return frozenset({typing.cast("type", origin)})
    if hint is str:  # members of an enumeration of texts are stored as their text
        return frozenset({str, RunStatus})
    return frozenset({typing.cast("type", hint)})


_CORE: Final[tuple[type, ...]] = (
    AdmitRun,
    AdoptOrphans,
    AppendWitnesses,
    FenceAdmission,
    FinishRun,
    RecordCauses,
    RecordDisposal,
    Together,
)
_fields: Final[dict[type, list[tuple[str, frozenset[type]]]]] = {
    kind: [
        (name, _allowed_types(hint))
        for name, hint in typing.get_type_hints(kind).items()
        if typing.get_origin(hint) is not typing.ClassVar
    ]
    for kind in _CORE
}
_known_shapes: Final[dict[type, set[tuple[type, ...]]]] = {kind: set() for kind in _CORE}


def _check_types(kind: type, shape: tuple[type, ...]) -> None:
    for (name, allowed), found in zip(_fields[kind], shape, strict=True):
        if found not in allowed:
            wanted = " or ".join(sorted("None" if t is types.NoneType else t.__name__ for t in allowed - {RunStatus}))
            raise InvalidRecordError(name, f"a {found.__name__} is not data for this field; it takes {wanted}")


def _check_ints(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 <= value < _INT_END:
            raise InvalidRecordError(name, f"{value} is not from 0 to 2**63 - 1")


def _check_texts(**values: str | None) -> None:
    for name, value in values.items():
        if value is not None and not value.isprintable():
            if "\0" in value:
                raise InvalidRecordError(name, f"{value!r} has a NUL character, which not every database can keep")
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InvalidRecordError(name, f"{value!r} is not valid Unicode text") from None


def _check_error(error: str | None) -> None:
    if error is not None:
        if len(error) > ERROR_CHARACTERS_MAX:
            raise InvalidRecordError("error", f"{len(error)} characters are more than {ERROR_CHARACTERS_MAX}")
        _check_texts(error=error)


def _check_admission(mutation: AdmitRun) -> None:
    # Nearly every admission passes these comparisons, which cost a fraction of the calls that name the key.
    if not (0 <= mutation.created_at < _INT_END and 0 <= mutation.started_at < _INT_END):
        _check_ints(created_at=mutation.created_at, started_at=mutation.started_at)
    if mutation.family_version != 1 or mutation.job_version is not None:
        _check_ints(family_version=mutation.family_version, job_version=mutation.job_version)
    if not (mutation.kind.isprintable() and mutation.actor.isprintable()) or mutation.job_key is not None:
        _check_texts(kind=mutation.kind, actor=mutation.actor, job_key=mutation.job_key)
    if mutation.provenance != "{}":
        _check_provenance(mutation.provenance)


def _check_provenance(text: str) -> None:
    _check_texts(provenance=text)
    try:
        value = decode_json(text)
    except ValueError as problem:
        raise InvalidRecordError("provenance", f"it is no JSON: {problem}") from None
    if not isinstance(value, dict):
        raise InvalidRecordError("provenance", f"a JSON object is stored there, not {text[:40]}")


def _check_fence(mutation: FenceAdmission) -> None:
    check_mutation(mutation.admission)
    _check_error(mutation.error)
    _check_ints(ended_at=mutation.ended_at)


def _check_finish(mutation: FinishRun) -> None:
    if mutation.status not in OUTCOMES:
        raise InvalidRecordError("status", f"{mutation.status!r} is none of {', '.join(sorted(OUTCOMES))}")
    if mutation.reason is not None:
        check_reason(mutation.reason)
    if mutation.error is not None:
        _check_error(mutation.error)
    if not 0 <= mutation.ended_at < _INT_END:
        _check_ints(ended_at=mutation.ended_at)
    if mutation.job_result_state is not None:
        _check_texts(job_result_state=mutation.job_result_state)


def _check_causes(mutation: RecordCauses) -> None:
    for index, cause in enumerate(mutation.causes):
        if type(cause) is not UUID:
            raise InvalidRecordError(f"causes[{index}]", f"a {type(cause).__name__} is not a Run's UUID")


def _check_witnesses(mutation: AppendWitnesses) -> None:
    _check_ints(at=mutation.at)


def _check_disposal(mutation: RecordDisposal) -> None:
    if mutation.disposal not in _DISPOSALS:
        raise InvalidRecordError("disposal", f"{mutation.disposal!r} is not discarded; only that is ever stored")
    _check_ints(at=mutation.at)


def _check_adoption(mutation: AdoptOrphans) -> None:
    if not 1 <= mutation.limit <= ADOPTED_MAX:
        raise InvalidRecordError("limit", f"{mutation.limit} is not a number from 1 to {ADOPTED_MAX}")
    _check_ints(at=mutation.at)


def _check_together(mutation: Together) -> None:
    if not mutation.mutations:
        raise InvalidRecordError("mutations", "there is nothing to write together")
    owner = (mutation.room, mutation.epoch)
    for index, inner in enumerate(mutation.mutations):
        if (inner.room, inner.epoch) != owner:
            raise InvalidRecordError(f"mutations[{index}]", "it is of another room or epoch than the first one")
        check_mutation(inner)


_value_checks: Final[dict[type, Callable[[Any], None]]] = {
    AdmitRun: _check_admission,
    AdoptOrphans: _check_adoption,
    AppendWitnesses: _check_witnesses,
    FenceAdmission: _check_fence,
    FinishRun: _check_finish,
    RecordCauses: _check_causes,
    RecordDisposal: _check_disposal,
    Together: _check_together,
}
