"""Publication: what a parent still waits for after its child has ended."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.errors import (
    AcknowledgeRefusedError,
    AdmissionUncertainError,
    RunAbandonedError,
    StaleRevisionError,
    WaitRefusedError,
)
from spindel.operator import abandon_held, reconcile_settlement
from spindel.runs import (
    LaunchKind,
    LeaseFacts,
    LeasePhase,
    Outcome,
    Publication,
    Room,
    Run,
    current_run,
    observe_settlement,
    open_room,
)
from spindel.store import AdmitRun, RunStatus
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.runs import Executor, Launch, Ticket
    from spindel.store import Store


async def give(_: Run[int], value: int = 1) -> int:
    return value


async def wait_for(_: Run[None], event: trio.Event) -> None:
    await event.wait()


def is_open(run: Run[Any]) -> bool:
    try:
        run.outcome_nowait()
    except trio.WouldBlock:
        return True
    return False


async def lease_of(room: Room, run: Run[Any]) -> LeaseFacts:
    admission = (await observe_settlement(room, run.id)).admission
    assert admission is not None
    return admission


class Publisher:
    """Publishes as often as it is called; the first so many calls fail."""

    def __init__(self, *, failures: int = 0) -> None:
        self.outcomes: list[Outcome[Any]] = []
        self._failures = failures

    async def __call__(self, outcome: Outcome[Any]) -> None:
        self.outcomes.append(outcome)
        await trio.lowlevel.checkpoint()
        if len(self.outcomes) <= self._failures:
            raise OSError("secret-token")


@pytest.mark.parametrize(
    "order",
    [("exit", "return", "publish"), ("return", "exit", "publish"), ("return", "publish", "exit")],
    ids=" ".join,
)
async def test_the_last_of_exit_return_and_publication_frees_the_lease(store: Store, order: tuple[str, ...]) -> None:
    """R-43: in every order the lease stays until the last has come; the publication holds the join, not the result."""
    stop, done, published = trio.Event(), trio.Event(), trio.Event()
    come: set[str] = set()

    async def publish(_: Outcome[Any]) -> None:
        await published.wait()

    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        block = parent.reserve()
        token = block.__enter__()
        child = await parent.admit(token, wait_for, done, publish=publish)
        stop.set()
        for step in order:
            if step == "exit":
                block.__exit__(None, None, None)
            else:
                (done if step == "return" else published).set()
            come.add(step)
            await wait_all_tasks_blocked()
            leases = (await observe_settlement(room, parent.id)).leases

            assert is_open(child) == ("return" not in come)
            assert is_open(parent) == (step is not order[-1])
            if step is not order[-1]:
                (lease,) = leases
                assert lease == await lease_of(room, child)
                assert lease.callback_exited == ("exit" in come)
                assert lease.child_returned == ("return" in come)
                assert lease.publication is (Publication.ACKNOWLEDGED if "publish" in come else Publication.PENDING)
                assert lease.phase is (
                    LeasePhase.ADMITTED
                    if "return" not in come
                    else LeasePhase.RETURNED
                    if "publish" in come
                    else LeasePhase.PUBLISHING
                )

        assert (await observe_settlement(room, child.id)).admission is None


async def test_without_a_publication_exit_and_return_free_the_lease_in_either_order(store: Store) -> None:
    """R-43: a child without a publication owes two things only."""
    stop = trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        with parent.reserve() as token:
            child = await parent.admit(token, give)
            await child.wait_returned()
            inside = await lease_of(room, child)
        after = (await observe_settlement(room, parent.id)).leases
        stop.set()

    assert inside.phase is LeasePhase.RETURNED
    assert inside.publication is Publication.NONE
    assert after == ()


async def test_a_publication_gets_the_outcome_once_whatever_it_is(store: Store) -> None:
    """R-43: value, failure, cancellation: each is published once, after the row is stored."""
    published: dict[str, tuple[RunStatus, object, str]] = {}

    def publisher(name: str) -> Callable[[Outcome[Any]], Awaitable[None]]:
        async def publish(outcome: Outcome[Any]) -> None:
            assert name not in published
            record = await room.load(outcome.run_id)
            assert record is not None
            published[name] = (outcome.status, outcome.value, record.status.value)

        return publish

    async def fail(_: Run[None]) -> None:
        raise ValueError

    async with open_room(store, name="r") as room:
        await room.start(give, 7, publish=publisher("value"))
        await room.start(fail, publish=publisher("error"))
        cancelled = await room.start(wait_for, trio.Event(), publish=publisher("cancelled"))
        cancelled.cancel()

    assert published == {
        "value": (RunStatus.COMPLETED, 7, "completed"),
        "error": (RunStatus.FAILED, None, "failed"),
        "cancelled": (RunStatus.CANCELLED, None, "cancelled"),
    }


async def test_a_publication_runs_on_the_pool_and_can_not_wait_for_what_waits_for_it(store: Store) -> None:
    """R-43, R-47, R-75: it sees its Run, nobody's context variables, and may wait neither for its parent nor its room."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[object] = []

    async def publish(outcome: Outcome[Any]) -> None:
        run = current_run()
        assert run is not None
        seen.append((run.id == outcome.run_id, variable.get()))
        for wait in (run.wait_returned, parent.wait_returned, room.close):
            with pytest.raises(WaitRefusedError) as caught:
                await wait()
            seen.append(caught.value.reason)

    stop = trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        variable.set("the starter's")
        await parent.start_child(give, publish=publish)
        stop.set()

    assert seen == [(True, "unset"), "self", "self", "self"]


# -- held ------------------------------------------------------------------------------------------------------------


async def held_publication(room: Room, parent: Run[None], publish: Publisher) -> Run[int]:
    child = await parent.start_child(give, 7, publish=publish)
    assert await child.result() == 7
    await wait_all_tasks_blocked()
    return child


async def test_a_publication_that_raises_is_held_and_called_again_by_a_retry(store: Store) -> None:
    """R-44: held at `publishing`, the result being there; a retry calls it again, and the lease goes."""
    publish, stop = Publisher(failures=1), trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        child = await held_publication(room, parent, publish)
        lease = await lease_of(room, child)
        (held,) = room.held()
        stop.set()
        await wait_all_tasks_blocked()
        open_before = is_open(parent)
        assert lease.revision is not None
        after = await reconcile_settlement(
            room, child.id, lease_id=lease.lease_id, phase=lease.phase, revision=lease.revision
        )
        await parent.wait_returned()
        left = room.held()
        record = await room.load(parent.id)

    assert (held.run_id, held.lease_id, held.phase, held.code) == (child.id, lease.lease_id, "publishing", "OSError")
    assert (lease.held, lease.phase, lease.error) == (True, LeasePhase.PUBLISHING, "OSError")
    assert open_before
    assert (after.held, after.phase) == (False, LeasePhase.RELEASED)
    assert [outcome.value for outcome in publish.outcomes] == [7, 7]
    assert left == ()
    assert record is not None
    assert record.family_return_ack is not None


async def test_a_publication_that_raises_again_is_held_again_under_a_new_revision(store: Store) -> None:
    """R-44, R-63: a retry that fails rotates the revision; the old one is stale."""
    publish, stop = Publisher(failures=2), trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        child = await held_publication(room, parent, publish)
        first = await lease_of(room, child)
        assert first.revision is not None
        second = await reconcile_settlement(
            room, child.id, lease_id=first.lease_id, phase=first.phase, revision=first.revision
        )
        with pytest.raises(StaleRevisionError):
            await reconcile_settlement(
                room, child.id, lease_id=first.lease_id, phase=first.phase, revision=first.revision
            )
        assert second.revision is not None
        await reconcile_settlement(room, child.id, lease_id=first.lease_id, phase=first.phase, revision=second.revision)
        stop.set()

    assert (second.held, second.phase) == (True, LeasePhase.PUBLISHING)
    assert second.revision != first.revision
    assert len(publish.outcomes) == 3


async def test_an_acknowledged_publication_is_not_called_again(store: Store) -> None:
    """R-44: an operator's acknowledgement stands for the publication, and the lease goes."""
    publish, stop = Publisher(failures=9), trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        child = await held_publication(room, parent, publish)
        lease = await lease_of(room, child)
        assert lease.revision is not None
        after = await reconcile_settlement(
            room,
            child.id,
            lease_id=lease.lease_id,
            phase=lease.phase,
            revision=lease.revision,
            action="acknowledge",
        )
        stop.set()
        await parent.wait_returned()
        record = await room.load(parent.id)

    assert (after.phase, after.publication) == (LeasePhase.RELEASED, Publication.ACKNOWLEDGED)
    assert len(publish.outcomes) == 1
    assert record is not None
    assert record.family_return_ack is not None


async def test_an_abandoned_publication_leaves_its_parent_without_a_witness(store: Store) -> None:
    """R-20, R-44: given up, a publication is unknown, so the parent can't say that its family returned."""
    publish, stop = Publisher(failures=9), trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        child = await held_publication(room, parent, publish)
        stop.set()
        await wait_all_tasks_blocked()
        (given_up,) = abandon_held(room)
        with pytest.raises(RunAbandonedError):
            await parent.wait_returned()
        parents, childs = await room.load(parent.id), await room.load(child.id)

    assert given_up.phase == "publishing"
    assert len(publish.outcomes) == 1
    assert parents is not None
    assert (parents.status, parents.family_return_ack) == (RunStatus.RUNNING, None)
    assert childs is not None
    assert childs.status is RunStatus.COMPLETED
    assert childs.family_return_ack is not None


async def test_what_was_abandoned_while_the_parent_worked_is_not_forgotten_at_its_end(store: Store) -> None:
    """R-20, R-44: a family that is empty at the seal has not returned if something in it was given up before."""
    publish, stop = Publisher(failures=9), trio.Event()
    async with open_room(store, name="r") as room:
        parent = await room.start(wait_for, stop)
        await held_publication(room, parent, publish)
        abandon_held(room)
        leases = (await observe_settlement(room, parent.id)).leases
        stop.set()
        with pytest.raises(RunAbandonedError):
            await parent.wait_returned()
        record = await room.load(parent.id)

    assert leases == ()
    assert record is not None
    assert (record.status, record.family_return_ack) == (RunStatus.RUNNING, None)


class Refusing:
    """An executor that doesn't take publications."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def construct(self, launch: Launch) -> Ticket:
        return self._executor.construct(launch)

    def submit(self, ticket: Ticket) -> None:
        if ticket.launch.kind is LaunchKind.PUBLICATION:
            raise OSError("no thread")
        self._executor.submit(ticket)


async def test_a_publication_that_never_began_and_was_given_up_is_not_acknowledged(store: Store) -> None:
    """R-44, R-71: its launch refused and abandoned, nothing was published, and no witness says otherwise."""
    publish, stop = Publisher(), trio.Event()
    async with open_room(store, name="r") as room:
        room.pool.tasks = Refusing(room.pool.tasks)
        parent = await room.start(wait_for, stop)
        child = await held_publication(room, parent, publish)
        (held,) = room.held()
        lease = await lease_of(room, child)
        stop.set()
        await wait_all_tasks_blocked()
        abandon_held(room)
        with pytest.raises(RunAbandonedError):
            await parent.wait_returned()
        record = await room.load(parent.id)

    assert held.launch_id is not None
    assert (held.phase, held.code) == ("publication", "OSError")
    assert (lease.held, lease.phase, lease.publication) == (False, LeasePhase.PUBLISHING, Publication.PENDING)
    assert publish.outcomes == []
    assert record is not None
    assert record.family_return_ack is None


async def test_only_a_publication_can_be_acknowledged(store: Store) -> None:
    """R-44: elsewhere an operator's word can't stand in for the step."""
    faulty, stop = FaultyStore(store), trio.Event()
    async with open_room(faulty, name="r") as room:
        parent = await room.start(wait_for, stop)
        faulty.fail(of=AdmitRun)
        with pytest.raises(AdmissionUncertainError):
            await parent.start_child(give)
        (lease,) = (await observe_settlement(room, parent.id)).leases
        assert lease.revision is not None
        with pytest.raises(AcknowledgeRefusedError):
            await reconcile_settlement(
                room,
                lease.run_id,
                lease_id=lease.lease_id,
                phase=lease.phase,
                revision=lease.revision,
                action="acknowledge",
            )
        (again,) = (await observe_settlement(room, parent.id)).leases
        await reconcile_settlement(
            room, lease.run_id, lease_id=lease.lease_id, phase=lease.phase, revision=lease.revision
        )
        stop.set()

    assert again == lease


# -- limiters --------------------------------------------------------------------------------------------------------


async def test_a_parent_publishes_after_its_family_while_trios_limiter_is_exhausted(store: Store) -> None:
    """R-48: joins, publications and terminal writes need none of Trio's own threads."""
    await publish_with_every_thread_of_trios_taken(store)


async def test_a_store_that_writes_in_a_thread_of_its_own_needs_none_of_trios(threaded: Store) -> None:
    """R-48: nor does the writer."""
    await publish_with_every_thread_of_trios_taken(threaded)


async def publish_with_every_thread_of_trios_taken(store: Store) -> None:
    limiter = trio.to_thread.current_default_thread_limiter()
    published: list[str] = []

    async def publish(outcome: Outcome[Any]) -> None:
        published.append(outcome.status.value)

    async def parent(run: Run[None]) -> None:
        for number in range(3):
            await run.start_child(give, number, publish=publish)

    borrowers = [object() for _ in range(int(limiter.total_tokens))]
    for borrower in borrowers:
        limiter.acquire_on_behalf_of_nowait(borrower)
    try:
        async with open_room(store, name="r") as room:
            run = await room.start(parent, publish=publish)
            await run.wait_returned()
    finally:
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)

    assert published == ["completed"] * 4
