"""What the writer asks of a database, and the slots in which it is answered.

The writer knows about queues, batches and what may be believed; a backend knows one kind of database. A backend is
used by turns only, one at a time, and tells its troubles in three words:

| raised | by | what holds |
|---|---|---|
| `UnavailableError` | `connect` | there is no connection; another attempt may succeed later |
| `BatchFailedError` | `apply` | nothing of the batch is stored, and the transaction is over |
| `LostReplyError` | `commit`, `confirm` | what was asked may have happened or not; the connection is given up |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spindel.store._contract import Confirmation

__all__ = ["Backend", "BatchFailedError", "LostReplyError", "Slot", "UnavailableError"]


class UnavailableError(Exception):
    """The database can't be opened now."""


class BatchFailedError(Exception):
    """A batch ended before its commit was asked for.

    Attributes:
        code: of the refusals.
    """

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


class LostReplyError(Exception):
    """The database didn't answer, or answered with an error where that decides nothing.

    Attributes:
        code: of refusals, where nothing was at stake.
    """

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


class Slot(msgspec.Struct):
    """One queued mutation, who waits for it, and what became of it.

    Attributes:
        waiter: whom the delivery resumes.
        confirming: True if its identity is to be read back, False if it is to be applied.
        changed: True if something of it stands in the transaction.
        error: a refusal, or what a part's function raised.
    """

    mutation: Any
    waiter: Any
    confirming: bool = False
    result: Any = None
    error: Exception | None = None
    changed: bool = False


class Backend(Protocol):
    """See the module."""

    @property
    def connected(self) -> bool:
        """False before `connect` and after a connection was given up."""
        ...

    def knows(self, kind: type) -> bool:
        """Tell whether some part applies mutations of this type."""
        ...

    def connect(self) -> None:
        """Open a connection by which what can be read is true.

        Raises:
            UnavailableError: there is none now.
        """
        ...

    def apply(self, slots: Sequence[Slot]) -> None:
        """Begin a transaction and apply each mutation in order; one that is refused takes nothing else along.

        Raises:
            BatchFailedError: see the module.
        """
        ...

    def commit(self) -> None:
        """Commit what was applied.

        Raises:
            LostReplyError: see the module.
        """
        ...

    def confirm(self, mutation: Any) -> Confirmation:
        """Read a mutation's identity back.

        Raises:
            LostReplyError: see the module.
        """
        ...

    def close(self) -> None:
        """Give the connection up, if there is one. Never raises."""
        ...

    def lose(self) -> None:
        """Give it up in doubt: what the next one reads is to be true whatever became of the last transaction."""
        ...
