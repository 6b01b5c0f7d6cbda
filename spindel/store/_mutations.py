"""The mutations of the core: frozen commands, each with its room, epoch, identity and timestamps.

They are msgspec Structs because two are made for every Run; `gc=False` holds since they contain scalars only. A
repeat of the same command is recognised by its identity and content, so whoever retries sends the same object.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar, runtime_checkable
from uuid import UUID

import msgspec

A_co = TypeVar("A_co", covariant=True)

__all__ = [
    "AdmitRun",
    "AdoptOrphans",
    "AppendWitnesses",
    "FenceAdmission",
    "FinishRun",
    "Mutation",
    "RecordCauses",
    "RecordDisposal",
    "Together",
]


@runtime_checkable
class Mutation(Protocol[A_co]):
    """A frozen command to the store; `A_co` is what its acknowledgement returns."""

    part: ClassVar[str]

    @property
    def room(self) -> str:
        """The room whose owner sends it."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch that the sender owns; an older one than the room's is refused as `not-owner`."""
        ...

    @property
    def identity(self) -> tuple[str, ...]:
        """What `confirm` looks up; equal identity and content is acknowledged again."""
        ...


class AdmitRun(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Insert a `running` row. `provenance` is canonical JSON text."""

    part: ClassVar[str] = "runs"

    room: str
    epoch: int
    incarnation: UUID
    id: UUID
    kind: str
    actor: str
    parent_id: UUID | None
    trigger_id: UUID | None
    provenance: str
    family_version: int | None
    created_at: int
    started_at: int
    job_version: int | None = None
    job_key: str | None = None
    job_offer: UUID | None = None
    job_experiment: UUID | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """The row's first content."""
        return ("admit-run", str(self.id))


class FenceAdmission(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Insert the `failed`/`admission-failed` row of an admission, or turn its equal `running` row into it.

    It freezes the admission's own command: same id, same timestamps; the Run was never executed.
    """

    part: ClassVar[str] = "runs"

    admission: AdmitRun
    error: str | None
    ended_at: int

    @property
    def room(self) -> str:
        """The admission's room."""
        return self.admission.room

    @property
    def epoch(self) -> int:
        """The admission's epoch."""
        return self.admission.epoch

    @property
    def identity(self) -> tuple[str, ...]:
        """The fence of that Run."""
        return ("fence-admission", str(self.admission.id))


class FinishRun(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Set the outcome of a running row: once, together with the family witness and a Job's result.

    `family_returned` asks for the family witness; the store computes its value from the id. `status` is waiting,
    completed, failed or cancelled; `ended_at` is the end time for every one of them and is stored for terminal ones
    only (a waiting row gets it as `updated_at`).
    """

    part: ClassVar[str] = "runs"

    room: str
    epoch: int
    id: UUID
    status: str
    reason: str | None
    error: str | None
    ended_at: int
    family_returned: bool
    job_result_state: str | None = None
    job_scorecard: UUID | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """The outcome of that Run."""
        return ("finish-run", str(self.id))


class RecordCauses(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Add Runs whose outcome this Run consumed: a set union."""

    part: ClassVar[str] = "runs"

    room: str
    epoch: int
    id: UUID
    causes: tuple[UUID, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """These causes of that Run."""
        return ("record-causes", str(self.id), *map(str, self.causes))


class AppendWitnesses(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Set witnesses, each once; a value that isn't the stage's witness of this Run is refused."""

    part: ClassVar[str] = "runs"

    room: str
    epoch: int
    id: UUID
    at: int
    family: UUID | None = None
    core: UUID | None = None
    adapter: UUID | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """These witnesses of that Run."""
        stages = (("family-return", self.family), ("core-cleanup", self.core), ("adapter-cleanup", self.adapter))
        return ("append-witnesses", str(self.id), *(stage for stage, value in stages if value is not None))


class RecordDisposal(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Set the disposal of a fenced admission's things, once."""

    part: ClassVar[str] = "runs"

    room: str
    epoch: int
    id: UUID
    at: int
    disposal: str

    @property
    def identity(self) -> tuple[str, ...]:
        """The disposal of that admission."""
        return ("record-disposal", str(self.id))


class AdoptOrphans(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Turn at most `limit` running rows of other incarnations into `failed`/`orphaned`; returns how many."""

    part: ClassVar[str] = "runs"

    room: str
    epoch: int
    incarnation: UUID
    at: int
    limit: int = 500

    @property
    def identity(self) -> tuple[str, ...]:
        """The adoption by this incarnation; `confirm` says PRESENT when no orphan is left."""
        return ("adopt-orphans", self.room, str(self.incarnation))


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Several mutations of one room and epoch: all or none. Returns their results in order."""

    part: ClassVar[str] = "runs"

    mutations: tuple[Mutation[object], ...]

    @property
    def room(self) -> str:
        """The room of them all."""
        return self.mutations[0].room

    @property
    def epoch(self) -> int:
        """The epoch of them all."""
        return self.mutations[0].epoch

    @property
    def identity(self) -> tuple[str, ...]:
        """The identities of all, in order."""
        return ("together", *("/".join(mutation.identity) for mutation in self.mutations))
