"""The contract of every store: what it promises, to whom, and what it says when it can't know.

A store keeps facts for rooms. It is used from one Trio loop, inside `async with store`. Its one way to change
anything is `write`: a frozen `Mutation` that is checked and applied inside one serialized turn.

| result | form | what holds |
|---|---|---|
| acknowledged | returns | committed; in a durable store it survives power loss |
| refused | `WriteRefusedError` | nothing was committed, nothing will be |
| uncertain | `WriteUncertainError` | may have been committed, may still be |

Implementers owe, beyond the protocol:

- Checks happen inside the serialized mutation: ownership by epoch first (`not-owner`), then the rules of the tables.
- Equal identity and content again: acknowledged, nothing changes. Other content: refused.
- Writes of one room apply in the order in which they were queued, also across `write`, `write_shielded`, `write_each`.
- Nothing is ever repeated by the store itself once it may have been committed.
- A room has one owner at a time; a newer claim raises the epoch and silences every older one.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from uuid import UUID

    from spindel.clock import WallClock
    from spindel.errors import WriteRefusedError, WriteUncertainError
    from spindel.ids import RunId
    from spindel.store._mutations import Mutation
    from spindel.store._records import RoomRecord, RunPage, RunQuery, RunRecord

__all__ = ["Confirmation", "PostgresPart", "RoomClaim", "Store", "StorePart"]

A = TypeVar("A")


class Confirmation(StrEnum):
    """What reading a mutation's identity back says.

    PRESENT: stored with equal content, hence acknowledged. ABSENT: still uncertain until its repeat or a fence is
    acknowledged; a missing row proves nothing. CONFLICT: other content stands there that refuses it for good.
    """

    PRESENT = "present"
    ABSENT = "absent"
    CONFLICT = "conflict"


@attrs.frozen
class RoomClaim:
    """A request to own a room.

    Attributes:
        name: the room.
        incarnation: the UUID of this opening.
        at: when, in UTC microseconds; the store never lets a room's times go backwards.
        wall_clock: dates the closing; without one it is dated like the opening.
        on_lost: called in the loop, at most once, by a store that finds out without a write that a newer owner has the
            room. A write that is refused as `not-owner` says the same, and some stores have no other way.
    """

    name: str
    incarnation: UUID
    at: int
    wall_clock: WallClock | None = None
    on_lost: Callable[[], object] | None = None


@attrs.frozen(kw_only=True)
class PostgresPart:
    """What a part does in PostgreSQL: functions that the server runs, so that a whole batch is one round trip.

    Each is made anew in every session that writes, as a function of its temporary schema; they belong to the program
    and not to the database, which programs of several versions may share.

    Attributes:
        functions: the text that makes them. One that applies takes its argument as `jsonb` and gives a
            `pg_temp.verdict`, by `pg_temp.changed(value)`, `pg_temp.unchanged(value)` or, as long as it has changed
            nothing, `pg_temp.refused(code, detail)`; what triggers and constraints refuse may be raised. One that
            confirms gives `present`, `absent` or `conflict`.
        apply, confirm: the name of the function for each mutation type.
        argument: what the function gets instead of the mutation itself; it is sent as JSON.
    """

    functions: str
    apply: Mapping[type, str]
    confirm: Mapping[type, str]
    argument: Mapping[type, Callable[[Any], object]] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class StorePart:
    """What one layer keeps in the store: its tables and its mutations, in the same batches with the same results.

    Attributes:
        name: the prefix of its tables and the `part` of its mutations.
        migrations: numbered SQL scripts of a dialect, each applied once, in one transaction.
        sqlite: for each mutation type, a function of `(connection, mutation)` that applies it inside the writer's
            transaction and returns its result; it raises `WriteRefusedError` or lets a trigger abort.
        memory: the same for the memory store, as a function of `(tables, mutation)`.
        sqlite_confirm, memory_confirm: for each mutation type, a function of the same arguments that reads the
            identity back.
        single_statement: the mutation types that are one statement in SQLite and so need no savepoint there.
        sqlite_many: for some mutation types, a function of `(connection, mutations)` that applies many in the plain
            case: each changes one row and gives None. If another number of rows has changed, or it raises, what it did
            is undone, and they are applied one by one; so it need not know which one is refused, or a repeat.
        postgres: the same for PostgreSQL; without it no `PostgresStore` takes the part.
    """

    name: str
    migrations: Mapping[str, Sequence[str]]
    sqlite: Mapping[type, Callable[[Any, Any], Any]]
    memory: Mapping[type, Callable[[Any, Any], Any]]
    sqlite_confirm: Mapping[type, Callable[[Any, Any], Confirmation]]
    memory_confirm: Mapping[type, Callable[[Any, Any], Confirmation]]
    single_statement: frozenset[type] = frozenset()
    sqlite_many: Mapping[type, Callable[[Any, Sequence[Any]], None]] = MappingProxyType({})
    postgres: PostgresPart | None = None


class Store(Protocol):
    """Durable facts of rooms. See the module for what an implementation owes."""

    durable: bool
    """False: facts last as long as the process."""

    async def __aenter__(self) -> Self:
        """Open it: the file, its migrations, its writer.

        Raises:
            SchemaError: no database, newer, foreign or damaged; nothing was changed.
        """
        ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        """Close it, after everything queued was written. Not cancellable."""
        ...

    def claim_room(self, claim: RoomClaim) -> AbstractAsyncContextManager[int]:
        """Own a room for the length of a block; the value is its epoch. Leaving it records that it was closed.

        Raises:
            RoomInUseError: it has a living owner; the error names it.
        """
        ...

    async def write(self, mutation: Mutation[A]) -> A:
        """Apply one mutation.

        Durability: on return it is committed (and on disk, if `durable`).

        Cancellation: it is checked once before the mutation is queued; afterwards the write can't be cancelled.

        Raises:
            WriteRefusedError: nothing was committed, nothing will be.
            WriteUncertainError: it may have been committed, or may still be; use `confirm`.
        """
        ...

    async def write_shielded(self, mutation: Mutation[A]) -> A:
        """As `write`, without looking at cancellation at all: for endings, which always happen."""
        ...

    async def write_each(
        self, mutations: Sequence[Mutation[Any]]
    ) -> list[Any | WriteRefusedError | WriteUncertainError]:
        """Apply several independent mutations, in order, with one wait for all; errors are given as values.

        Cancellation: none; check before, if it matters.
        """
        ...

    async def confirm(self, mutation: Mutation[Any]) -> Confirmation:
        """Read a mutation's identity back. Shielded like `write_shielded`.

        Raises:
            WriteUncertainError: the reading itself failed.
        """
        ...

    async def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read one Run with its causes, or None if the room has none of that id."""
        ...

    async def list_runs(self, query: RunQuery) -> RunPage:
        """Read a page of Runs.

        Raises:
            InvalidRecordError: the limit is not 1 to 100.
        """
        ...

    async def list_rooms(self) -> tuple[RoomRecord, ...]:
        """Read all rooms, by name."""
        ...
