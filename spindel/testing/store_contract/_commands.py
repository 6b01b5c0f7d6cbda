"""What the tests of stores are written with: commands, and short ways to read."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

import attrs

from spindel.errors import WriteRefusedError
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.store._contract import RoomClaim
from spindel.store._mutations import (
    AdmitRun,
    AdoptOrphans,
    AppendWitnesses,
    FenceAdmission,
    FinishRun,
    RecordCauses,
    RecordDisposal,
)
from spindel.store._records import RunQuery
from spindel.testing.clocks import START_MICROS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from spindel.store._contract import Store
    from spindel.store._mutations import Mutation
    from spindel.store._records import RunRecord

__all__ = [
    "ADAPTER",
    "CORE",
    "FAMILY",
    "Commands",
    "ForeignMutation",
    "fresh_uuid",
    "list_ids",
    "load_row",
    "open_commands",
    "refusal",
]

FAMILY, CORE, ADAPTER = WitnessStage.FAMILY_RETURN, WitnessStage.CORE_CLEANUP, WitnessStage.ADAPTER_CLEANUP
_numbers: Final[Iterator[int]] = count(1)


def fresh_uuid() -> UUID:
    """Give an id that no test had before, later ones greater."""
    return UUID(int=(0xBEEF << 112) | (7 << 76) | (2 << 62) | next(_numbers))


@attrs.define
class Commands:
    """Makes the mutations of one owner of one room, with times that go on by one with each.

    Attributes:
        room: the room's name.
        epoch: the epoch that the owner got.
        incarnation: the UUID of its opening.
        now: the time of the latest command.
    """

    room: str
    epoch: int
    incarnation: UUID
    now: int = START_MICROS

    def tick(self) -> int:
        """Give a later time."""
        self.now += 1
        return self.now

    def admit(self, **changes: Any) -> AdmitRun:
        """Make the first row of a plain root Run, or of what `changes` make of it."""
        at = self.tick()
        fields: dict[str, Any] = {
            "room": self.room,
            "epoch": self.epoch,
            "incarnation": self.incarnation,
            "id": fresh_uuid(),
            "kind": "run",
            "actor": "tester",
            "parent_id": None,
            "trigger_id": None,
            "provenance": "{}",
            "family_version": 1,
            "created_at": at,
            "started_at": at,
        }
        return AdmitRun(**(fields | changes))

    def admit_job(self, **changes: Any) -> AdmitRun:
        """Make the first row of a Job."""
        fields: dict[str, Any] = {
            "kind": "job",
            "job_version": 1,
            "job_key": "key",
            "job_offer": fresh_uuid(),
            "job_experiment": fresh_uuid(),
        }
        return self.admit(**(fields | changes))

    def finish(self, run: AdmitRun, status: str = "completed", **changes: Any) -> FinishRun:
        """Make the outcome of a Run."""
        fields: dict[str, Any] = {
            "room": self.room,
            "epoch": self.epoch,
            "id": run.id,
            "status": status,
            "reason": None,
            "error": None,
            "ended_at": self.tick(),
            "family_returned": True,
        }
        return FinishRun(**(fields | changes))

    def fence(self, admission: AdmitRun, error: str | None = "boom") -> FenceAdmission:
        """Make the fence of an admission."""
        return FenceAdmission(admission=admission, error=error, ended_at=self.tick())

    def causes(self, run: AdmitRun, *causes: AdmitRun) -> RecordCauses:
        """Say that a Run consumed others."""
        return RecordCauses(room=self.room, epoch=self.epoch, id=run.id, causes=tuple(cause.id for cause in causes))

    def witnesses(self, run: AdmitRun, *stages: WitnessStage, **values: UUID) -> AppendWitnesses:
        """Make the true witnesses of these stages, and those given as they are."""
        names = {FAMILY: "family", CORE: "core", ADAPTER: "adapter"}
        fields = {names[stage]: witness_id(stage, run.id) for stage in stages} | values
        return AppendWitnesses(room=self.room, epoch=self.epoch, id=run.id, at=self.tick(), **fields)

    def dispose(self, run: AdmitRun, disposal: str = "discarded") -> RecordDisposal:
        """Say what became of a fenced admission's things."""
        return RecordDisposal(room=self.room, epoch=self.epoch, id=run.id, at=self.tick(), disposal=disposal)

    def adopt(self, **changes: Any) -> AdoptOrphans:
        """Adopt orphans."""
        fields: dict[str, Any] = {
            "room": self.room,
            "epoch": self.epoch,
            "incarnation": self.incarnation,
            "at": self.tick(),
        }
        return AdoptOrphans(**(fields | changes))

    def query(self, **changes: Any) -> RunQuery:
        """Ask for this room's Runs."""
        return RunQuery(room=self.room, **changes)


@asynccontextmanager
async def open_commands(store: Store, name: str = "main", *, at: int = START_MICROS) -> AsyncGenerator[Commands, None]:
    """Own a room for the length of a block and give what makes its mutations."""
    incarnation = fresh_uuid()
    async with store.claim_room(RoomClaim(name, incarnation, at)) as epoch:
        yield Commands(name, epoch, incarnation, at)


async def refusal(store: Store, mutation: Mutation[Any]) -> str:
    """Give the code by which a store refuses a mutation.

    Raises:
        AssertionError: the store took it.
    """
    try:
        result = await store.write(mutation)
    except WriteRefusedError as refused:
        return refused.code
    raise AssertionError(f"{mutation} was taken, and gave {result!r}")


async def load_row(store: Store, run: AdmitRun) -> RunRecord:
    """Read a Run that must be there."""
    record = await store.load_run(run.room, RunId(run.id))

    assert record is not None, f"room {run.room!r} has no run {run.id}"
    return record


async def list_ids(store: Store, query: RunQuery) -> list[UUID]:
    """Give the ids of a page, in its order."""
    page = await store.list_runs(query)
    return [run.id for run in page.runs]


@attrs.frozen
class ForeignMutation:
    """A mutation of a part that no store here has."""

    part: ClassVar[str] = "foreign"

    room: str
    epoch: int

    @property
    def identity(self) -> tuple[str, ...]:
        """Some identity."""
        return ("foreign",)
