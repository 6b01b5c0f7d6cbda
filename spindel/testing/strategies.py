"""Strategies for hypothesis: lists of store operations as data, to be replayed over one store after another.

An operation names Runs from a small pool and times from a small range, so that operations meet each other's rows often:
repeats, conflicts, late writes and old owners are the rule in a script, not the exception.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import attrs
from hypothesis import strategies as st

from spindel.errors import WriteRefusedError, WriteUncertainError
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
    Together,
)
from spindel.store._records import RunQuery, RunRecord, RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.store._contract import Store
    from spindel.store._mutations import Mutation

__all__ = ["Confirm", "Operation", "Reopen", "Replay", "Write", "mutations", "replay", "scripts"]

ROOMS: Final = ("one", "two")
RUNS: Final = tuple(UUID(int=(7 << 76) | (2 << 62) | number) for number in range(1, 7))
STATUSES: Final = ("waiting", "completed", "failed", "cancelled")


@attrs.frozen
class Write:
    """Write these mutations, together with one wait."""

    mutations: tuple[Mutation[Any], ...]


@attrs.frozen
class Confirm:
    """Read this mutation's identity back."""

    mutation: Mutation[Any]


@attrs.frozen
class Reopen:
    """Leave both rooms and the store; open and claim them again, with this clock."""

    at: int


Operation = Write | Confirm | Reopen


def _incarnation(epoch: int) -> UUID:
    return UUID(int=(0xC << 124) | (7 << 76) | (2 << 62) | epoch)


def _times() -> st.SearchStrategy[int]:
    return st.integers(min_value=1, max_value=5)


def _optional(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from((None,) * max(2, len(values)) + values)


def _rooms() -> st.SearchStrategy[str]:
    # Mostly one room: else most operations would miss the Run that they name.
    return st.sampled_from((*ROOMS[:1] * 5, *ROOMS))


@cache
def _admissions(epoch: int) -> st.SearchStrategy[AdmitRun]:
    return st.builds(
        AdmitRun,
        room=_rooms(),
        epoch=st.just(epoch),
        incarnation=st.sampled_from((_incarnation(epoch),) * 15 + (_incarnation(epoch + 1),)),
        id=st.sampled_from(RUNS),
        kind=st.just("run"),
        actor=st.sampled_from(("a", "ä")),
        parent_id=_optional(*RUNS),
        trigger_id=_optional(RUNS[0]),
        provenance=st.sampled_from(("{}", '{"a":[1,null]}')),
        family_version=st.sampled_from((1, 1, 1, None)),
        created_at=st.just(1),
        started_at=_times(),
        job_version=_optional(1),
        job_offer=_optional(RUNS[1]),
    )


@cache
def mutations(epoch: int) -> st.SearchStrategy[Mutation[Any]]:
    """Draw mutations of the core, of one of two rooms, sent by the owner of this epoch."""
    sender: dict[str, Any] = {"room": _rooms(), "epoch": st.just(epoch)}
    target: dict[str, Any] = sender | {"id": st.sampled_from(RUNS)}
    texts = _optional("text", "other", "ü" * 2000)
    reasons = _optional("because", "admission-failed", "orphaned")
    admissions = _admissions(epoch)
    finishes = st.builds(
        FinishRun,
        **target,
        status=st.sampled_from(STATUSES),
        reason=reasons,
        error=texts,
        ended_at=_times(),
        family_returned=st.booleans(),
        job_result_state=_optional("accepted"),
        job_scorecard=_optional(RUNS[2]),
    )
    # Most Runs end plainly; without these, hardly any would reach what comes after an end.
    plain = st.builds(
        FinishRun,
        **target,
        status=st.sampled_from(STATUSES),
        reason=st.none(),
        error=st.none(),
        ended_at=_times(),
        family_returned=st.booleans(),
    )
    causes = st.builds(RecordCauses, **target, causes=st.lists(st.sampled_from(RUNS), max_size=3).map(tuple))
    disposals = st.builds(RecordDisposal, **target, at=_times(), disposal=st.just("discarded"))
    adoptions = st.builds(AdoptOrphans, **sender, incarnation=st.just(_incarnation(epoch)), at=_times())
    fences = st.builds(FenceAdmission, admission=admissions, error=texts, ended_at=_times())
    return st.one_of(
        admissions, admissions, plain, plain, finishes, fences, causes, _witnesses(epoch), disposals, adoptions
    )


@st.composite
def _witnesses(draw: st.DrawFn, epoch: int) -> AppendWitnesses:
    run = draw(st.sampled_from(RUNS))
    values: dict[str, UUID] = {}
    for name, stage in zip(("family", "core", "adapter"), WitnessStage, strict=True):
        choice = draw(st.sampled_from(("none",) * 6 + ("right",) * 6 + ("wrong",)))
        if choice != "none":
            values[name] = witness_id(stage, run) if choice == "right" else run
    return AppendWitnesses(room=draw(_rooms()), epoch=epoch, id=run, at=draw(_times()), **values)


@st.composite
def scripts(draw: st.DrawFn, *, steps_max: int = 30) -> list[Operation]:
    """Draw a list of operations over two rooms, from their first claim on.

    Mutations are new ones, exact repeats of earlier ones, also from before the last opening, or several of them as a
    `Together`.
    """
    epoch = 1
    earlier: list[Mutation[Any]] = []
    script: list[Operation] = []

    def draw_mutation() -> Mutation[Any]:
        if earlier and draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(earlier))
        mutation = draw(mutations(epoch))
        earlier.append(mutation)
        return mutation

    def admit_some() -> None:
        """Begin an opening with Runs to act upon; the rest of the script decides what becomes of them."""
        first = draw(st.lists(_admissions(epoch), max_size=len(RUNS), unique_by=lambda admission: admission.id))
        earlier.extend(first)
        if first:
            script.append(Write(tuple(first)))

    def draw_together() -> Together:
        first = draw_mutation()
        more = [draw_mutation() for _ in range(draw(st.integers(0, 3)))]
        return Together(mutations=(first, *(m for m in more if (m.room, m.epoch) == (first.room, first.epoch))))

    admit_some()
    for _ in range(draw(st.integers(0, steps_max))):
        choice = draw(st.integers(0, 11))
        if choice == 0:
            epoch += 1
            script.append(Reopen(draw(_times())))
            admit_some()
        elif choice == 1:
            script.append(Write((draw_together(),)))
        elif choice <= 3:
            script.append(Confirm(draw_mutation()))
        else:
            script.append(Write(tuple(draw_mutation() for _ in range(draw(st.sampled_from((1, 1, 1, 4)))))))
    return script


@attrs.frozen
class Replay:
    """What a store answered and what it holds at the end of a script; equal ones are equal stores.

    Attributes:
        answers: of each operation; a refusal is its code.
        runs: every Run with its causes, in the order of lists, room by room.
        rooms: name, incarnation, epoch, opened_at and closed_at of each.
    """

    answers: tuple[Any, ...]
    runs: tuple[RunRecord, ...]
    rooms: tuple[tuple[Any, ...], ...]


async def replay(script: list[Operation], reopen: Callable[[], Store]) -> Replay:
    """Do what a script says, over the stores that `reopen` makes of the same facts.

    It checks on the way that lists agree with what is read one by one, whatever the filter.
    """
    answers: list[Any] = []
    epoch = 1
    async with AsyncExitStack() as stack:
        store = await _open(stack, reopen, epoch, at=1)
        for operation in script:
            match operation:
                case Reopen(at):
                    await stack.aclose()
                    epoch += 1
                    store = await _open(stack, reopen, epoch, at)
                case Confirm(mutation):
                    answers.append(str(await store.confirm(mutation)))
                case Write(batch):
                    answers.append(tuple(map(_answer, await store.write_each(batch))))
        runs = [run for room in ROOMS for run in await _read_all(store, room)]
        rooms = [(r.name, r.incarnation, r.epoch, r.opened_at, r.closed_at) for r in await store.list_rooms()]
    return Replay(tuple(answers), tuple(runs), tuple(rooms))


async def _open(stack: AsyncExitStack, reopen: Callable[[], Store], epoch: int, at: int) -> Store:
    store = await stack.enter_async_context(reopen())
    for room in ROOMS:
        got = await stack.enter_async_context(store.claim_room(RoomClaim(room, _incarnation(epoch), at)))

        assert got == epoch
    return store


def _answer(result: object) -> object:
    if isinstance(result, WriteRefusedError):
        return result.code
    return "uncertain" if isinstance(result, WriteUncertainError) else result


async def _read_all(store: Store, room: str) -> list[RunRecord]:
    listed = (await store.list_runs(RunQuery(room=room, limit=100))).runs
    for status in RunStatus:
        some = (await store.list_runs(RunQuery(room=room, status=status, limit=100))).runs

        assert list(some) == [run for run in listed if run.status is status]
    for parent in RUNS:
        children = (await store.list_runs(RunQuery(room=room, parent=RunId(parent), limit=100))).runs
        under = (await store.list_runs(RunQuery(room=room, under=RunId(parent), limit=100))).runs

        assert list(children) == [run for run in listed if run.parent_id == parent]
        assert list(under) == [run for run in listed if parent in _line(run, listed)]
    loaded = [await store.load_run(room, run.id) for run in listed]

    assert [run and attrs.evolve(run, caused_by=()) for run in loaded] == list(listed)
    return [run for run in loaded if run is not None]


def _line(run: RunRecord, listed: tuple[RunRecord, ...]) -> list[UUID]:
    """Give a Run and its ancestors."""
    by_id = {other.id: other for other in listed}
    line: list[UUID] = [run.id]
    while run.parent_id is not None:
        run = by_id[run.parent_id]
        line.append(run.id)
    return line
