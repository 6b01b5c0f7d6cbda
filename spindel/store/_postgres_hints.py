"""Hints that a room was written to, for readers in other processes: NOTIFY from each batch, LISTEN on an idle session.

A hint names the room and nothing else; what happened is read from the rows. So one that is lost with its session, or
that a standby can't hear at all, costs a reader the time until it looks by itself, and never a row.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg

from spindel.store._backend import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.store._postgres_connection import Session

__all__ = ["RoomHints"]


class RoomHints:
    """One session that listens. Used in one lane only.

    Args:
        connect: opens the session.
    """

    __slots__ = ("_connect", "_heard", "_session")

    def __init__(self, connect: Callable[[], Session]) -> None:
        self._connect = connect
        self._session: Session | None = None
        self._heard: set[str] = set()

    def take(self, room: str) -> bool:
        """Tell whether the room may have been written to since the last call; True after a gap in listening, too."""
        try:
            if self._session is not None:
                # What has come is handed over with the answer; and without one the session is gone.
                self._session.execute(b"SELECT")
                heard = room in self._heard
                self._heard.clear()
                return heard
        except psycopg.Error:
            self.close()
        try:
            self._session = self._connect()
            self._session.add_notify_handler(lambda notify: self._heard.add(notify.payload))
            self._session.execute(b"LISTEN spindel")
        except psycopg.Error:
            self.close()
            return False
        return True

    def watched(self) -> int:
        """Give a descriptor of the session's socket that is the caller's own: libpq closes its one when it likes.

        Raises:
            UnavailableError: there is no session at the moment.
        """
        try:
            if self._session is not None:
                return os.dup(self._session.fileno())
        except psycopg.OperationalError as problem:
            raise UnavailableError(str(problem)) from problem
        raise UnavailableError("nobody listens")

    def close(self) -> None:
        """Give the session up."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(psycopg.Error):
                session.close()
