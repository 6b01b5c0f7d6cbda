"""The writer's backend for SQLite: a batch is one transaction of one connection.

After a COMMIT that raised, the next connection first moves the whole journal into the file and truncates it: after a
failed sync the journal's last frames may be readable without being on disk, and only a completed checkpoint makes what
can be read true.
"""

from __future__ import annotations

import logging
import re
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import apsw

from spindel.errors import SchemaError, WriteRefusedError
from spindel.store._backend import BatchFailedError, LostReplyError, UnavailableError
from spindel.store._claims import UNOWNED
from spindel.store._contract import Confirmation
from spindel.store._mutations import Together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from spindel.store._backend import Slot
    from spindel.store._contract import StorePart

__all__ = ["MANY_MIN", "SqliteBackend"]

MANY_MIN: Final = 16
"""So many mutations of one type, one after another, are tried together; fewer cost less one by one."""

_KIND: Final = attrgetter("mutation.__class__")
_log: Final = logging.getLogger("spindel.store")
_EPOCH: Final = "SELECT epoch FROM rooms WHERE name = ?1"
_CODE: Final = re.compile(r"RAISE\s*\(\s*ABORT\s*,\s*'([a-z0-9-]{1,64})'\s*\)")
_CONSTRAINTS: Final = {
    apsw.SQLITE_CONSTRAINT_CHECK: "check",
    apsw.SQLITE_CONSTRAINT_DATATYPE: "type",
    apsw.SQLITE_CONSTRAINT_FOREIGNKEY: "reference",
    apsw.SQLITE_CONSTRAINT_NOTNULL: "missing",
    apsw.SQLITE_CONSTRAINT_PRIMARYKEY: "exists",
    apsw.SQLITE_CONSTRAINT_UNIQUE: "exists",
}
_TRANSIENT: Final[dict[type[apsw.Error], str]] = {
    apsw.BusyError: "busy",
    apsw.FullError: "disk-full",
    apsw.IOError: "disk-error",
}


class SqliteBackend:
    """See the module.

    Args:
        parts: whose mutations it knows.
        connect: opens a connection for writing.
    """

    __slots__ = (
        "_checkpoint_due",
        "_confirmations",
        "_connect",
        "_connection",
        "_handlers",
        "_many",
        "_refusals",
        "_single",
    )

    def __init__(self, parts: Iterable[StorePart], connect: Callable[[], apsw.Connection]) -> None:
        self._handlers: dict[type, Callable[[Any, Any], Any]] = {}
        self._confirmations: dict[type, Callable[[Any, Any], Confirmation]] = {}
        self._many: dict[type, Callable[[Any, Any], None]] = {}
        self._single: set[type] = set()
        codes: set[str] = set()
        for part in parts:
            self._handlers.update(part.sqlite)
            self._confirmations.update(part.sqlite_confirm)
            self._many.update(part.sqlite_many)
            self._single.update(part.single_statement)
            for script in part.migrations.get("sqlite", ()):
                codes.update(_CODE.findall(script))
        self._refusals = frozenset(codes)
        self._connect = connect
        self._connection: apsw.Connection | None = None
        self._checkpoint_due = False

    @property
    def connected(self) -> bool:
        """False before `open`, and after the connection was given up."""
        return self._connection is not None

    def knows(self, kind: type) -> bool:
        """Tell whether some part applies mutations of this type."""
        return kind in self._handlers

    def open(self, connection: apsw.Connection) -> None:
        """Start with a connection to a file that is up to date."""
        self._connection = connection

    def connect(self) -> None:
        """Open a connection that may confirm and write.

        Raises:
            UnavailableError: there can't be one now.
        """
        try:
            connection = self._connect()
            try:
                if self._checkpoint_due:
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.Error:
                _close(connection)
                raise
        except (apsw.Error, SchemaError) as problem:
            raise UnavailableError(str(problem)) from problem
        self._checkpoint_due = False
        self._connection = connection

    def apply(self, slots: Sequence[Slot]) -> None:
        """Begin a transaction and apply each mutation in it.

        Raises:
            BatchFailedError: nothing is stored, and the transaction is over.
        """
        connection = self._connection
        assert connection is not None, "only what is connected applies"
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._apply_each(connection, slots)
        except apsw.Error as problem:
            self._roll_back(connection)
            raise BatchFailedError(_transient_code(problem), str(problem)) from problem

    def commit(self) -> None:
        """Commit what was applied.

        Raises:
            LostReplyError: it may be on disk all the same; the connection is given up.
        """
        assert self._connection is not None, "there is a transaction to commit"
        try:
            self._connection.execute("COMMIT")
        except apsw.Error as problem:
            self.lose()
            raise LostReplyError(_transient_code(problem), f"COMMIT raised: {problem}") from problem

    def confirm(self, mutation: Any) -> Confirmation:
        """Read a mutation's identity back.

        Raises:
            LostReplyError: it can't be read.
        """
        assert self._connection is not None, "only what is connected confirms"
        try:
            return self._confirm(self._connection, mutation)
        except apsw.Error as problem:
            raise LostReplyError(_transient_code(problem), str(problem)) from problem

    def close(self) -> None:
        """Give up the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _close(connection)

    def lose(self) -> None:
        """Give up the connection; what the next one reads is not to be believed before a checkpoint."""
        self.close()
        self._checkpoint_due = True

    # -- inside ------------------------------------------------------------------------------------------------------

    def _apply_each(self, connection: apsw.Connection, slots: Sequence[Slot]) -> None:
        epochs: dict[str, int | None] = {}
        for kind, alike in groupby(slots, _KIND):
            run = list(alike)
            many = self._many.get(kind) if len(run) >= MANY_MIN else None
            if many is None or not self._apply_at_once(connection, many, run, epochs):
                self._apply_singly(connection, run, epochs)

    def _apply_at_once(
        self,
        connection: apsw.Connection,
        many: Callable[[Any, Any], None],
        slots: Sequence[Slot],
        epochs: dict[str, int | None],
    ) -> bool:
        """Apply mutations of one type together; False, and nothing is done, if it isn't as simple as that."""
        mutations = [slot.mutation for slot in slots]
        owners = {(mutation.room, mutation.epoch) for mutation in mutations}
        if not all(self._owns(connection, room, epoch, epochs) for room, epoch in owners):
            return False
        connection.execute("SAVEPOINT many")
        changes = connection.total_changes()
        try:
            many(connection, mutations)
        except apsw.ConstraintError:
            plain = False
        except apsw.Error:
            raise
        except Exception:  # noqa: BLE001  one of them is to be refused, or meets a bug, and is told so alone
            plain = False
        else:
            plain = connection.total_changes() - changes == len(slots)
        if not plain:
            connection.execute("ROLLBACK TO many")
        connection.execute("RELEASE many")
        if plain:
            for slot in slots:
                slot.error = slot.result = None
                slot.changed = True
        return plain

    def _apply_singly(self, connection: apsw.Connection, slots: Sequence[Slot], epochs: dict[str, int | None]) -> None:
        changes = connection.total_changes()
        for slot in slots:
            slot.error = None
            try:
                slot.result = self._apply(connection, slot.mutation, epochs)
            except apsw.ConstraintError as problem:
                slot.error = self._refusal(problem)
            except apsw.Error:
                raise
            except Exception as problem:  # noqa: BLE001  a refusal, or a part's bug, which is told to its caller alone
                slot.error = problem
            before, changes = changes, connection.total_changes()
            slot.changed = changes != before
            if slot.error is None:
                continue
            kept = slot.changed and type(slot.mutation) in self._single
            if kept or not connection.in_transaction:
                raise apsw.AbortError(f"a refused {type(slot.mutation).__name__} left the batch half done")

    def _apply(self, connection: apsw.Connection, mutation: Any, epochs: dict[str, int | None]) -> Any:
        kind: type[object] = mutation.__class__
        if kind in UNOWNED:
            epochs.clear()
        elif not self._owns(connection, mutation.room, mutation.epoch, epochs):
            raise WriteRefusedError("not-owner", detail=f"epoch {mutation.epoch} doesn't own room {mutation.room!r}")
        if kind in self._single:
            # RAISE(ABORT) and constraints undo the one statement and keep the transaction: no savepoint needed.
            return self._handlers[kind](connection, mutation)
        connection.execute("SAVEPOINT mutation")
        try:
            if kind is Together:
                result: Any = tuple(self._apply(connection, inner, epochs) for inner in mutation.mutations)
            else:
                result = self._handlers[kind](connection, mutation)
        except BaseException:
            connection.execute("ROLLBACK TO mutation")
            connection.execute("RELEASE mutation")
            raise
        connection.execute("RELEASE mutation")
        return result

    @staticmethod
    def _owns(connection: apsw.Connection, room: str, epoch: int, epochs: dict[str, int | None]) -> bool:
        # The writer's lock is held, so what was read once holds for the whole transaction.
        if room not in epochs:
            epochs[room] = connection.execute(_EPOCH, (room,)).get
        return epochs[room] == epoch

    def _refusal(self, problem: apsw.ConstraintError) -> WriteRefusedError:
        reason: int = cast("Any", problem).extendedresult
        if reason == apsw.SQLITE_CONSTRAINT_TRIGGER and str(problem) in self._refusals:
            refusal = WriteRefusedError(str(problem))
        else:
            refusal = WriteRefusedError(_CONSTRAINTS.get(reason, "constraint"), detail=str(problem))
        refusal.__cause__ = problem
        return refusal

    def _confirm(self, connection: apsw.Connection, mutation: Any) -> Confirmation:
        if type(mutation) is not Together:
            return self._confirmations[type(mutation)](connection, mutation)
        found = {self._confirm(connection, inner) for inner in mutation.mutations}
        if Confirmation.CONFLICT in found:
            return Confirmation.CONFLICT
        return Confirmation.ABSENT if Confirmation.ABSENT in found else Confirmation.PRESENT

    def _roll_back(self, connection: apsw.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            # Nothing was committed; without its connection the transaction is gone.
            self.close()


def _close(connection: apsw.Connection) -> None:
    try:
        connection.close(True)
    except apsw.Error as problem:
        _log.warning("a connection did not close cleanly: %s", problem)


def _transient_code(problem: apsw.Error) -> str:
    return next((code for kind, code in _TRANSIENT.items() if isinstance(problem, kind)), "store-failed")
