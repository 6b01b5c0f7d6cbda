"""Durable facts: the contract of every store, the records, the mutations, and the stores."""

from spindel.store._check import CheckReport, Finding
from spindel.store._contract import Confirmation, PostgresPart, RoomClaim, Store, StorePart
from spindel.store._executor import Executor, Lane
from spindel.store._memory import MemoryStore
from spindel.store._mutations import (
    AdmitRun,
    AdoptOrphans,
    AppendWitnesses,
    FenceAdmission,
    FinishRun,
    Mutation,
    RecordCauses,
    RecordDisposal,
    Together,
)
from spindel.store._place import ADDRESS_SCHEMES, open_place
from spindel.store._postgres import PostgresStore
from spindel.store._records import (
    ENDED,
    ERROR_CHARACTERS_MAX,
    FAMILY_VERSION,
    JOB_VERSION,
    LIMIT_MAX,
    JobIdentity,
    RoomRecord,
    RunCursor,
    RunPage,
    RunQuery,
    RunRecord,
    RunStatus,
    check_limit,
    check_reason,
    check_room_name,
)
from spindel.store._sqlite import SqliteStore

__all__ = [
    "ADDRESS_SCHEMES",
    "ENDED",
    "ERROR_CHARACTERS_MAX",
    "FAMILY_VERSION",
    "JOB_VERSION",
    "LIMIT_MAX",
    "AdmitRun",
    "AdoptOrphans",
    "AppendWitnesses",
    "CheckReport",
    "Confirmation",
    "Executor",
    "FenceAdmission",
    "Finding",
    "FinishRun",
    "JobIdentity",
    "Lane",
    "MemoryStore",
    "Mutation",
    "PostgresPart",
    "PostgresStore",
    "RecordCauses",
    "RecordDisposal",
    "RoomClaim",
    "RoomRecord",
    "RunCursor",
    "RunPage",
    "RunQuery",
    "RunRecord",
    "RunStatus",
    "SqliteStore",
    "Store",
    "StorePart",
    "Together",
    "check_limit",
    "check_reason",
    "check_room_name",
    "open_place",
]
