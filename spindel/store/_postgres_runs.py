"""The core's own part of a PostgreSQL store: which function takes which mutation, and with what argument.

The functions stand in `_schema/runs.postgres-functions.sql`. A mutation is its own argument, but where something is
needed that the server can't compute: it has no SHA-1, hence no witnesses.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

import msgspec

from spindel.ids import WitnessStage, witness_text
from spindel.store._claims import ClaimRoom, LeaveRoom
from spindel.store._contract import PostgresPart
from spindel.store._mutations import (
    AdmitRun,
    AdoptOrphans,
    AppendWitnesses,
    FenceAdmission,
    FinishRun,
    RecordCauses,
    RecordDisposal,
)
from spindel.store._rules import witnesses_valid

__all__ = ["RUNS_POSTGRES", "load_functions"]


def load_functions(part: str) -> str:
    """Read the functions of a part of this package: `PART.postgres-functions.sql`."""
    return resources.files("spindel.store").joinpath(f"_schema/{part}.postgres-functions.sql").read_text("utf-8")


class _Finish(msgspec.Struct, frozen=True, gc=False):
    finish: FinishRun
    family: str | None


class _Witnesses(msgspec.Struct, frozen=True, gc=False):
    witnesses: AppendWitnesses
    valid: bool


def _with_family(mutation: FinishRun) -> _Finish:
    return _Finish(
        mutation, witness_text(WitnessStage.FAMILY_RETURN, str(mutation.id)) if mutation.family_returned else None
    )


def _with_validity(mutation: AppendWitnesses) -> _Witnesses:
    return _Witnesses(mutation, witnesses_valid(mutation))


RUNS_POSTGRES: Final = PostgresPart(
    functions=load_functions("runs"),
    apply={
        AdmitRun: "admit_run",
        FenceAdmission: "fence_admission",
        FinishRun: "finish_run",
        RecordCauses: "record_causes",
        AppendWitnesses: "append_witnesses",
        RecordDisposal: "record_disposal",
        AdoptOrphans: "adopt_orphans",
        ClaimRoom: "claim_room",
        LeaveRoom: "leave_room",
    },
    confirm={
        AdmitRun: "confirm_admit_run",
        FenceAdmission: "confirm_fence_admission",
        FinishRun: "confirm_finish_run",
        RecordCauses: "confirm_record_causes",
        AppendWitnesses: "confirm_append_witnesses",
        RecordDisposal: "confirm_record_disposal",
        AdoptOrphans: "confirm_adopt_orphans",
    },
    argument={FinishRun: _with_family, AppendWitnesses: _with_validity},
)
