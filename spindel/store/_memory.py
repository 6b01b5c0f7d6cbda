"""The memory store: the reference by which the contract is explained, and what a room without a file runs on.

A row is the frozen commands that made it: its `AdmitRun` and, once it ended, a `FinishRun`. Nothing is copied when it
is written; a record is built when somebody reads it, and a witness, being a function of stage and id, is a flag until
then. That keeps an admission at a few dictionary entries.

Every mutation is checked and applied within one turn of the loop, so turns are the transactions. The order of the
checks is part of the contract: what no record may hold, then ownership, then an equal repeat, then the rules of the
tables in the order in which they are listed there.

A room keeps its running rows in two tables. `live` holds those of the present incarnation; a claim moves what is left
there to `orphans` as a whole. Hence neither adoption nor the look-up of a parent ever meets an ended row.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import asynccontextmanager
from copy import copy
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar, cast

import attrs
import msgspec
import trio

from spindel.codec import decode_json
from spindel.errors import InvalidRecordError, RoomInUseError, WriteRefusedError, WriteUncertainError
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.store._contract import Confirmation
from spindel.store._memory_tables import MemoryTables, UndoLog
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
from spindel.store._records import (
    ENDED,
    RoomRecord,
    RunCursor,
    RunPage,
    RunQuery,
    RunRecord,
    RunStatus,
    check_limit,
    check_room_name,
)
from spindel.store._rules import check_mutation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
    from types import TracebackType
    from uuid import UUID

    from spindel.store._contract import RoomClaim, StorePart
    from spindel.store._mutations import Mutation

__all__ = ["MemoryStore"]

A = TypeVar("A")

_FAMILY: Final = 1
_CORE: Final = 2
_ADAPTER: Final = 4


class _Row(msgspec.Struct, gc=False):
    """A Run's row. `changed_at` is None while the commands themselves tell when the row last changed."""

    admission: AdmitRun
    end: FinishRun | None = None
    witnesses: int = 0
    disposal: str | None = None
    causes: frozenset[int] = frozenset()
    changed_at: int | None = None

    def updated_at(self) -> int:
        """Give when the row last changed."""
        if self.changed_at is not None:
            return self.changed_at
        return self.admission.started_at if self.end is None else self.end.ended_at


@attrs.define(eq=False)
class _Room:
    """A room, its running rows, and its rows in the order of lists as far as somebody has read one."""

    name: str
    incarnation: UUID
    epoch: int
    opened_at: int
    latest_start: int = 0
    owned: bool = True
    closed_at: int | None = None
    live: dict[int, _Row] = attrs.Factory(dict[int, _Row])
    orphans: dict[int, _Row] = attrs.Factory(dict[int, _Row])
    rows: dict[int, _Row] = attrs.Factory(dict[int, _Row])
    listed: list[tuple[int, int]] = attrs.Factory(list[tuple[int, int]])


class MemoryStore:
    """Facts that last as long as this object: the same rules as on disk, without the disk.

    Claiming a room of an object that was used before finds its rows again, so opening, adoption and epochs work as
    they do over a file. Nothing has to be opened or closed; `async with` is allowed any number of times.

    Args:
        parts: what layers above keep here.
    """

    __slots__ = ("_confirmations", "_handlers", "_rooms", "_rows", "_undo")

    durable = False

    def __init__(self, parts: Iterable[StorePart] = ()) -> None:
        self._rooms: dict[str, _Room] = {}
        self._rows: dict[int, _Row] = {}
        self._undo = UndoLog()
        self._handlers: dict[type, Callable[[_Room, Any], Any]] = {
            AdmitRun: self._admit,
            FenceAdmission: self._fence,
            FinishRun: self._finish,
            RecordCauses: self._record_causes,
            AppendWitnesses: self._append_witnesses,
            RecordDisposal: self._record_disposal,
            AdoptOrphans: self._adopt,
            Together: self._together,
        }
        self._confirmations: dict[type, Callable[[Any], Confirmation]] = {
            AdmitRun: self._confirm_admission,
            FenceAdmission: self._confirm_fence,
            FinishRun: self._confirm_finish,
            RecordCauses: self._confirm_causes,
            AppendWitnesses: self._confirm_witnesses,
            RecordDisposal: self._confirm_disposal,
            AdoptOrphans: self._confirm_adoption,
            Together: self._confirm_together,
        }
        for part in parts:
            tables = MemoryTables(self._undo, self._load)
            for kind, apply in part.memory.items():
                self._handlers[kind] = partial(self._apply_part, apply, tables)
            for kind, confirm in part.memory_confirm.items():
                self._confirmations[kind] = partial(confirm, tables)

    async def __aenter__(self) -> Self:
        """Give the store; there is nothing to open."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        """Do nothing: the facts stay as long as the object."""

    @asynccontextmanager
    async def claim_room(self, claim: RoomClaim) -> AsyncGenerator[int, None]:
        """Own a room for the length of a block; the value is its epoch. The object itself is the lock.

        Raises:
            RoomInUseError: a block of this store owns it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        room = self._claim(claim)
        epoch = room.epoch
        try:
            yield epoch
        finally:
            # A clock may have stepped back since the claim.
            now = claim.at if claim.wall_clock is None else claim.wall_clock.now_micros()
            room.closed_at = max(now, room.opened_at)
            room.owned = False

    def _claim(self, claim: RoomClaim) -> _Room:
        name = check_room_name(claim.name)
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = _Room(name, claim.incarnation, 1, claim.at)
            return room
        if room.owned:
            raise RoomInUseError(name, _this_process())
        room.incarnation = claim.incarnation
        room.epoch += 1
        room.opened_at = max(claim.at, room.opened_at, room.closed_at or 0, room.latest_start)
        room.closed_at = None
        room.owned = True
        room.orphans.update(room.live)
        room.live = {}
        return room

    async def write(self, mutation: Mutation[A]) -> A:
        """Apply one mutation in this turn.

        Durability: on return it is stored for the life of this object.

        Cancellation: checked once, before anything is applied.

        Raises:
            WriteRefusedError: nothing was stored, nothing will be.
            InvalidRecordError: it holds something that no record may hold.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        return cast("A", self._apply(mutation))

    async def write_shielded(self, mutation: Mutation[A]) -> A:
        """As `write`, without looking at cancellation at all."""
        return cast("A", self._apply(mutation))

    async def write_each(
        self, mutations: Sequence[Mutation[Any]]
    ) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Apply several independent mutations, in order; refusals are given as values."""
        for mutation in mutations:
            check_mutation(mutation)
        results: list[Any] = []
        for mutation in mutations:
            try:
                results.append(self._dispatch(mutation))
            except WriteRefusedError as refusal:
                results.append(refusal)
        return results

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Read a mutation's identity back."""
        check_mutation(mutation)
        return self._confirm(mutation)

    async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run with its causes, or None if the room has none of that id."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return self._load(room, run_id)

    async def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page of Runs.

        Raises:
            InvalidRecordError: the limit is not 1 to 100.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        limit = check_limit(query.limit)
        room = self._rooms.get(query.room)
        if room is None:
            return RunPage((), None)
        found = [_record(row) for row in islice(_matching(room, query), limit + 1)]
        if len(found) <= limit:
            return RunPage(tuple(found), None)
        last = found[limit - 1]
        return RunPage(tuple(found[:limit]), RunCursor(last.started_at, last.id))

    async def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read all rooms, by name."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return tuple(
            RoomRecord(
                name=room.name,
                incarnation=room.incarnation,
                epoch=room.epoch,
                owner=_this_process() if room.owned else None,
                opened_at=room.opened_at,
                closed_at=room.closed_at,
            )
            for _, room in sorted(self._rooms.items())
        )

    # -- mutations ---------------------------------------------------------------------------------------------------

    def _apply(self, mutation: Mutation[Any]) -> Any:
        check_mutation(mutation)
        return self._dispatch(mutation)

    def _dispatch(self, mutation: Mutation[Any]) -> Any:
        room = self._rooms.get(mutation.room)
        if room is None or room.epoch != mutation.epoch:
            _refuse_owner(mutation)
        handler = self._handlers.get(type(mutation))
        if handler is None:
            _refuse_kind(mutation)
        return handler(room, mutation)

    def _admit(self, room: _Room, admission: AdmitRun) -> None:
        key = admission.id.int
        row = self._rows.get(key)
        if row is not None:
            if row.end is not None:
                raise WriteRefusedError("terminal-fence", detail=f"run {admission.id} ended as {row.end.status}")
            if row.admission == admission:
                return
            raise WriteRefusedError("run-exists", detail=f"run {admission.id} is running with other content")
        self._insert_allowed(room, admission)
        self._rows[key] = room.rows[key] = room.live[key] = _Row(admission)
        room.latest_start = max(room.latest_start, admission.started_at)

    def _insert_allowed(self, room: _Room, admission: AdmitRun) -> None:
        if admission.incarnation is not room.incarnation and admission.incarnation != room.incarnation:
            raise WriteRefusedError("not-owner", detail=f"room {room.name!r} is in another incarnation")
        parent = admission.parent_id
        if parent is not None and parent.int not in room.live:
            raise WriteRefusedError("parent-not-live", detail=f"run {parent} isn't running in room {room.name!r}")

    def _fence(self, room: _Room, fence: FenceAdmission) -> None:
        admission = fence.admission
        key = admission.id.int
        row = self._rows.get(key)
        if row is None:
            self._insert_allowed(room, admission)
            self._rows[key] = room.rows[key] = _Row(admission, _end_of_fence(fence))
            room.latest_start = max(room.latest_start, admission.started_at)
        elif row.end is not None:
            if not _is_fence(row, fence):
                raise WriteRefusedError("terminal-fence", detail=f"run {admission.id} ended as {row.end.status}")
        elif row.admission == admission:
            self._end(room, key, row, _end_of_fence(fence))
        else:
            raise WriteRefusedError("run-exists", detail=f"run {admission.id} is running with other content")

    def _finish(self, room: _Room, finish: FinishRun) -> None:
        key = finish.id.int
        row = self._row(room, finish.id)
        if row.end is not None:
            if not _same_outcome(row.end, finish):
                raise WriteRefusedError("terminal-fence", detail=f"run {finish.id} ended as {row.end.status}")
            if finish.family_returned and not row.witnesses & _FAMILY:
                raise WriteRefusedError("witness-late", detail=f"run {finish.id} ended without its family witness")
            return
        if finish.family_returned:
            _family_supported(row)
        if finish.status == RunStatus.WAITING and not (
            finish.job_result_state is None and finish.job_scorecard is None
        ):
            raise WriteRefusedError("outcome-early", detail=f"a result on the waiting run {finish.id}")
        if finish.family_returned:
            row.witnesses |= _FAMILY
        self._end(room, key, row, finish)

    def _end(self, room: _Room, key: int, row: _Row, end: FinishRun) -> None:
        row.end = end
        row.changed_at = None
        if room.live.pop(key, None) is None:
            del room.orphans[key]

    def _record_causes(self, room: _Room, mutation: RecordCauses) -> None:
        key = mutation.id.int
        row = self._rows.get(key)
        if row is not None and row.admission.room != room.name:
            row = None
        stored: frozenset[int] = frozenset() if row is None else row.causes
        new = [cause for cause in mutation.causes if cause.int not in stored]
        if not new:
            return
        if row is None or row.end is not None:
            raise WriteRefusedError("cause", detail=f"run {mutation.id} isn't running, so it consumes nothing")
        for cause in new:
            if not self._may_cause(room, cause):
                raise WriteRefusedError("cause", detail=f"run {cause} hasn't ended in room {room.name!r}")
        row.causes = stored.union(cause.int for cause in new)

    def _may_cause(self, room: _Room, cause: UUID) -> bool:
        # The consumer is running, so this refuses it as its own cause, too.
        row = self._rows.get(cause.int)
        return row is not None and row.admission.room == room.name and row.end is not None and row.end.status in ENDED

    def _append_witnesses(self, room: _Room, mutation: AppendWitnesses) -> None:
        wanted = _witnesses_of(mutation)
        if wanted is None:
            raise WriteRefusedError(
                "witness-invalid", detail=f"a value is not the stage's witness of run {mutation.id}"
            )
        row = self._row(room, mutation.id)
        new = wanted & ~row.witnesses
        if not new:
            return
        if new & _FAMILY:
            _family_supported(row)
        after = row.witnesses | new
        ended = row.end is not None
        if ended and new & (_FAMILY | _CORE):
            raise WriteRefusedError("witness-late", detail=f"run {mutation.id} has ended")
        if new & _ADAPTER and not (after & _CORE and row.end is not None and row.end.status in ENDED):
            raise WriteRefusedError("adapter-order", detail=f"run {mutation.id} lacks its core witness or its end")
        row.changed_at = max(mutation.at, row.updated_at())
        row.witnesses = after

    def _record_disposal(self, room: _Room, mutation: RecordDisposal) -> None:
        row = self._row(room, mutation.id)
        if row.disposal == mutation.disposal:
            return
        if row.end is None or not _was_fenced(row.end):
            raise WriteRefusedError("disposal-order", detail=f"run {mutation.id} isn't a fenced admission")
        row.changed_at = max(mutation.at, row.updated_at())
        row.disposal = mutation.disposal

    def _adopt(self, room: _Room, mutation: AdoptOrphans) -> int:
        if mutation.incarnation != room.incarnation:
            _refuse_owner(mutation)
        keys = list(islice(room.orphans, mutation.limit))
        for key in keys:
            row = room.orphans.pop(key)
            admission = row.admission
            row.end = FinishRun(
                room=room.name,
                epoch=mutation.epoch,
                id=admission.id,
                status=RunStatus.FAILED,
                reason="orphaned",
                error=None,
                # The clock may stand before the dead process's own; a row's times never go backwards.
                ended_at=max(mutation.at, row.updated_at()),
                family_returned=False,
                job_result_state=None if admission.job_offer is None else "unavailable",
            )
            row.changed_at = None
        return len(keys)

    def _together(self, room: _Room, mutation: Together) -> tuple[Any, ...]:
        results: list[Any] = []
        with self._undo:
            for inner in mutation.mutations:
                self._remember(room, inner)
                results.append(self._dispatch(inner))
        return tuple(results)

    def _apply_part(
        self, apply: Callable[[MemoryTables, Any], Any], tables: MemoryTables, _room: _Room, mutation: Any
    ) -> Any:
        with self._undo:
            return apply(tables, mutation)

    def _row(self, room: _Room, run_id: UUID) -> _Row:
        row = self._rows.get(run_id.int)
        if row is None or row.admission.room != room.name:
            raise WriteRefusedError("run-unknown", detail=f"room {room.name!r} has no run {run_id}")
        return row

    def _remember(self, room: _Room, mutation: Mutation[Any]) -> None:
        """Note how to take a mutation of the core back; those of parts note it themselves."""
        if isinstance(mutation, AdoptOrphans):
            keys = list(islice(room.orphans, mutation.limit))
        elif isinstance(mutation, FenceAdmission):
            keys = [mutation.admission.id.int]
        elif isinstance(mutation, AdmitRun | FinishRun | RecordCauses | AppendWitnesses | RecordDisposal):
            keys = [mutation.id.int]
        else:
            return
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                self._undo.note(partial(self._forget, room, key, room.latest_start))
            elif row.admission.room == room.name:
                home = room.live if key in room.live else room.orphans if key in room.orphans else None
                self._undo.note(partial(_restore, row, copy(row), home))

    def _forget(self, room: _Room, key: int, latest_start: int) -> None:
        room.latest_start = latest_start
        if self._rows.pop(key, None) is not None:
            del room.rows[key]
            room.live.pop(key, None)

    # -- confirmations -----------------------------------------------------------------------------------------------

    def _confirm(self, mutation: Mutation[Any]) -> Confirmation:
        read = self._confirmations.get(type(mutation))
        if read is None:
            _refuse_kind(mutation)
        return read(mutation)

    def _find(self, room: str, run_id: UUID) -> _Row | None:
        row = self._rows.get(run_id.int)
        return None if row is None or row.admission.room != room else row

    def _confirm_admission(self, admission: AdmitRun) -> Confirmation:
        row = self._rows.get(admission.id.int)
        if row is None:
            return Confirmation.ABSENT
        return Confirmation.PRESENT if row.end is None and row.admission == admission else Confirmation.CONFLICT

    def _confirm_fence(self, fence: FenceAdmission) -> Confirmation:
        row = self._rows.get(fence.admission.id.int)
        if row is None:
            return Confirmation.ABSENT
        if row.end is not None:
            return Confirmation.PRESENT if _is_fence(row, fence) else Confirmation.CONFLICT
        return Confirmation.ABSENT if row.admission == fence.admission else Confirmation.CONFLICT

    def _confirm_finish(self, finish: FinishRun) -> Confirmation:
        row = self._find(finish.room, finish.id)
        if row is None or row.end is None:
            return Confirmation.ABSENT
        witnessed = not finish.family_returned or row.witnesses & _FAMILY
        return Confirmation.PRESENT if witnessed and _same_outcome(row.end, finish) else Confirmation.CONFLICT

    def _confirm_causes(self, mutation: RecordCauses) -> Confirmation:
        row = self._find(mutation.room, mutation.id)
        if row is None:
            return Confirmation.ABSENT if mutation.causes else Confirmation.PRESENT
        if row.causes.issuperset(cause.int for cause in mutation.causes):
            return Confirmation.PRESENT
        return Confirmation.ABSENT if row.end is None else Confirmation.CONFLICT

    def _confirm_witnesses(self, mutation: AppendWitnesses) -> Confirmation:
        wanted = _witnesses_of(mutation)
        if wanted is None:
            return Confirmation.CONFLICT
        row = self._find(mutation.room, mutation.id)
        if row is None:
            return Confirmation.ABSENT
        missing = wanted & ~row.witnesses
        if not missing:
            return Confirmation.PRESENT
        late = row.end is not None and missing & (_FAMILY | _CORE)
        return Confirmation.CONFLICT if late else Confirmation.ABSENT

    def _confirm_disposal(self, mutation: RecordDisposal) -> Confirmation:
        row = self._find(mutation.room, mutation.id)
        if row is None or row.end is None:
            return Confirmation.ABSENT
        if row.disposal == mutation.disposal:
            return Confirmation.PRESENT
        return Confirmation.ABSENT if _was_fenced(row.end) else Confirmation.CONFLICT

    def _confirm_adoption(self, mutation: AdoptOrphans) -> Confirmation:
        room = self._rooms.get(mutation.room)
        if room is None:
            return Confirmation.PRESENT
        # Seen by an older owner, the rows of later incarnations are other ones, too.
        others = () if mutation.incarnation == room.incarnation else room.live.values()
        left = any(row.admission.incarnation != mutation.incarnation for row in chain(room.orphans.values(), others))
        return Confirmation.ABSENT if left else Confirmation.PRESENT

    def _confirm_together(self, mutation: Together) -> Confirmation:
        found = {self._confirm(inner) for inner in mutation.mutations}
        if Confirmation.CONFLICT in found:
            return Confirmation.CONFLICT
        return Confirmation.ABSENT if Confirmation.ABSENT in found else Confirmation.PRESENT

    # -- reads -------------------------------------------------------------------------------------------------------

    def _load(self, room: str, run_id: RunId) -> RunRecord | None:
        row = self._find(room, run_id)
        if row is None:
            return None
        causes = tuple(RunId(self._rows[key].admission.id) for key in sorted(row.causes))
        return _record(row, causes)


def _restore(row: _Row, before: _Row, home: dict[int, _Row] | None) -> None:
    """Give a row its former content and its place among the running ones, keeping its object."""
    for name in row.__struct_fields__:
        setattr(row, name, getattr(before, name))
    if home is not None:
        home[row.admission.id.int] = row


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid()}


def _refuse_owner(mutation: Mutation[Any]) -> NoReturn:
    raise WriteRefusedError("not-owner", detail=f"epoch {mutation.epoch} doesn't own room {mutation.room!r}")


def _refuse_kind(mutation: Mutation[Any]) -> NoReturn:
    raise InvalidRecordError(
        "mutation", f"no part of this store knows a {type(mutation).__name__}; pass its StorePart to the store"
    )


def _family_supported(row: _Row) -> None:
    if row.admission.family_version is None:
        raise WriteRefusedError("family-version", detail=f"run {row.admission.id} is from before families")


def _end_of_fence(fence: FenceAdmission) -> FinishRun:
    admission = fence.admission
    return FinishRun(
        room=admission.room,
        epoch=admission.epoch,
        id=admission.id,
        status=RunStatus.FAILED,
        reason="admission-failed",
        error=fence.error,
        ended_at=fence.ended_at,
        family_returned=False,
    )


def _was_fenced(end: FinishRun) -> bool:
    return end.status == RunStatus.FAILED and end.reason == "admission-failed"


def _is_fence(row: _Row, fence: FenceAdmission) -> bool:
    return row.admission == fence.admission and row.end == _end_of_fence(fence)


def _same_outcome(end: FinishRun, finish: FinishRun) -> bool:
    """Compare what both would store as the outcome: all but sender and witness."""
    return (
        end.status == finish.status
        and end.reason == finish.reason
        and end.error == finish.error
        and end.ended_at == finish.ended_at
        and end.job_result_state == finish.job_result_state
        and end.job_scorecard == finish.job_scorecard
    )


def _witnesses_of(mutation: AppendWitnesses) -> int | None:
    """Give the witnesses that it asks for as flags, or None if one of them is not what its stage computes."""
    wanted = 0
    for flag, stage, value in (
        (_FAMILY, WitnessStage.FAMILY_RETURN, mutation.family),
        (_CORE, WitnessStage.CORE_CLEANUP, mutation.core),
        (_ADAPTER, WitnessStage.ADAPTER_CLEANUP, mutation.adapter),
    ):
        if value is not None:
            if value != witness_id(stage, mutation.id):
                return None
            wanted |= flag
    return wanted


def _matching(room: _Room, query: RunQuery) -> Iterator[_Row]:
    """Give a room's rows that a query asks for, in the order of lists."""
    if len(room.listed) != len(room.rows):
        new = islice(room.rows.items(), len(room.listed), None)
        room.listed.extend((row.admission.started_at, key) for key, row in new)
        # Rows come nearly in the order of their start, which this sort takes in about one pass.
        room.listed.sort()
    end = len(room.listed)
    if query.before is not None:
        end = bisect_left(room.listed, (query.before.started_at, query.before.id.int))
    under = None if query.under is None else _Subtree(room, query.under)
    for index in range(end - 1, -1, -1):
        row = room.rows[room.listed[index][1]]
        if (
            (query.status is None or _status(row) is query.status)
            and (query.parent is None or row.admission.parent_id == query.parent)
            and (not query.jobs or row.admission.job_version is not None)
            and (under is None or row in under)
        ):
            yield row


class _Subtree:
    """A Run and its structural descendants, found by walking up from each asked row, once for each."""

    __slots__ = ("_known", "_rows")

    def __init__(self, room: _Room, top: UUID) -> None:
        self._rows = room.rows
        self._known = {top.int: True}

    def __contains__(self, row: _Row) -> bool:
        path: list[int] = []
        key: int | None = row.admission.id.int
        while key is not None and key not in self._known:
            path.append(key)
            parent = self._rows[key].admission.parent_id
            key = None if parent is None else parent.int
        inside = key is not None and self._known[key]
        self._known.update(dict.fromkeys(path, inside))
        return inside


def _status(row: _Row) -> RunStatus:
    return RunStatus.RUNNING if row.end is None else RunStatus(row.end.status)


def _record(row: _Row, causes: tuple[RunId, ...] = ()) -> RunRecord:
    admission = row.admission
    end = row.end
    status = _status(row)
    run_id = RunId(admission.id)

    def witness(flag: int, stage: WitnessStage) -> UUID | None:
        return witness_id(stage, run_id) if row.witnesses & flag else None

    return RunRecord(
        id=run_id,
        room=admission.room,
        incarnation=admission.incarnation,
        kind=admission.kind,
        actor=admission.actor,
        parent_id=None if admission.parent_id is None else RunId(admission.parent_id),
        trigger_id=admission.trigger_id,
        provenance=decode_json(admission.provenance),
        family_version=admission.family_version,
        job_version=admission.job_version,
        job_key=admission.job_key,
        job_offer=admission.job_offer,
        job_experiment=admission.job_experiment,
        created_at=admission.created_at,
        started_at=admission.started_at,
        status=status,
        reason=None if end is None else end.reason,
        error=None if end is None else end.error,
        ended_at=end.ended_at if end is not None and status.terminal else None,
        job_result_state=None if end is None else end.job_result_state,
        job_scorecard=None if end is None else end.job_scorecard,
        family_return_ack=witness(_FAMILY, WitnessStage.FAMILY_RETURN),
        job_core_cleanup_ack=witness(_CORE, WitnessStage.CORE_CLEANUP),
        job_adapter_cleanup_ack=witness(_ADAPTER, WitnessStage.ADAPTER_CLEANUP),
        admission_disposal=row.disposal,
        updated_at=row.updated_at(),
        caused_by=causes,
    )
