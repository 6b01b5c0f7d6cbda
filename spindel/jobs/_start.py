"""Starting a Job: its owner first, then the admission of its Run, once for each living key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple, cast
from weakref import WeakKeyDictionary

import attrs
import trio

from spindel.errors import AdmissionUncertainError, DurableRoomRequiredError, InvalidRecordError, JobKeyConflictError
from spindel.jobs._job import Job
from spindel.jobs._owner import JobOwner, Observation
from spindel.runs import LeasePhase, Room, Run
from spindel.runs._admission import admit, leave, reserve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Unpack
    from uuid import UUID

    from spindel.ids import RunId
    from spindel.runs import Outcome, RunOptions
    from spindel.runs._entry import Entry

__all__ = ["RESERVED_KINDS", "find_job", "start_job", "start_job_of_any_kind"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_KEY_CHARACTERS_MAX: Final = 200
# Whoever reads rows of these kinds takes them for experiments and their attempts, so nobody else may write such rows.
RESERVED_KINDS: Final = ("experiment", "attempt")


@attrs.define(eq=False)
class _Claim:
    """A key in use: by a start that is under way, by a living Job, or by an admission that is uncertain."""

    parent_id: RunId | None
    offer: UUID | None
    decided: trio.Event = attrs.field(factory=trio.Event)
    job: Job[Any] | None = None
    uncertain: AdmissionUncertainError | None = None
    entry: Entry | None = None

    @property
    def is_over(self) -> bool:
        """True for an uncertain admission whose lease has gone: its fence is written, the key is free."""
        return self.uncertain is not None and (self.entry is None or self.entry.phase is LeasePhase.RELEASED)


# Keys die with the process, so they stand beside the room and in no row's way.
_keys: Final[WeakKeyDictionary[Room, dict[str, _Claim]]] = WeakKeyDictionary()


@trio.lowlevel.enable_ki_protection
async def start_job(
    owner: Room | Run[Any],
    fn: Callable[[Run[T], *Ts], Awaitable[T]],
    *args: *Ts,
    key: str | None = None,
    before_finish: Callable[[Outcome[T]], Awaitable[None]] | None = None,
    on_settled: Callable[[Outcome[T]], Awaitable[None]] | None = None,
    observation: Observation[T] | None = None,
    **options: Unpack[RunOptions],
) -> Job[T]:
    """Start a Run with staged cleanup: `fn(run, *args)`.

    After the work: the family is joined, `before_finish(outcome)` joins work and returns resources, that is
    acknowledged on disk, the outcome is stored with the lease kept, `on_settled(outcome)` retires the adapter, that is
    acknowledged, the lease goes, and only then waiters wake. A stage that fails is held until an operator acts. Both
    callbacks are called for every outcome, once unless an operator retries them, in the room's own context.

    Durability: on return its row is stored; `fn` is called exactly once, also if the caller was cancelled meanwhile.

    Cancellation: a checkpoint before the row is written.

    Args:
        owner: the room, for a root Job, or the Run that is its parent.
        fn: an async function of the Run and `args`.
        *args: its further arguments.
        key: 1 to 200 characters; while a Job lives under it, another start gives that Job.
        before_finish: core cleanup.
        on_settled: retires whoever started the Job.
        observation: who asked for it, and how its result is referred to.
        **options: see `RunOptions`; `kind` is `job` by default, and neither `experiment` nor `attempt`.

    Raises:
        DurableRoomRequiredError: the room has no store.
        JobKeyConflictError: a Job of another parent or offer lives under that key.
        InvalidRecordError, AdmissionError: as `Run.start_child`; the work has not begun and never will, and no callback
            of this Job runs.
    """
    kind = options.setdefault("kind", "job")
    if kind in RESERVED_KINDS:
        raise InvalidRecordError("kind", f"{kind!r} is reserved for what experiments start; name another")
    return await start_job_of_any_kind(
        owner,
        fn,
        *args,
        key=key,
        before_finish=before_finish,
        on_settled=on_settled,
        observation=observation,
        **options,
    )


@trio.lowlevel.enable_ki_protection
async def start_job_of_any_kind(
    owner: Room | Run[Any],
    fn: Callable[[Run[T], *Ts], Awaitable[T]],
    *args: *Ts,
    key: str | None = None,
    before_finish: Callable[[Outcome[T]], Awaitable[None]] | None = None,
    on_settled: Callable[[Outcome[T]], Awaitable[None]] | None = None,
    observation: Observation[T] | None = None,
    **options: Unpack[RunOptions],
) -> Job[T]:
    """As `start_job`, for the layer whose kinds are reserved."""
    room = owner if isinstance(owner, Room) else owner._entry.room
    parent = None if isinstance(owner, Room) else owner._entry
    if room.store is None:
        raise DurableRoomRequiredError(room.name)
    if "finisher" in options:
        raise InvalidRecordError("finisher", "a Job has its own; give before_finish and on_settled")
    _check_callbacks(before_finish, on_settled)

    job_owner = JobOwner(room, key, before_finish, on_settled, observation)
    if key is None:
        return await _admit(room, parent, job_owner, fn, args, options, None)
    _check_key(key)
    claims = _keys.setdefault(room, {})
    claim = _Claim(None if parent is None else parent.run_id, job_owner.job.offer)
    living = await _claim(claims, key, claim)
    if living is not None:
        return cast("Job[T]", living)
    return await _admit_claimed(room, parent, job_owner, fn, args, options, claims, claim)


def find_job(room: Room, key: str) -> Job[Any] | None:
    """Give the living Job of that key, or None."""
    claim = _keys.get(room, {}).get(key)
    return None if claim is None else claim.job


async def _claim(claims: dict[str, _Claim], key: str, wanted: _Claim) -> Job[Any] | None:
    """Claim a key, before any checkpoint if it is free; else wait for its holder.

    Returns:
        The living Job of the key, or None if the key is now ours.

    Raises:
        JobKeyConflictError: it belongs to another parent or offer.
        AdmissionUncertainError: it is unknown whether the holder's admission was stored.
    """
    while True:
        claim = claims.get(key)
        if claim is None or claim.is_over:
            claims[key] = wanted
            return None
        if (claim.parent_id, claim.offer) != (wanted.parent_id, wanted.offer):
            raise JobKeyConflictError(key, None if claim.job is None else claim.job.id)
        await trio.lowlevel.checkpoint()
        await claim.decided.wait()
        if claim.job is not None:
            return claim.job
        if claim.uncertain is not None:
            raise claim.uncertain


async def _admit_claimed(
    room: Room,
    parent: Entry | None,
    owner: JobOwner,
    fn: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    options: RunOptions,
    claims: dict[str, _Claim],
    claim: _Claim,
) -> Job[Any]:
    """Admit under a claimed key; whatever comes of it, the others who wait for the key learn of it."""
    key = owner.key
    assert key is not None, "only a key is claimed"

    def drop_key() -> None:
        if claims.get(key) is claim:
            del claims[key]

    try:
        claim.job = await _admit(room, parent, owner, fn, args, options, drop_key)
    except AdmissionUncertainError as error:
        claim.uncertain = error
        # A held lease keeps the key until its fence; a root start has none, and nothing more will come of it.
        claim.entry = None if parent is None else room.find_entry(error.run_id)
        if claim.is_over:
            drop_key()
        raise
    except BaseException:
        drop_key()
        raise
    finally:
        claim.decided.set()
    return claim.job


async def _admit(
    room: Room,
    parent: Entry | None,
    owner: JobOwner,
    fn: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    options: RunOptions,
    drop_key: Callable[[], None] | None,
) -> Job[Any]:
    options["finisher"] = owner
    if parent is None:
        # A cancelled scope around the room has fenced it; whoever is inside that scope is cancelled, not refused.
        await trio.lowlevel.checkpoint_if_cancelled()
    entry = reserve(room, parent, options.get("run_id"))
    try:
        run = await admit(entry, fn, args, options)
        job = Job(owner, run)
    finally:
        leave(entry)
    owner.own(run, drop_key)
    return job


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not 1 <= len(key) <= _KEY_CHARACTERS_MAX:
        raise InvalidRecordError("key", f"{key!r} is not 1 to {_KEY_CHARACTERS_MAX} characters of text")


def _check_callbacks(*callbacks: object) -> None:
    for callback in callbacks:
        if callback is not None and not callable(callback):
            raise InvalidRecordError("callback", f"a {type(callback).__name__} is no async function")
