"""`Run`: an execution that one can answer for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, cast, final

import trio

from spindel.errors import (
    CausalStoreRequiredError,
    CauseNotDurableError,
    FamilySealedError,
    InvalidRecordError,
    RoomOwnershipLostError,
    RunAbandonedError,
    RunFailedError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.observe import RunProgress
from spindel.runs._admission import admit, admit_each, leave, reserve
from spindel.runs._cancelling import add_callback, request_cancel
from spindel.runs._entry import Readiness
from spindel.runs._finishing import outcome_of
from spindel.runs._frontier import check_wait, check_wait_lease, current_entry, is_carrying
from spindel.runs._hosting import host_of
from spindel.runs._parking import require_loop
from spindel.runs._process import run_process
from spindel.runs._token import Reservation
from spindel.store import Confirmation, RecordCauses, RunStatus, check_reason

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from subprocess import CompletedProcess
    from typing import Unpack
    from uuid import UUID

    from spindel.errors import AdmissionError
    from spindel.ids import LeaseId, RunId
    from spindel.runs._entry import Entry
    from spindel.runs._options import Child, RunOptions
    from spindel.runs._outcome import Outcome
    from spindel.runs._token import AdmissionToken

__all__ = ["Run"]

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@final
class Run(Generic[T]):
    """One execution: stored before it starts, joined physically, ended by one outcome that nothing rewrites.

    It refers to the room's registry entry and decides nothing itself. Made by `Room.start` and `Run.start_child` only.

    Attributes:
        id: its id.
        kind: what it is.
        actor: for whom it runs.
        parent_id: its structural parent, None for a root Run.
    """

    __slots__ = ("__weakref__", "_entry", "actor", "id", "kind", "parent_id")

    def __init__(self, entry: Entry) -> None:
        admission = entry.admission
        assert admission is not None, "a handle is made for an admitted Run"
        self._entry = entry
        self.id: RunId = entry.run_id
        self.kind: str = admission.kind
        self.actor: str = admission.actor
        self.parent_id = cast("RunId | None", admission.parent_id)

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.kind} {self.status.value}>"

    @property
    def room_name(self) -> str:
        """The name of its room."""
        return self._entry.room.name

    @property
    def incarnation(self) -> UUID:
        """The opening of the room that it lives in."""
        return self._entry.room.incarnation

    @property
    def resource(self) -> object | None:
        """What its preparation constructed, or None; and None again once its lease is gone."""
        custody = self._entry.custody
        return None if custody is None else custody.resource

    @property
    def status(self) -> RunStatus:
        """Its status; terminal only once the outcome is stored. Readable from any thread."""
        entry = self._entry
        if entry.status is RunStatus.RUNNING and entry.cancel_reason is not None:
            return RunStatus.CANCELLING
        return entry.status

    @property
    def cancel_requested(self) -> bool:
        """True once it was asked to stop. Readable from any thread."""
        return self._entry.cancel_reason is not None

    @property
    def cancel_reason(self) -> str | None:
        """Why it was asked to stop, or None. Readable from any thread."""
        return self._entry.cancel_reason

    # -- work -------------------------------------------------------------------------------------------------------

    def start_soon(self, fn: Callable[[*Ts], Awaitable[object]], *args: *Ts, name: str | None = None) -> None:
        """Start a plain task: joined with the Run, not stored.

        One that raises cancels the body and the other plain tasks, as in a nursery; children are not touched.

        Raises:
            FamilySealedError: the work is over.
        """
        entry = self._entry
        host = entry.host
        if host is not None and host.tasks is not None and current_entry.get() is entry and not is_carrying():
            try:
                host.tasks.start_soon(fn, *args, name=name)
            except (RuntimeError, AttributeError):
                require_loop("Run.start_soon")
                self._raise_if_plain_half_closed()
                raise
            return
        require_loop("Run.start_soon")
        if entry.work_over or not entry.live or (host is not None and host.over):
            raise FamilySealedError(entry.run_id)
        try:
            host_of(entry).start_task(fn, args, name)
        except RuntimeError:
            self._raise_if_plain_half_closed()
            raise

    @trio.lowlevel.enable_ki_protection
    async def start_child(
        self, fn: Callable[[Run[R], *Ts], Awaitable[R]], *args: *Ts, **options: Unpack[RunOptions]
    ) -> Run[R]:
        """Start a child Run: `fn(run, *args)`, owned and joined by this one.

        Durability: on return its row is stored.

        Cancellation: a checkpoint before the row is written. Once it is written the child is started, also if the
            caller was cancelled meanwhile.

        Args:
            fn: an async function of the new Run and `args`.
            *args: its further arguments.
            **options: see `RunOptions`.

        Raises:
            InvalidRecordError: an option is unknown or holds what no record may hold.
            ParentNotLiveError, FamilySealedError, FamilyCancelledError, RoomAdmissionClosedError, DuplicateRunError,
            AdmissionRefusedError: refused; nothing is left of it.
            NotConstructedError: its preparation refused before any effect.
            PreparationError: its preparation failed, or what was prepared for a refused row is not gone; the child
                never begins, and the error tells its cleanup.
            AdmissionUncertainError: the row may exist; the child never begins, and its lease is held.
        """
        entry = reserve(self._entry.room, self._entry, options.get("run_id"))
        try:
            return await admit(entry, fn, args, options)
        finally:
            leave(entry)

    async def start_children(self, children: Sequence[Child[R]]) -> list[Run[R] | AdmissionError]:
        """Start several children in their order, with one wait for all: the quick way to admit many durably.

        Durability, Cancellation: as `start_child`; `Cancelled` comes only when each child is decided.

        Returns:
            For each child its Run, or the error that kept it from being admitted.

        Raises:
            InvalidRecordError: an option of one of them is wrong; none was started. A row that only the store finds
                wrong refuses all that were to be written with it, as their `AdmissionRefusedError`.
        """
        return await admit_each(self._entry, children)

    def reserve(self, *, run_id: RunId | None = None) -> AbstractContextManager[AdmissionToken]:
        """Reserve an admission before any effect; use the token with `admit` inside the block, in the same task.

        Leaving the block drops an unused reservation. Until it is left, this Run can't end.

        A thread that this task enters may use the token through `trio.from_thread`, which runs code in this very task;
        with a `trio_token` it runs code in a task of Trio's own, which is another one.

        Raises:
            ParentNotLiveError, FamilySealedError, FamilyCancelledError, RoomAdmissionClosedError, DuplicateRunError:
                on entry; nothing happened.
            InvalidRecordError: on entry; the id is none.
        """
        return Reservation(self._entry, run_id)

    async def admit(
        self,
        token: AdmissionToken,
        fn: Callable[[Run[R], *Ts], Awaitable[R]],
        *args: *Ts,
        **options: Unpack[RunOptions],
    ) -> Run[R]:
        """Start the child that a token was reserved for; the token is used up, whatever comes of it.

        Durability, Cancellation: as `start_child`.

        Raises:
            AdmissionTokenError: the token is consumed, of another parent, another task, or expired.
            InvalidRecordError, AdmissionError: as `start_child`.
        """
        if "run_id" in options:
            raise InvalidRecordError("run_id", "is the token's; give it to reserve()")
        return await admit(token.consume(self._entry), fn, args, options)

    def seal(self) -> None:
        """Admit no more children; those reserved before are still admitted and joined. Idempotent."""
        self._entry.seal()

    async def run_native(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `fn(*args)` in a thread of the room, which the Run waits for.

        The thread may read `cancel_requested`, and call back through `trio.from_thread`. It must not wait for another
        native launch: a full limiter would wait for itself.

        Cancellation: a checkpoint while it waits for a free thread, or is held because none could be started. Once it
            runs it is never abandoned: the Run stays live until the thread is back.

        Raises:
            FamilySealedError: the Run has ended.
            BaseException: what `fn` raised.
            RunAbandonedError: no thread ever ran it, and an operator gave it up.
        """
        self._raise_if_ended()
        return await self._entry.room.pool.call_native(fn, *args, run_id=self.id)

    async def run_process(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        stdin: bytes = b"",
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        check: bool = True,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 5.0,
    ) -> CompletedProcess[bytes]:
        """Run a process in a session of its own and wait until its whole group is gone.

        Output that is kept is read until its end, so the call also waits for whoever else holds that pipe: a program
        that left the group, as a daemon does, and still has it open.

        Cancellation: a checkpoint. The group gets SIGTERM and, after the grace, SIGKILL; then it is waited for.

        Args:
            command: program and arguments; no shell.
            stdin: what it reads.
            capture_stdout: keep its output in the result.
            capture_stderr: keep its error output in the result.
            check: raise if it doesn't exit with 0.
            cwd: its working directory.
            env: its whole environment; this process's by default.
            grace_seconds: how long after SIGTERM the group is killed.

        Raises:
            InvalidRecordError: the command is empty.
            subprocess.CalledProcessError: it failed, and `check` is true.
            OSError: it couldn't be started.
        """
        self._raise_if_ended()
        with self._entry.room.pool.outside(self.id):
            return await run_process(
                command,
                stdin=stdin,
                capture_stdout=capture_stdout,
                capture_stderr=capture_stderr,
                check=check,
                cwd=cwd,
                env=env,
                grace_seconds=grace_seconds,
            )

    # -- telling ----------------------------------------------------------------------------------------------------

    def started(self, value: Any = None) -> None:
        """Say that this Run is ready, once; `wait_started` gives the value.

        Raises:
            RuntimeError: it was said before.
        """
        require_loop("Run.started")
        readiness = self._readiness()
        if readiness.told:
            raise RuntimeError(f"run {self.id} has said before that it started")
        readiness.told = True
        readiness.value = value
        readiness.event.set()

    async def wait_started(self) -> Any:
        """Wait until the Run says that it is ready, and give the value that it said.

        Cancellation: a checkpoint; ends the wait only.

        Raises:
            WaitRefusedError: this wait could never end.
            RunFailedError, RunCancelledError, RunWaitingError: it ended without saying so; a completed one counts as
                failed with the reason `never-started`.
        """
        check_wait(self._entry)
        readiness = self._readiness()
        if self._entry.end is not None:
            readiness.event.set()
        await readiness.event.wait()
        if readiness.told:
            return readiness.value
        self._raise_if_lost()
        outcome = outcome_of(self._entry)
        outcome.unwrap()
        raise RunFailedError(self.id, "never-started")

    def report_progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Tell watchers how far it is, from the loop or from any thread.

        An event only: never stored, and free if nobody watches.
        """
        room = self._entry.room
        if trio.lowlevel.in_trio_run():
            room.events.emit(RunProgress, self.id, done, total, message)
        else:
            # Native launches know best how far they are; watchers live in the loop.
            room.call_in_loop(room.events.emit, RunProgress, self.id, done, total, message)

    # -- cancellation -----------------------------------------------------------------------------------------------

    def cancel(self, reason: str = "cancel-requested") -> bool:
        """Ask this Run and all below it to stop. Sticky: children admitted later start cancelled.

        Returns:
            True while the outcome is undecided; False if it stands already. Its live children are asked either way.

        Raises:
            InvalidRecordError: the reason isn't 1 to 64 of `[a-z0-9-]`.
        """
        require_loop("Run.cancel")
        entry = self._entry
        reason = check_reason(reason)
        undecided = entry.verdict is None and entry.end is None
        request_cancel((entry,), reason)
        return undecided

    def add_cancel_callback(self, key: str, callback: Callable[[str], None]) -> bool:
        """Call `callback(reason)` at each cancel request, before any scope is cancelled. The same key replaces.

        Registered after a request, it is called at once, and what it raises is the caller's.

        Returns:
            False if the outcome is decided: it will never be called.
        """
        return add_callback(self._entry, key, callback)

    # -- the end ----------------------------------------------------------------------------------------------------

    async def wait_returned(self) -> None:
        """Wait until the Run has returned, its outcome is stored and its execution lease is gone.

        Cancellation: a checkpoint; ends the wait only.

        Raises:
            WaitRefusedError: this wait could never end.
            RoomOwnershipLostError, RunAbandonedError: it returned, and nobody may say how.
        """
        entry = self._entry
        check_wait(entry)
        if entry.end is None:
            if entry.done is None:
                entry.done = trio.Event()
            await entry.done.wait()
        else:
            await trio.lowlevel.checkpoint()
        self._raise_if_lost()

    async def wait_lease(self, lease_id: LeaseId) -> None:
        """Wait until this Run's family has released that admission lease; at once if it has none of that id.

        Cancellation: a checkpoint; ends the wait only.

        Raises:
            WaitRefusedError: under a frontier, or inside the lease's own reserve block.
        """
        check_wait_lease(self._entry, lease_id)
        await self._entry.wait_lease(lease_id)

    async def outcome(self) -> Outcome[T]:
        """Wait for the end and give it. Awaited by another Run of the room, it becomes a stored cause of that Run.

        Durability: the cause is stored on return.

        Cancellation: a checkpoint; ends the wait only.

        Raises:
            WaitRefusedError: this wait could never end.
            CauseNotDurableError: the outcome is there, but the cause link could not be shown to be stored.
            RoomOwnershipLostError, RunAbandonedError: as `wait_returned`.
        """
        await self.wait_returned()
        return await self._consume()

    async def result(self) -> T:
        """Wait for the end and give the value: `(await run.outcome()).unwrap()`.

        Raises:
            RunFailedError, RunCancelledError, RunWaitingError: it ended otherwise.
        """
        return (await self.outcome()).unwrap()

    def outcome_nowait(self) -> Outcome[T]:
        """Give the outcome of a Run that has returned. No cause is recorded.

        Raises:
            trio.WouldBlock: it has not returned.
            RoomOwnershipLostError, RunAbandonedError: as `wait_returned`.
        """
        if self._entry.end is None:
            raise trio.WouldBlock
        self._raise_if_lost()
        return cast("Outcome[T]", outcome_of(self._entry))

    async def record_cause(self, cause: RunId) -> None:
        """Store that this live Run used what a terminal Run of the room came to. Gives nobody ownership.

        Durability: stored on return.

        Cancellation: checked once; the write itself can't be cancelled.

        Raises:
            CausalStoreRequiredError: the room has no store.
            WriteRefusedError: this Run isn't running, or the cause is itself, not terminal or of another room.
            CauseNotDurableError: it may not be stored.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        await _store_cause(self._entry, cause)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _readiness(self) -> Readiness:
        entry = self._entry
        if entry.started is None:
            entry.started = Readiness()
        return entry.started

    def _raise_if_plain_half_closed(self) -> None:
        """Map Trio's refusal of a task after the body and the last plain task; another error is not ours to map."""
        entry = self._entry
        tasks = None if entry.host is None else entry.host.tasks
        if entry.fn is None and (tasks is None or not tasks.child_tasks):
            raise FamilySealedError(entry.run_id) from None

    def _raise_if_ended(self) -> None:
        """Refuse what the pool would do for an id: a room without a store may have given it to another Run since."""
        if self._entry.end is not None:
            raise FamilySealedError(self.id)

    def _raise_if_lost(self) -> None:
        entry = self._entry
        if entry.end == "lost":
            raise RoomOwnershipLostError(entry.room.name, entry.room.epoch)
        if entry.end == "abandoned":
            raise RunAbandonedError(entry.run_id)

    async def _consume(self) -> Outcome[T]:
        """Give the outcome; if another running Run of this room is the one who learns it, as its stored cause."""
        await self._record_consumption()
        return cast("Outcome[T]", outcome_of(self._entry))

    async def _record_consumption(self) -> None:
        entry = self._entry
        consumer = current_entry.get()
        if (
            consumer is None
            or consumer is entry
            or consumer.room is not entry.room
            or entry.room.store is None
            or not consumer.live
            or consumer.status is not RunStatus.RUNNING
            or not entry.status.terminal
        ):
            return
        try:
            await _store_cause(consumer, entry.run_id)
        except WriteRefusedError as error:
            raise CauseNotDurableError(consumer.run_id, entry.run_id, str(error)) from error


async def _store_cause(consumer: Entry, cause: RunId) -> None:
    room = consumer.room
    if room.store is None:
        raise CausalStoreRequiredError(room.name)
    mutation = RecordCauses(room=room.name, epoch=room.epoch, id=consumer.run_id, causes=(cause,))
    try:
        await room.write(mutation)
    except WriteRefusedError as error:
        if error.transient:
            raise CauseNotDurableError(consumer.run_id, cause, str(error)) from error
        raise
    except WriteUncertainError as error:
        try:
            confirmation = await room.store.confirm(mutation)  # noqa: ASYNC120  a confirmation is shielded
        except WriteUncertainError:
            confirmation = Confirmation.ABSENT
        if confirmation is not Confirmation.PRESENT:
            raise CauseNotDurableError(consumer.run_id, cause, str(error)) from error
