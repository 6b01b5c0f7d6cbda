"""Who owns a room in PostgreSQL: an advisory lock for each room, all of them on one idle session of the store.

The lock is for speed: it is free as soon as its session ends, so a dead process's room can be opened at once, and a
second opener is refused at once. It is no fence: a session may end while its process lives. The truth is the epoch,
which the transaction of every mutation reads under the room's row lock.

| lock | epoch | the room | next |
|---|---|---|---|
| held | ours | guarded | - |
| lost with its session | ours | *unguarded*: it goes on, its writes are as true as ever | the session is opened again, the lock taken again |
| another's | ours | somebody is about to claim it, or to give up since we live | looked at again |
| any | another's | LOST | its owner is told, its writes are refused as `not-owner` |

The session is idle, so its socket becomes readable only when there is news: that it ended, or a notification. A store
watches that in the loop, and so a room that writes nothing for hours still hears that it was lost.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import psycopg

from spindel.errors import WriteRefusedError
from spindel.store._backend import UnavailableError
from spindel.store._postgres_connection import describe_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spindel.store._postgres_connection import Session

__all__ = ["RoomLocks", "lock_key"]

_TAKE: Final = b"SELECT pg_try_advisory_lock(%s)"
_RELEASE: Final = b"SELECT pg_advisory_unlock(%s)"
_EPOCHS: Final = b"SELECT name, epoch FROM spindel.rooms WHERE name = ANY(%s)"


def lock_key(room: str) -> int:
    """Give the key of a room's lock: 64 bits of a hash. Should two rooms ever share one, they exclude each other."""
    digest = hashlib.sha256(b"spindel room " + room.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


class RoomLocks:
    """The locks of a store's rooms. Used in one lane only.

    Only `renew` opens a session and only `close` gives one up for good, so whoever watches its socket knows of both.

    Args:
        connect: opens the session.
    """

    __slots__ = ("_connect", "_guarded", "_session", "_wanted")

    def __init__(self, connect: Callable[[], Session]) -> None:
        self._connect = connect
        self._session: Session | None = None
        # Rooms whose lock is to be held, and those of which the present session holds it.
        self._wanted: set[str] = set()
        self._guarded: set[str] = set()

    def take(self, room: str) -> bool:
        """Take a room's lock; False if somebody has it, this store's own rooms included.

        Raises:
            WriteRefusedError: the server can't be asked now.
        """
        if room in self._wanted:
            return False
        try:
            if not self._ask(_TAKE, lock_key(room)):
                return False
        except psycopg.Error as problem:
            raise WriteRefusedError("room-lock", transient=True, detail=describe_problem(problem)) from problem
        self._wanted.add(room)
        self._guarded.add(room)
        return True

    def release(self, room: str) -> None:
        """Give a room's lock back; if its session is gone, so is the lock."""
        self._wanted.discard(room)
        if room in self._guarded:
            self._guarded.discard(room)
            with suppress(psycopg.Error):
                self._ask(_RELEASE, lock_key(room))

    def renew(self, epochs: Mapping[str, int]) -> set[str]:
        """See that every room still has its epoch, and its lock if that can be had; on a new session if need be.

        Args:
            epochs: the rooms and what they own.

        Returns:
            The rooms that a newer owner has.

        Raises:
            UnavailableError: the server can't be asked now.
        """
        try:
            session = self._session
            if session is None or session.closed:
                self.close()
                session = self._session = self._connect()
            found: dict[str, int] = dict(session.execute(_EPOCHS, (list(epochs),)).fetchall())
            lost = {room for room, epoch in epochs.items() if found.get(room) != epoch}
            self._wanted -= lost
            for room in self._wanted - self._guarded:
                if self._ask(_TAKE, lock_key(room)):
                    self._guarded.add(room)
        except psycopg.Error as problem:
            raise UnavailableError(describe_problem(problem)) from problem
        return lost

    @property
    def unguarded(self) -> bool:
        """True if some room has no lock at the moment."""
        return not self._wanted <= self._guarded

    def watched(self) -> int:
        """Give a descriptor of the session's socket that is the caller's own: libpq closes its one when it likes."""
        assert self._session is not None, "there is a session to watch"
        try:
            return os.dup(self._session.fileno())
        except psycopg.OperationalError as problem:  # it ended this very moment
            raise UnavailableError(str(problem)) from problem

    def close(self) -> None:
        """Give up the session, and with it all locks."""
        session, self._session = self._session, None
        self._guarded.clear()
        if session is not None:
            session.close()

    def _ask(self, statement: bytes, key: int) -> bool:
        if self._session is None:
            raise psycopg.OperationalError("the session of the locks is being opened again")
        return self._session.execute(statement, (key,)).fetchone() == (True,)
