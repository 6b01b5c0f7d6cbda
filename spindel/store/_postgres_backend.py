"""The writer's backend for PostgreSQL: a batch is two round trips, however much it holds.

    BEGIN; pg_temp.apply(calls)  ──▶  verdicts          locks its rooms, applies each, refuses alone
    COMMIT                       ──▶  acknowledged

A mutation crosses as JSON and is applied by a function in the server (see the scripts). Statements of our own, with a
savepoint each, took three round trips a mutation; sending them in libpq's pipeline took one for the batch, but eight
times this process's own time, which the loop needs for itself.

Locks are taken in one order by everybody: rooms by name, before anything else. The lock on a room is what makes its
writes, its claims and the checks of its triggers one after another. A deadlock can only come from a program that takes
locks of its own in our tables; the server then picks one, rolls it back, and that batch is tried again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg

from spindel.errors import InvalidRecordError, SchemaError, WriteRefusedError
from spindel.store._backend import BatchFailedError, LostReplyError, UnavailableError
from spindel.store._claims import UNOWNED
from spindel.store._contract import Confirmation
from spindel.store._mutations import Together
from spindel.store._postgres_connection import describe_problem
from spindel.store._postgres_runs import load_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from spindel.store._backend import Slot
    from spindel.store._contract import StorePart
    from spindel.store._postgres_connection import Session

__all__ = ["PostgresBackend"]

_APPLY: Final = b"SELECT changed, value, code, detail FROM pg_temp.apply(%s::jsonb)"
_CONFIRM: Final = b"SELECT pg_temp.confirm(%s::jsonb)"
# The escape itself, not the text of one after an escaped backslash. The server reads a batch as a whole, or not at all.
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_ATTEMPTS: Final = 5
_ROLLED_BACK: Final = frozenset({"40001", "40P01"})
"""The server took a side in a conflict and rolled the other one back."""

# Where a mutation is refused by what isn't ours: the constraint that it met, as in SQLite's store.
_CONSTRAINTS: Final = {
    "23514": "check",
    "22P02": "type",
    "22003": "type",
    "42804": "type",
    "23503": "reference",
    "23502": "missing",
    "23505": "exists",
}
_TRANSIENT: Final = {
    "55P03": "busy",
    "53100": "disk-full",
    "58030": "disk-error",
    "25006": "read-only",
}


class PostgresBackend:
    """See the module.

    Args:
        parts: whose mutations it knows.
        connect: opens a session.

    Raises:
        InvalidRecordError: a part has nothing for PostgreSQL.
    """

    __slots__ = ("_apply", "_arguments", "_confirm", "_connect", "_functions", "_session")

    def __init__(self, parts: Iterable[StorePart], connect: Callable[[], Session]) -> None:
        self._connect = connect
        self._session: Session | None = None
        self._apply: dict[type, str] = {}
        self._confirm: dict[type, str] = {}
        self._arguments: dict[type, Callable[[Any], object]] = {}
        functions = [load_functions("writer")]
        for part in parts:
            if part.postgres is None:
                raise InvalidRecordError("parts", f"the part {part.name!r} has nothing for PostgreSQL")
            functions.append(part.postgres.functions)
            self._apply.update(part.postgres.apply)
            self._confirm.update(part.postgres.confirm)
            self._arguments.update(part.postgres.argument)
        functions.append(_build_dispatch(self._apply.values()))
        self._functions = "\n".join(functions).encode()

    @property
    def connected(self) -> bool:
        """False before `connect`, and once the connection is gone."""
        return self._session is not None and not self._session.closed

    def knows(self, kind: type) -> bool:
        """Tell whether some part applies mutations of this type."""
        return kind in self._apply

    def connect(self) -> None:
        """Open a session and make its functions.

        Raises:
            UnavailableError: the server can't be reached, or refuses.
        """
        self.close()
        try:
            session = self._connect()
            try:
                session.execute(self._functions)
            except BaseException:
                session.close()
                raise
        except SchemaError as problem:
            raise UnavailableError(str(problem)) from problem
        except psycopg.Error as problem:
            raise UnavailableError(describe_problem(problem)) from problem
        self._session = session

    def apply(self, slots: Sequence[Slot]) -> None:
        """Begin a transaction and apply each mutation in it.

        Raises:
            BatchFailedError: nothing is stored, and the transaction is over.
        """
        sent, calls = self._encode(slots)
        attempt = 1
        while True:
            try:
                verdicts = self._call(calls)
            except psycopg.Error as problem:
                self._roll_back()
                if problem.sqlstate in _ROLLED_BACK and self.connected and attempt < _ATTEMPTS:
                    attempt += 1
                    continue
                raise BatchFailedError(_transient_code(problem), describe_problem(problem)) from problem
            break
        for slot, (changed, value, code, detail) in zip(sent, verdicts, strict=True):
            slot.changed = changed
            if code is not None:
                slot.error = _refusal(code, detail)
            else:
                slot.result = tuple(value) if type(slot.mutation) is Together else value

    def commit(self) -> None:
        """Commit what was applied.

        Raises:
            LostReplyError: it may be committed or not; the connection is given up.
        """
        assert self._session is not None, "there is a transaction to commit"
        try:
            done = self._session.execute(b"COMMIT").statusmessage
        except psycopg.Error as problem:
            self.close()
            raise LostReplyError(_transient_code(problem), f"COMMIT raised: {describe_problem(problem)}") from problem
        if done != "COMMIT":
            self.close()
            raise LostReplyError("store-failed", f"COMMIT was answered with {done}")

    def confirm(self, mutation: Any) -> Confirmation:
        """Read a mutation's identity back.

        Raises:
            LostReplyError: it can't be read now.
        """
        assert self._session is not None, "only what is connected confirms"
        try:
            call = msgspec.json.encode(self._build_call(mutation, self._confirm)).decode()
            found = self._session.execute(_CONFIRM, (call,)).fetchone()
        except psycopg.Error as problem:
            self._roll_back()
            raise LostReplyError(_transient_code(problem), describe_problem(problem)) from problem
        assert found is not None, "a function gives one row"
        return Confirmation(found[0])

    def close(self) -> None:
        """Give the session up; whatever it had begun is rolled back."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def lose(self) -> None:
        """As `close`: what can be read is committed, and a `confirm` waits for what the server still has in hand."""
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _encode(self, slots: Sequence[Slot]) -> tuple[list[Slot], str]:
        """Give the calls as JSON, and whose they are: one that can't be sent is its part's fault alone."""
        sent: list[Slot] = []
        calls: list[bytes] = []
        for slot in slots:
            slot.error = None
            slot.changed = False
            try:
                calls.append(self._encode_one(slot.mutation))
            except Exception as problem:  # noqa: BLE001  told to its caller
                slot.error = problem
            else:
                sent.append(slot)
        return sent, f"[{b','.join(calls).decode()}]"

    def _encode_one(self, mutation: Any) -> bytes:
        call = msgspec.json.encode(self._build_call(mutation, self._apply))
        if b"\\u0000" in call and _NUL.search(call):
            raise InvalidRecordError("mutation", "it has a NUL character, which PostgreSQL can't keep")
        return call

    def _build_call(self, mutation: Any, functions: dict[type, str]) -> tuple[str, str, int | None, object]:
        kind: type[object] = mutation.__class__
        if kind is Together:
            inner = [self._build_call(one, functions) for one in mutation.mutations]
            return "together", mutation.room, mutation.epoch, inner
        argument = self._arguments.get(kind)
        epoch = None if kind in UNOWNED else mutation.epoch
        return functions[kind], mutation.room, epoch, mutation if argument is None else argument(mutation)

    def _call(self, calls: str) -> list[tuple[Any, ...]]:
        assert self._session is not None, "only what is connected applies"
        with self._session.pipeline():
            self._session.execute(b"BEGIN")
            return self._session.execute(_APPLY, (calls,)).fetchall()

    def _roll_back(self) -> None:
        session = self._session
        try:
            if session is not None and session.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                session.execute(b"ROLLBACK")
        except psycopg.Error:
            # Nothing was committed; without its connection the transaction is gone.
            self.close()


def _build_dispatch(functions: Iterable[str]) -> str:
    """Write the function that calls one by its name: planned once a session, not once a call."""
    cases = "\n".join(f"    WHEN '{name}' THEN RETURN pg_temp.{name}(argument);" for name in functions)
    return f"""
CREATE FUNCTION pg_temp.dispatch(name text, argument jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
BEGIN
  CASE name
{cases}
  END CASE;
END;
$$;
"""


def _refusal(code: str, detail: str | None) -> WriteRefusedError:
    state = code.removeprefix("!")
    if state == code:
        return WriteRefusedError(code, detail=detail)
    known = _CONSTRAINTS.get(state, "constraint" if state[:2] in {"22", "23"} else "part-failed")
    return WriteRefusedError(known, detail=f"{detail} ({state})")


def _transient_code(problem: psycopg.Error) -> str:
    state = problem.sqlstate
    if state is None or state[:2] in {"08", "57"}:
        return "connection-lost"
    return _TRANSIENT.get(state, "store-failed")
