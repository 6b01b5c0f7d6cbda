"""The rules: each is broken by a history that breaks it, and by none that doesn't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import attrs
import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.ids import RunId, WitnessStage, witness_id
from spindel.observe import RoomFenced, RunCancelRequested, RunFinished, RunHeld, RunRecovered, RunStarted
from spindel.runs import observe_settlement, open_room
from spindel.runs._states import LeasePhase
from spindel.store import AdmitRun, AppendWitnesses, FinishRun, MemoryStore, Together
from spindel.testing.simulation import (
    INVARIANTS,
    Answered,
    Called,
    Closed,
    Happened,
    History,
    InvariantError,
    Issued,
    Observed,
    Operated,
    RecordingStore,
    Restarted,
    Returned,
    check_invariants,
    check_left,
    check_live,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.runs import Run

RUN, CHILD = RunId(UUID(int=1)), RunId(UUID(int=2))


def admit(run_id: RunId = RUN, parent: RunId | None = None, job: int | None = None) -> AdmitRun:
    return AdmitRun(
        room="r", epoch=1, incarnation=UUID(int=9), id=run_id, kind="run", actor="local", parent_id=parent,
        trigger_id=None, provenance="{}", family_version=1, created_at=1, started_at=1, job_version=job,
    )  # fmt: skip


def finish(run_id: RunId = RUN, status: str = "completed") -> FinishRun:
    return FinishRun(
        room="r", epoch=1, id=run_id, status=status, reason=None, error=None, ended_at=2, family_returned=True
    )


def witness(stage: str) -> AppendWitnesses:
    stages = {"core": WitnessStage.CORE_CLEANUP, "adapter": WitnessStage.ADAPTER_CLEANUP}
    return AppendWitnesses(room="r", epoch=1, id=RUN, at=2, **{stage: witness_id(stages[stage], RUN)})


class Story:
    """A history told in a few words."""

    def __init__(self) -> None:
        self.history = History()
        self._events = 0

    def write(self, mutation: Any, answer: Any = "stored") -> Story:
        self.history.writes += 1
        self.history.add(Issued(self.history.writes, mutation))
        if answer is not None:
            self.history.add(Answered(self.history.writes, mutation, answer))
        return self

    def tell(self, kind: type[Any], *facts: Any) -> Story:
        self._events += 1
        self.history.add(Happened("r", kind(self._events, 1, *facts)))
        return self

    def start(self, run_id: RunId = RUN, parent: RunId | None = None, job: int | None = None) -> Story:
        return self.write(admit(run_id, parent, job)).tell(RunStarted, run_id, parent, "run", "local")

    def end(self, run_id: RunId = RUN, status: str = "completed") -> Story:
        return self.write(finish(run_id, status)).tell(RunFinished, run_id, status, None)

    def call(self, function: str, run_id: RunId = RUN) -> Story:
        self.history.add(Called(run_id, function))
        return self

    def leave(self, function: str, error: str | None = None, run_id: RunId = RUN) -> Story:
        self.history.add(Returned(run_id, function, error))
        return self

    def add(self, record: Any) -> Story:
        self.history.add(record)
        return self


def broken(rule: str, story: Story) -> str:
    """Give what the rule says."""
    with pytest.raises(InvariantError) as caught:
        check_invariants(story.history, INVARIANTS)
    assert caught.value.rule == rule
    return str(caught.value)


async def recorded() -> History:
    """A true history: a parent with a child, in a room of ours, with its rows."""
    history = History()
    store = RecordingStore(MemoryStore(), history)

    async def child(run: Run[None]) -> None:
        with history.calling(run.id, "body"):
            await trio.lowlevel.checkpoint()

    async def parent(run: Run[None]) -> None:
        with history.calling(run.id, "body"):
            await run.start_child(child)

    async with open_room(store, name="r") as room:
        history.follow(room)
        await room.start(parent)
    history.add(Closed("r", room.state.value))
    await history.read_rows(store)
    return history


async def test_a_room_of_ones_own_can_be_recorded_and_checked() -> None:
    """Without a simulation, too: a recording store, the room's events, and what the program tells of itself."""
    history = await recorded()

    check_invariants(history, INVARIANTS)
    assert len(history.rows or {}) == 2
    assert sum(1 for _ in history.of(Called)) == 2


def gap() -> Story:
    story = Story().start()
    story._events += 1
    return story.end()


STORIES: dict[str, tuple[str, Callable[[], Story]]] = {
    "told without being stored": (
        "OneOutcome",
        lambda: Story().start().write(finish(), "uncertain").tell(RunFinished, RUN, "completed", None),
    ),
    "told otherwise than stored": (
        "OneOutcome",
        lambda: Story().start().write(finish()).tell(RunFinished, RUN, "failed", None),
    ),
    "another outcome is written": (
        "OneOutcome",
        lambda: Story().start().write(finish(), "uncertain").write(finish(status="failed"), "refused"),
    ),
    "told twice": ("OneOutcome", lambda: Story().start().end().tell(RunFinished, RUN, "completed", None)),
    "core vouched for too early": (
        "WitnessesInOrder",
        lambda: Story().start(job=1).call("core").write(witness("core")),
    ),
    "core vouched for though it failed": (
        "WitnessesInOrder",
        lambda: Story().start(job=1).call("core").leave("core", "ValueError").write(witness("core")),
    ),
    "an outcome before the core witness": ("WitnessesInOrder", lambda: Story().start(job=1).write(finish())),
    "adapter vouched for before the outcome": (
        "WitnessesInOrder",
        lambda: Story().start(job=1).write(witness("core")).write(witness("adapter")),
    ),
    "a child outlives its parent": (
        "NothingOutlivesItsLease",
        lambda: Story().start().start(CHILD, RUN).write(finish()),
    ),
    "a body outlives its outcome": ("NothingOutlivesItsLease", lambda: Story().start().call("body").write(finish())),
    "a child is published after its parent's end": (
        "NothingOutlivesItsLease",
        lambda: Story().start().start(CHILD, RUN).end(CHILD).write(finish()).call("publish", CHILD),
    ),
    "published before it has finished": ("NothingOutlivesItsLease", lambda: Story().start().call("publish")),
    "the adapter after the release": ("NothingOutlivesItsLease", lambda: Story().start().end().call("adapter")),
    "entered again after it returned": (
        "CallbacksOnce",
        lambda: Story().start().call("core").leave("core").add(Operated(RUN, "core", "retry")).call("core"),
    ),
    "entered again unasked": (
        "CallbacksOnce",
        lambda: Story().start().call("core").leave("core", "ValueError").call("core"),
    ),
    "a body twice": (
        "CallbacksOnce",
        lambda: Story().start().call("body").leave("body", "Cancelled").add(Operated(RUN, "x", "retry")).call("body"),
    ),
    "a body before its row": ("CallbacksOnce", lambda: Story().write(admit(), "uncertain").call("body")),
    "not finished when the room is closed": (
        "EveryAdmissionEnds",
        lambda: Story().start().add(Closed("r", "closed")),
    ),
    "an end above what was given up": (
        "GivenUpIsUnknown",
        lambda: (
            Story()
            .start()
            .start(CHILD, RUN)
            .end(CHILD)
            .tell(RunRecovered, CHILD, "publishing", "abandon")
            .write(finish())
        ),
    ),
    "failed though it was asked to stop before": (
        "OutcomesTellTheWork",
        lambda: (
            Story()
            .start()
            .call("body")
            .tell(RunCancelRequested, RUN, "x")
            .leave("body", "ValueError")
            .end(RUN, "failed")
        ),
    ),
    "an end that broke down": (
        "NoEndBreaksDown",
        lambda: Story().start().tell(RunHeld, RUN, "finisher", "Cancelled"),
    ),
    "a fence that reaches nobody": (
        "RequestsReachAll",
        lambda: Story().start().call("body").tell(RoomFenced, "room-closing").leave("body"),
    ),
    "a request that stops at the parent": (
        "RequestsReachAll",
        lambda: (
            Story()
            .start()
            .start(CHILD, RUN)
            .call("body", CHILD)
            .tell(RunCancelRequested, RUN, "x")
            .call("task 1", CHILD)
        ),
    ),
    "a gap": ("EventsAreGapless", gap),
    "finished without a start": ("EventsAreGapless", lambda: Story().tell(RunFinished, RUN, "completed", None)),
    "asked to stop after its finish": (
        "EventsAreGapless",
        lambda: Story().start().end().tell(RunCancelRequested, RUN, "late"),
    ),
    "completed though the body failed": (
        "OutcomesTellTheWork",
        lambda: Story().start().call("body").leave("body", "ValueError").end(),
    ),
    "cancelled though nothing was": (
        "OutcomesTellTheWork",
        lambda: Story().start().call("body").leave("body").end(status="cancelled"),
    ),
    "completed though a task failed": (
        "OutcomesTellTheWork",
        lambda: Story().start().call("body").leave("body").call("task 1").leave("task 1", "ValueError").end(),
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_history_that_breaks_a_rule_is_told_by_that_rule(name: str) -> None:
    rule, story = STORIES[name]

    assert broken(rule, story())


def test_what_is_allowed_breaks_no_rule() -> None:
    """A retry after a failure, an attested stage, a cancelled body, a restart in the middle of everything."""
    story = Story().start(job=1).call("body").leave("body").call("core").leave("core", "ValueError")
    story.add(Operated(RUN, "core", "retry")).call("core").leave("core").write(witness("core"))
    story.write(finish(), "uncertain").write(finish()).call("adapter").leave("adapter", "ValueError")
    story.add(Operated(RUN, "adapter", "acknowledge")).write(witness("adapter"))
    story.tell(RunFinished, RUN, "completed", None).start(CHILD).call("body", CHILD)
    story.add(Restarted(1, "kill"))

    check_invariants(story.history, INVARIANTS)


async def test_rows_that_contradict_what_was_acknowledged_are_told() -> None:
    """A lost row, an outcome, a witness or an admission that changed, and a row that nobody wrote."""
    history = await recorded()
    rows = dict(history.rows or {})
    run_id, row = next(iter(rows.items()))
    forged = {
        "AcknowledgedIsKept": [
            {key: value for key, value in rows.items() if key != run_id},
            rows | {run_id: attrs.evolve(row, kind="another")},
            rows | {RUN: attrs.evolve(row, id=RUN, family_return_ack=None)},
        ],
        "OneOutcome": [rows | {run_id: attrs.evolve(row, reason="another")}],
        "WitnessesInOrder": [
            rows | {run_id: attrs.evolve(row, family_return_ack=None)},
            rows | {run_id: attrs.evolve(row, family_return_ack=UUID(int=5))},
            rows | {run_id: attrs.evolve(row, job_core_cleanup_ack=witness_id(WitnessStage.CORE_CLEANUP, run_id))},
        ],
    }

    for rule, cases in forged.items():
        for case in cases:
            history.rows = case
            with pytest.raises(InvariantError) as caught:
                check_invariants(history, INVARIANTS)
            assert caught.value.rule == rule


async def test_settled_needs_every_piece_of_evidence_and_stays() -> None:
    """A report is judged by what was acknowledged before it, and by reports before it."""
    history = await recorded()
    store = RecordingStore(MemoryStore(), history)
    async with open_room(store, name="other") as room:
        run = await room.start(_nothing)
        await run.wait_returned()
        report = await observe_settlement(room, run.id)
    good = History()
    good.records = [*history.records, Observed(report)]
    check_invariants(good, INVARIANTS)
    unstored = History()
    unstored.records = [Observed(report)]
    revoked = History()
    revoked.records = [*good.records, Observed(attrs.evolve(report, settled=False))]

    for case in (unstored, revoked):
        with pytest.raises(InvariantError) as caught:
            check_invariants(case, INVARIANTS)
        assert caught.value.rule == "SettledWithEvidence"


async def _nothing(_: Run[None]) -> None:
    await trio.lowlevel.checkpoint()


async def test_a_lease_that_is_early_is_seen_in_the_live_room() -> None:
    """A child whose parent's lease is gone, and one that its family doesn't know."""
    stop = trio.Event()

    async def child(_: Run[None]) -> None:
        await stop.wait()

    async def parent(run: Run[None]) -> None:
        await run.start_child(child)
        await stop.wait()

    async with open_room(name="r") as room:
        run = await room.start(parent)
        await wait_all_tasks_blocked()
        check_live(room)
        with pytest.raises(InvariantError, match="things are left"):
            check_left(room)
        entry = room.entries[run.id.int]
        entry.live = False
        with pytest.raises(InvariantError, match="its parent's lease is gone"):
            check_live(room)
        entry.live = True
        phase, entry.phase = entry.phase, LeasePhase.RELEASED
        with pytest.raises(InvariantError, match="in no family"):
            check_live(room)
        entry.phase = phase
        stop.set()

    check_left(room)


def test_mutations_in_one_are_told_as_those() -> None:
    """A `Together` hides nothing."""
    both = Together(mutations=(finish(), msgspec.structs.replace(finish(), status="failed")))

    assert "was to end as" in broken("OneOutcome", Story().start().write(both, None))
