"""The core's own part of a SQLite store: how each mutation is applied and how its identity is read back.

Most rules are triggers of the tables. What is left to this file: the hot path of each mutation is one statement with a
constant text, and only when it is refused, or changes nothing, the row is read to tell an equal repeat, which is
acknowledged, from other content, which is not. So equal repeats cost a read and first writes cost none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import apsw
import msgspec

from spindel.errors import RoomInUseError, WriteRefusedError
from spindel.ids import WitnessStage, witness_text
from spindel.store._claims import ClaimRoom, LeaveRoom
from spindel.store._contract import Confirmation
from spindel.store._mutations import (
    AdmitRun,
    AdoptOrphans,
    AppendWitnesses,
    FenceAdmission,
    FinishRun,
    RecordCauses,
    RecordDisposal,
)
from spindel.store._ownership import owner_lives
from spindel.store._rules import witnesses_valid

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

__all__ = [
    "ADMIT",
    "FINISH",
    "FINISH_RETURNED",
    "SQLITE_APPLY",
    "SQLITE_CONFIRM",
    "WITNESS",
    "refuse_witnesses",
    "values_of",
]

# Mutations are bound as they are: a Struct's fields in their order, ids as texts. So a parameter's number is the place of
# its field, and what a statement needs beyond them comes after.
assert AdmitRun.__struct_fields__ == (
    "room", "epoch", "incarnation", "id", "kind", "actor", "parent_id", "trigger_id", "provenance", "family_version",
    "created_at", "started_at", "job_version", "job_key", "job_offer", "job_experiment",
)  # fmt: skip
assert FinishRun.__struct_fields__ == (
    "room", "epoch", "id", "status", "reason", "error", "ended_at", "family_returned", "job_result_state",
    "job_scorecard",
)  # fmt: skip
assert AppendWitnesses.__struct_fields__ == ("room", "epoch", "id", "at", "family", "core", "adapter")
_STAGES: Final = (WitnessStage.FAMILY_RETURN, WitnessStage.CORE_CLEANUP, WitnessStage.ADAPTER_CLEANUP)

ADMIT: Final = """\
INSERT INTO runs (
  room, incarnation, id, kind, actor, parent_id, trigger_id, provenance, family_version, created_at, started_at,
  job_version, job_key, job_offer, job_experiment, status, updated_at
) VALUES (?1, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, 'running', ?12)"""

_IDENTITY: Final = """\
SELECT status, reason, error, ended_at FROM runs
WHERE id = ?4 AND room = ?1 AND incarnation = ?3 AND kind = ?5 AND actor = ?6 AND parent_id IS ?7 AND trigger_id IS ?8
  AND provenance = ?9 AND family_version IS ?10 AND created_at = ?11 AND started_at = ?12 AND job_version IS ?13
  AND job_key IS ?14 AND job_offer IS ?15 AND job_experiment IS ?16"""

_FENCE_NEW: Final = """\
INSERT INTO runs (
  room, incarnation, id, kind, actor, parent_id, trigger_id, provenance, family_version, created_at, started_at,
  job_version, job_key, job_offer, job_experiment, status, reason, error, ended_at, updated_at
) VALUES (
  ?1, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, 'failed', 'admission-failed', ?17, ?18, ?18
)"""

_FENCE_RUNNING: Final = """\
UPDATE runs SET status = 'failed', reason = 'admission-failed', error = ?2, ended_at = ?3, updated_at = ?3
WHERE id = ?1 AND status = 'running'"""

FINISH: Final = """\
UPDATE runs SET status = ?4, reason = ?5, error = ?6, ended_at = CASE WHEN ?4 <> 'waiting' THEN ?7 END,
  job_result_state = ?9, job_scorecard = ?10, updated_at = ?7
WHERE id = ?3 AND room = ?1 AND status = 'running'"""

FINISH_RETURNED: Final = """\
UPDATE runs SET status = ?4, reason = ?5, error = ?6, ended_at = CASE WHEN ?4 <> 'waiting' THEN ?7 END,
  job_result_state = ?9, job_scorecard = ?10, updated_at = ?7, family_return_ack = ?11
WHERE id = ?3 AND room = ?1 AND status = 'running' AND family_version IS NOT NULL"""

_OUTCOME: Final = """\
SELECT status, reason, error, ifnull(ended_at, updated_at), job_result_state, job_scorecard,
  family_return_ack IS NOT NULL, family_version FROM runs WHERE id = ?1 AND room = ?2"""

_CAUSES: Final = """\
INSERT INTO run_causes (run_id, cause_id)
SELECT ?1, value FROM json_each(?2)
WHERE NOT EXISTS (SELECT 1 FROM run_causes AS known WHERE known.run_id = ?1 AND known.cause_id = value)"""

# Of another room's Run all are missing: whoever doesn't own it isn't told what it has.
_CAUSES_MISSING: Final = """\
SELECT count(*) FROM json_each(?2)
WHERE NOT EXISTS (
  SELECT 1 FROM run_causes AS known JOIN runs AS consumer ON consumer.id = known.run_id
  WHERE known.run_id = ?1 AND known.cause_id = value AND consumer.room = ?3
)"""

WITNESS: Final = """\
UPDATE runs SET
  family_return_ack = ifnull(family_return_ack, ?5),
  job_core_cleanup_ack = ifnull(job_core_cleanup_ack, ?6),
  job_adapter_cleanup_ack = ifnull(job_adapter_cleanup_ack, ?7),
  updated_at = max(updated_at, ?4)
WHERE id = ?3 AND room = ?1 AND (
  (?5 IS NOT NULL AND family_return_ack IS NULL)
  OR (?6 IS NOT NULL AND job_core_cleanup_ack IS NULL)
  OR (?7 IS NOT NULL AND job_adapter_cleanup_ack IS NULL)
) AND (?5 IS NULL OR family_version IS NOT NULL)"""

_WITNESSES: Final = """\
SELECT status, family_version, family_return_ack, job_core_cleanup_ack, job_adapter_cleanup_ack FROM runs
WHERE id = ?1 AND room = ?2"""

_DISPOSE: Final = """\
UPDATE runs SET admission_disposal = ?3, updated_at = max(updated_at, ?4)
WHERE id = ?1 AND room = ?2 AND admission_disposal IS NULL"""

_DISPOSAL: Final = "SELECT status, reason, admission_disposal FROM runs WHERE id = ?1 AND room = ?2"

# Two ranges of the index of running rows, so that a full house of one's own rows would not be read either. The times
# of a row never go backwards, even if this machine's clock stands before that of the process which died.
_ADOPT: Final = """\
UPDATE runs SET status = 'failed', reason = 'orphaned', ended_at = max(?3, updated_at), updated_at = max(?3, updated_at),
  job_result_state = CASE WHEN job_offer IS NOT NULL THEN 'unavailable' END
WHERE id IN (
  SELECT id FROM (
    SELECT id FROM runs WHERE room = ?1 AND status = 'running' AND incarnation < ?2
    UNION ALL
    SELECT id FROM runs WHERE room = ?1 AND status = 'running' AND incarnation > ?2
  ) LIMIT ?4
)"""

_ORPHANED: Final = "SELECT EXISTS (SELECT 1 FROM runs WHERE room = ?1 AND status = 'running' AND incarnation <> ?2)"

_STATUS: Final = "SELECT status, room FROM runs WHERE id = ?1"

_INCARNATION: Final = "SELECT incarnation FROM rooms WHERE name = ?1"

_OWNER: Final = "SELECT owner FROM rooms WHERE name = ?1"

_CLAIM: Final = """\
INSERT INTO rooms (name, incarnation, epoch, owner, opened_at, closed_at) VALUES (?1, ?2, 1, ?3, ?4, NULL)
ON CONFLICT (name) DO UPDATE SET
  incarnation = excluded.incarnation, epoch = epoch + 1, owner = excluded.owner, closed_at = NULL,
  opened_at = max(
    excluded.opened_at, opened_at, ifnull(closed_at, 0),
    ifnull((SELECT started_at FROM runs WHERE room = ?1 ORDER BY started_at DESC, id DESC LIMIT 1), 0)
  )
RETURNING epoch"""

_LEAVE: Final = """\
UPDATE rooms SET owner = NULL, closed_at = max(?3, opened_at) WHERE name = ?1 AND epoch = ?2 AND closed_at IS NULL"""


def _text(value: UUID | None) -> str | None:
    return None if value is None else str(value)


def values_of(mutation: msgspec.Struct) -> tuple[Any, ...]:
    """Give a mutation's fields in their order, ids as texts: what its statement is bound to."""
    return tuple(msgspec.to_builtins(mutation).values())


def _admit(connection: apsw.Connection, mutation: AdmitRun) -> None:
    identity = values_of(mutation)
    try:
        connection.execute(ADMIT, identity)
    except apsw.ConstraintError:
        # Acknowledged again while the row is as this command made it: running, with equal content.
        found = connection.execute(_IDENTITY, identity).fetchone()
        if found is None or found[0] != "running":
            raise


def _confirm_admit(connection: apsw.Connection, mutation: AdmitRun) -> Confirmation:
    found = connection.execute(_IDENTITY, values_of(mutation)).fetchone()
    if found is not None:
        return Confirmation.PRESENT if found[0] == "running" else Confirmation.CONFLICT
    taken = connection.execute(_STATUS, (str(mutation.id),)).fetchone()
    return Confirmation.ABSENT if taken is None else Confirmation.CONFLICT


def _fence(connection: apsw.Connection, mutation: FenceAdmission) -> None:
    identity = values_of(mutation.admission)
    found = connection.execute(_IDENTITY, identity).fetchone()
    if found is None:
        # No row yet, or one with other content, which the trigger refuses.
        connection.execute(_FENCE_NEW, (*identity, mutation.error, mutation.ended_at))
    elif found[0] == "running":
        connection.execute(_FENCE_RUNNING, (str(mutation.admission.id), mutation.error, mutation.ended_at))
    elif found != _fenced(mutation):
        raise WriteRefusedError("terminal-fence", detail=f"run {mutation.admission.id} ended as {found[0]}")


def _fenced(mutation: FenceAdmission) -> tuple[Any, ...]:
    return ("failed", "admission-failed", mutation.error, mutation.ended_at)


def _confirm_fence(connection: apsw.Connection, mutation: FenceAdmission) -> Confirmation:
    found = connection.execute(_IDENTITY, values_of(mutation.admission)).fetchone()
    if found is None:
        taken = connection.execute(_STATUS, (str(mutation.admission.id),)).fetchone()
        return Confirmation.ABSENT if taken is None else Confirmation.CONFLICT
    if found[0] == "running":
        return Confirmation.ABSENT
    return Confirmation.PRESENT if found == _fenced(mutation) else Confirmation.CONFLICT


def _finish(connection: apsw.Connection, mutation: FinishRun) -> None:
    values = values_of(mutation)
    run_id: str = values[2]
    if mutation.family_returned:
        connection.execute(FINISH_RETURNED, (*values, witness_text(WitnessStage.FAMILY_RETURN, run_id)))
    else:
        connection.execute(FINISH, values)
    if connection.changes() == 1:
        return
    found = connection.execute(_OUTCOME, (run_id, mutation.room)).fetchone()
    if found is None:
        raise _unknown(mutation.room, mutation.id)
    if found[0] == "running":
        raise _unversioned(mutation.id)
    if found[:6] != _outcome_of(mutation):
        raise WriteRefusedError("terminal-fence", detail=f"run {run_id} ended as {found[0]}")
    if mutation.family_returned and not found[6]:
        raise WriteRefusedError("witness-late", detail=f"run {run_id} ended without its family witness")


def _outcome_of(mutation: FinishRun) -> tuple[Any, ...]:
    return (
        mutation.status,
        mutation.reason,
        mutation.error,
        mutation.ended_at,
        mutation.job_result_state,
        _text(mutation.job_scorecard),
    )


def _confirm_finish(connection: apsw.Connection, mutation: FinishRun) -> Confirmation:
    found = connection.execute(_OUTCOME, (str(mutation.id), mutation.room)).fetchone()
    if found is None or found[0] == "running":
        return Confirmation.ABSENT
    witnessed = not mutation.family_returned or found[6]
    return Confirmation.PRESENT if witnessed and found[:6] == _outcome_of(mutation) else Confirmation.CONFLICT


def _causes_of(mutation: RecordCauses) -> tuple[str, str]:
    # A set: a cause named twice is one row.
    return str(mutation.id), msgspec.json.encode(sorted({str(cause) for cause in mutation.causes})).decode()


def _record_causes(connection: apsw.Connection, mutation: RecordCauses) -> None:
    values = _causes_of(mutation)
    missing = connection.execute(_CAUSES_MISSING, (*values, mutation.room)).fetchone()
    if missing == (0,):
        return
    consumer = connection.execute(_STATUS, values[:1]).fetchone()
    if consumer is None or consumer[1] != mutation.room:
        raise WriteRefusedError("cause", detail=f"run {mutation.id} isn't running, so it consumes nothing")
    connection.execute(_CAUSES, values)


def _confirm_causes(connection: apsw.Connection, mutation: RecordCauses) -> Confirmation:
    values = _causes_of(mutation)
    if connection.execute(_CAUSES_MISSING, (*values, mutation.room)).fetchone() == (0,):
        return Confirmation.PRESENT
    consumer = connection.execute(_STATUS, values[:1]).fetchone()
    if consumer is None or consumer[1] != mutation.room or consumer[0] == "running":
        return Confirmation.ABSENT
    return Confirmation.CONFLICT


def refuse_witnesses(values: tuple[Any, ...]) -> None:
    """Check the values of `AppendWitnesses`: as texts, at a third of the cost of ids made to be compared.

    Raises:
        WriteRefusedError: one is not the stage's witness of this Run.
    """
    run_id: str = values[2]
    for stage, value in zip(_STAGES, values[4:], strict=True):
        if value is not None and value != witness_text(stage, run_id):
            raise WriteRefusedError("witness-invalid", detail=f"a value is not the stage's witness of run {run_id}")


def _append_witnesses(connection: apsw.Connection, mutation: AppendWitnesses) -> None:
    values = values_of(mutation)
    refuse_witnesses(values)
    run_id: str = values[2]
    connection.execute(WITNESS, values)
    if connection.changes() == 1:
        return
    found = connection.execute(_WITNESSES, (run_id, mutation.room)).fetchone()
    if found is None:
        raise _unknown(mutation.room, mutation.id)
    if mutation.family is not None and found[1] is None:
        raise _unversioned(mutation.id)


def _confirm_witnesses(connection: apsw.Connection, mutation: AppendWitnesses) -> Confirmation:
    if not witnesses_valid(mutation):
        return Confirmation.CONFLICT
    found = connection.execute(_WITNESSES, (str(mutation.id), mutation.room)).fetchone()
    if found is None:
        return Confirmation.ABSENT
    status, _, family, core, adapter = found
    early_missing = (mutation.family is not None and family is None) or (mutation.core is not None and core is None)
    if early_missing and status != "running":
        return Confirmation.CONFLICT
    if early_missing or (mutation.adapter is not None and adapter is None):
        return Confirmation.ABSENT
    return Confirmation.PRESENT


def _record_disposal(connection: apsw.Connection, mutation: RecordDisposal) -> None:
    connection.execute(_DISPOSE, (str(mutation.id), mutation.room, mutation.disposal, mutation.at))
    if connection.changes() == 1:
        return
    # Either it has its disposal, of which there is only one kind, or there is no such row.
    if connection.execute(_DISPOSAL, (str(mutation.id), mutation.room)).fetchone() is None:
        raise _unknown(mutation.room, mutation.id)


def _confirm_disposal(connection: apsw.Connection, mutation: RecordDisposal) -> Confirmation:
    found = connection.execute(_DISPOSAL, (str(mutation.id), mutation.room)).fetchone()
    if found is None or found[0] == "running":
        return Confirmation.ABSENT
    if found[2] == mutation.disposal:
        return Confirmation.PRESENT
    fenced = found[:2] == ("failed", "admission-failed") and found[2] is None
    return Confirmation.ABSENT if fenced else Confirmation.CONFLICT


def _adopt(connection: apsw.Connection, mutation: AdoptOrphans) -> int:
    incarnation = str(mutation.incarnation)
    if connection.execute(_INCARNATION, (mutation.room,)).fetchone() != (incarnation,):
        raise WriteRefusedError("not-owner", detail=f"room {mutation.room!r} is in another incarnation")
    connection.execute(_ADOPT, (mutation.room, incarnation, mutation.at, mutation.limit))
    return connection.changes()


def _confirm_adopt(connection: apsw.Connection, mutation: AdoptOrphans) -> Confirmation:
    left = connection.execute(_ORPHANED, (mutation.room, str(mutation.incarnation))).fetchone()
    return Confirmation.PRESENT if left == (0,) else Confirmation.ABSENT


def _claim(connection: apsw.Connection, mutation: ClaimRoom) -> int:
    found = connection.execute(_OWNER, (mutation.room,)).fetchone()
    if found is not None and found[0] is not None and owner_lives(found[0]):
        # Its lock is free, so somebody took the lock file away under a living owner.
        raise RoomInUseError(mutation.room, msgspec.json.decode(found[0]))
    claimed = (mutation.room, str(mutation.incarnation), mutation.owner, mutation.at)
    epoch: int = connection.execute(_CLAIM, claimed).get
    return epoch


def _leave(connection: apsw.Connection, mutation: LeaveRoom) -> None:
    connection.execute(_LEAVE, (mutation.room, mutation.epoch, mutation.at))


def _unknown(room: str, run_id: UUID) -> WriteRefusedError:
    return WriteRefusedError("run-unknown", detail=f"room {room!r} has no run {run_id}")


def _unversioned(run_id: UUID) -> WriteRefusedError:
    return WriteRefusedError("family-version", detail=f"run {run_id} is from before families")


SQLITE_APPLY: Final[dict[type, Callable[[apsw.Connection, Any], Any]]] = {
    AdmitRun: _admit,
    FenceAdmission: _fence,
    FinishRun: _finish,
    RecordCauses: _record_causes,
    AppendWitnesses: _append_witnesses,
    RecordDisposal: _record_disposal,
    AdoptOrphans: _adopt,
    ClaimRoom: _claim,
    LeaveRoom: _leave,
}

SQLITE_CONFIRM: Final[dict[type, Callable[[apsw.Connection, Any], Confirmation]]] = {
    AdmitRun: _confirm_admit,
    FenceAdmission: _confirm_fence,
    FinishRun: _confirm_finish,
    RecordCauses: _confirm_causes,
    AppendWitnesses: _confirm_witnesses,
    RecordDisposal: _confirm_disposal,
    AdoptOrphans: _confirm_adopt,
}
