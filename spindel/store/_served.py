"""What the stores with a writer share: each promise of the contract, by way of the writer's queue and a reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import trio

from spindel.errors import WriteRefusedError
from spindel.store._executor import choose_executor, run_in_lane
from spindel.store._records import check_limit
from spindel.store._rules import check_mutation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from spindel.errors import WriteUncertainError
    from spindel.ids import RunId
    from spindel.store._check import CheckReport
    from spindel.store._contract import Confirmation
    from spindel.store._executor import Executor
    from spindel.store._mutations import Mutation
    from spindel.store._records import RoomRecord, RunPage, RunQuery, RunRecord
    from spindel.store._writer import Writer

__all__ = ["ReadStoppedError", "Reader", "ServedStore"]

A = TypeVar("A")
T = TypeVar("T")


class ReadStoppedError(Exception):
    """A read ended early because somebody stopped it: only a cancellation does, which is still to be delivered."""


class Reader(Protocol):
    """Answers the questions of a store; used in one lane."""

    def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run with its causes."""
        ...

    def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page."""
        ...

    def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read all rooms, by name."""
        ...


class ServedStore(ABC):
    """A store over a database that a writer writes to and a reader reads from."""

    __slots__ = ("_executor", "_read_only", "_writer")

    durable = True

    def __init__(self, *, executor: Literal["thread", "inline"] | Executor, read_only: bool) -> None:
        self._executor = choose_executor(executor)
        self._read_only = read_only
        self._writer: Writer | None = None

    @property
    @abstractmethod
    def place(self) -> str:
        """What the database is called in messages; no secret is in it."""

    @abstractmethod
    async def _read(self, question: Callable[[Reader], T]) -> T:
        """Ask the reader; a checkpoint before."""

    @abstractmethod
    def _prepare_check(
        self, progress: Callable[[int, int], object]
    ) -> tuple[Callable[[], CheckReport], Callable[[], object]]:
        """Give what checks the database, in a lane of its own, and what stops that, from the loop."""

    @abstractmethod
    def watch_room(self, room: str) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Watch a room for the length of a block, also what other processes write to it.

        The value is an async function that returns once the room may have been written to since the block began, or
        since it last returned. It may return although nothing was, and says nothing about what was: read then.
        """

    @property
    def commits(self) -> int:
        """How many batches were committed so far, for measurements of group commit."""
        return 0 if self._writer is None else self._writer.commits

    @property
    def committed(self) -> int:
        """How many mutations those batches held; what belongs together counts once."""
        return 0 if self._writer is None else self._writer.committed

    async def write(self, mutation: Mutation[A]) -> A:
        """Apply one mutation.

        Durability: on return it is committed and synced to disk.

        Cancellation: it is checked once before the mutation is queued; afterwards the write can't be cancelled.

        Raises:
            WriteRefusedError: nothing was committed, nothing will be.
            WriteUncertainError: it may have been committed, or may still be; use `confirm`.
            InvalidRecordError: it holds something that no record may hold, or no part knows it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.write_shielded(mutation)

    async def write_shielded(self, mutation: Mutation[A]) -> A:
        """As `write`, without looking at cancellation at all: for endings, which always happen."""
        writer = self._for_writing()
        check_mutation(mutation)
        writer.check_known(mutation)
        return cast("A", await writer.write(mutation))

    async def write_each(
        self, mutations: Sequence[Mutation[Any]]
    ) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Apply several independent mutations, in order, with one wait for all; errors are given as values.

        Cancellation: none; check before, if it matters.

        Raises:
            InvalidRecordError: as `write`, for any of them; then none was queued.
        """
        writer = self._for_writing()
        for mutation in mutations:
            check_mutation(mutation)
            writer.check_known(mutation)
        return await writer.write_each(mutations)

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Read a mutation's identity back, after everything that was queued before.

        Raises:
            WriteUncertainError: the reading itself failed, or can't be believed yet after a failed commit.
        """
        writer = self._for_writing()
        check_mutation(mutation)
        writer.check_known(mutation)
        return await writer.confirm(mutation)

    async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run with its causes, or None if the room has none of that id."""
        return await self._read(lambda reader: reader.load_run(room, run_id))

    async def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page of Runs.

        Raises:
            InvalidRecordError: the limit is not 1 to 100.
        """
        check_limit(query.limit)
        return await self._read(lambda reader: reader.list_runs(query))

    async def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read all rooms, by name."""
        return await self._read(lambda reader: reader.list_rooms())

    async def check(self, progress: Callable[[int, int], object] | None = None) -> CheckReport:
        """Verify every stored invariant, reading only; other processes may use the database meanwhile.

        It has a connection and a thread of its own, so other reads don't wait for it. It reads one snapshot, which the
        database keeps for as long as it goes on.

        Args:
            progress: called in the loop with how many Runs were read, of how many.

        Cancellation: it ends the check within moments.

        Raises:
            SchemaError: the database can't be read at all.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        token = trio.lowlevel.current_trio_token()

        def report(done: int, total: int) -> None:
            if progress is not None:
                token.run_sync_soon(progress, done, total)

        check, stop = self._prepare_check(report)
        lane = self._executor.open_lane("store check")
        try:
            return await run_in_lane(lane, check, stop=stop)
        except ReadStoppedError:
            await trio.lowlevel.checkpoint()  # noqa: ASYNC120  being cancelled is what happened
            raise
        finally:
            lane.close()

    def _for_writing(self) -> Writer:
        if self._writer is None:
            if self._read_only:
                raise WriteRefusedError("read-only", detail=f"{self.place} was opened only to be read")
            raise WriteRefusedError("store-closed", detail=f"{self.place} is not open")
        return self._writer
