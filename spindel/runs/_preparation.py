"""Preparations: what a Run gets constructed before its first row, and who takes it down if it never begins.

The order is fixed: the lease is reserved, then things are constructed, then the row is written, then the body starts.
Each effect is announced before it happens, with a way to undo it. So whatever fails, in whatever step, everything that
was begun has an owner, and the owner is asked until it says that the thing is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, final

import attrs

from spindel.errors import InvalidRecordError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.ids import RunId
    from spindel.store import FenceAdmission

__all__ = ["Acquisition", "Custody", "Disposal", "Preparation", "prepare"]

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Disposal(StrEnum):
    """What a dispose callback can say. Only DISCARDED lets an admission go; anything else holds it.

    DISCARDED: the thing is gone, for certain. INCOMPLETE: it is being taken down. LOST: the right to discard it was
    lost. GONE: it is unknown what became of it.
    """

    DISCARDED = "discarded"
    INCOMPLETE = "incomplete"
    LOST = "lost"
    GONE = "gone"


@attrs.define(eq=False)
class Owned:
    """One announced effect."""

    owner: object
    dispose: Callable[[], Awaitable[Disposal]]
    discarded: bool = False


@final
class Acquisition:
    """What a construction has begun so far. Made for each construction; handed to `Preparation.construct`."""

    __slots__ = ("_closed", "_declared_nothing", "_owned")

    def __init__(self) -> None:
        self._owned: list[Owned] = []
        self._declared_nothing = False
        self._closed = False

    def begin(self, owner: object, dispose: Callable[[], Awaitable[Disposal]]) -> None:
        """Announce an effect, before it happens.

        Args:
            owner: what is acquired, kept alive until it is disposed; never looked into.
            dispose: an idempotent async function that takes it down, however far it came, and says so.

        Raises:
            RuntimeError: the construction has ended, so nobody would dispose what comes now.
            InvalidRecordError: `dispose` can't be called.
        """
        if self._closed:
            raise RuntimeError("this construction has ended; begin an effect inside construct, before it happens")
        if not callable(dispose):
            raise InvalidRecordError("dispose", f"a {type(dispose).__name__} is no async function")
        self._owned.append(Owned(owner, dispose))

    def nothing(self) -> None:
        """Declare that nothing is owned so far; holds until the next `begin`."""
        self._declared_nothing = True

    def close(self) -> None:
        """Take no more: the construction has ended, well or not."""
        self._closed = True

    @property
    def owned(self) -> list[Owned]:
        """The announced effects, in their order."""
        return self._owned

    @property
    def is_accounted_for(self) -> bool:
        """True if everything begun has an owner: something was announced, or nothing was declared."""
        return bool(self._owned) or self._declared_nothing


class Preparation(ABC, Generic[R_co]):
    """Constructs what a Run needs, before its first row is written. Write one only if it takes something outside."""

    @abstractmethod
    async def construct(self, run_id: RunId, acquisition: Acquisition) -> R_co:
        """Construct and give what becomes `run.resource`.

        Call `acquisition.begin` before each effect. Raise `NotConstructedError` before the first one to refuse.

        Cancellation: as you like; whatever was begun is disposed.
        """


@attrs.frozen
class _Prepared(Preparation[R]):
    fn: Callable[[], Awaitable[R]]

    async def construct(self, run_id: RunId, acquisition: Acquisition) -> R:  # noqa: ARG002  an ordinary function needs no id
        acquisition.nothing()
        return await self.fn()


def prepare(fn: Callable[[*Ts], Awaitable[R]], *args: *Ts) -> Preparation[R]:
    """Wrap an ordinary async function as a preparation that takes nothing outside: its value is `run.resource`."""
    return _Prepared(lambda: fn(*args))


@attrs.define(eq=False)
class Custody:
    """What a family keeps for an admission that is being prepared, and for one that must be undone.

    Attributes:
        acquisition: what the construction began, None without a preparation.
        resource: what it gave.
        fence: the frozen fence, once it is due; every repeat sends this object.
        fenced: True once it was acknowledged.
        error: why the admission failed, as text for the fence.
    """

    acquisition: Acquisition | None = None
    resource: Any = None
    fence: FenceAdmission | None = None
    fenced: bool = False
    error: str | None = None

    @property
    def is_accounted_for(self) -> bool:
        """True if everything that may have been begun has an owner, or nothing was."""
        return self.acquisition is None or self.acquisition.is_accounted_for

    @property
    def owned(self) -> list[Owned]:
        """What may have to be disposed."""
        return [] if self.acquisition is None else self.acquisition.owned
