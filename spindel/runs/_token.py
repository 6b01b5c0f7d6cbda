"""The single-use marker of a reservation, and the block in which it is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from spindel.errors import AdmissionTokenError
from spindel.runs._admission import leave, reserve
from spindel.runs._frontier import reserving

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from spindel.ids import LeaseId, RunId
    from spindel.runs._entry import Entry

__all__ = ["AdmissionToken", "Reservation"]


class AdmissionToken:
    """The single-use marker of one reservation. It can't be copied or pickled.

    Attributes:
        run_id: the child's id.
        lease_id: the admission lease's id.
    """

    __slots__ = ("_entry", "_exited", "_parent", "_task", "_uses")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._parent = entry.parent
        self._task = trio.lowlevel.current_task()
        # One element; taking it is a compare-and-set that holds between threads.
        self._uses = [None]
        self._exited = False

    @property
    def run_id(self) -> RunId:
        """The child's id."""
        return self._entry.run_id

    @property
    def lease_id(self) -> LeaseId:
        """The admission lease's id."""
        return self._entry.lease_id

    def consume(self, parent: Entry) -> Entry:
        """Use it up.

        Raises:
            AdmissionTokenError: the first that holds of consumed, foreign-parent, foreign-context, expired; foreign
                use consumes nothing.
        """
        if not self._uses:
            raise AdmissionTokenError("consumed", self.run_id)
        if parent is not self._parent:
            raise AdmissionTokenError("foreign-parent", self.run_id)
        try:
            task = trio.lowlevel.current_task()
        except RuntimeError:
            task = None
        if task is not self._task:
            raise AdmissionTokenError("foreign-context", self.run_id)
        if self._exited:
            raise AdmissionTokenError("expired", self.run_id)
        try:
            self._uses.pop()
        except IndexError:
            raise AdmissionTokenError("consumed", self.run_id) from None
        return self._entry

    def expire(self) -> None:
        """Note that its block was left."""
        self._exited = True

    def __copy__(self) -> AdmissionToken:
        raise TypeError("an admission token can't be copied")

    def __deepcopy__(self, memo: object) -> AdmissionToken:
        raise TypeError("an admission token can't be copied")

    def __reduce__(self) -> str:
        raise TypeError("an admission token can't be pickled")


class Reservation:
    """The block of `Run.reserve`: it reserves on entry, and its exit is the callback exit of the lease."""

    __slots__ = ("_block", "_parent", "_run_id", "_token")

    def __init__(self, parent: Entry, run_id: RunId | None) -> None:
        self._parent = parent
        self._run_id = run_id
        self._token: AdmissionToken | None = None
        self._block: AbstractContextManager[None] | None = None

    @trio.lowlevel.enable_ki_protection
    def __enter__(self) -> AdmissionToken:
        if self._token is not None:
            raise RuntimeError("a reservation is for one block; call reserve() again")
        trio.lowlevel.current_task()  # a token binds a task, so without one nothing is reserved
        entry = reserve(self._parent.room, self._parent, self._run_id)
        block = self._block = reserving(entry)
        block.__enter__()
        token = self._token = AdmissionToken(entry)
        return token

    @trio.lowlevel.enable_ki_protection
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        token, block = self._token, self._block
        assert token is not None, "left without having been entered"
        assert block is not None, "entered with the token"
        token.expire()
        block.__exit__(None, None, None)
        leave(token._entry)
