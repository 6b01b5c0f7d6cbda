"""Reading a room: from its owner, or cold by somebody who claims nothing."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from spindel.errors import InvalidRecordError
from spindel.store import RunCursor, RunQuery, RunStatus, check_limit, check_room_name, open_place

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from spindel.ids import RunId
    from spindel.store import RunPage, RunRecord, Store

__all__ = ["RoomReader", "list_room", "open_reader", "opened_store"]


class RoomReader:
    """Reads one room's rows and owns nothing. What lives in another process it can't know.

    Attributes:
        name: the room.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.name = name

    @property
    def store(self) -> Store:
        """The store that it reads."""
        return self._store

    async def load(self, run_id: RunId) -> RunRecord | None:
        """Read a Run with its causes; None if the room has none of that id."""
        return await self._store.load_run(self.name, run_id)

    async def list_runs(
        self,
        *,
        status: RunStatus | None = None,
        parent: RunId | None = None,
        under: RunId | None = None,
        before: RunCursor | None = None,
        limit: int = 20,
    ) -> RunPage:
        """Read a page of Runs, newest first; see `Room.list_runs`."""
        return await list_room(self._store, self.name, status, parent, under, before, limit)


async def list_room(
    store: Store,
    room: str,
    status: RunStatus | None,
    parent: RunId | None,
    under: RunId | None,
    before: RunCursor | None,
    limit: int,
) -> RunPage:
    """Read a page of Runs of a room.

    Raises:
        InvalidRecordError: the limit is not 1 to 100, or the status is `cancelling`, which is never stored.
    """
    check_limit(limit)
    if status is RunStatus.CANCELLING:
        raise InvalidRecordError("status", f"{status.value!r} is never stored; such a Run is still running")
    return await store.list_runs(
        RunQuery(room=room, status=status, parent=parent, under=under, before=before, limit=limit)
    )


def open_reader(store: Store | str | os.PathLike[str], *, name: str) -> AbstractAsyncContextManager[RoomReader]:
    """Read a room cold, also while another process owns it. Claims nothing and changes nothing.

    Args:
        store: an open store, or the path of a file or the address of a PostgreSQL database, which is then opened
            read-only and closed again.
        name: the room.

    Raises:
        SchemaError: there is no such database, or it can't be read.
        InvalidRecordError: the name is none.
    """
    return _open_reader(store, check_room_name(name))


@asynccontextmanager
async def _open_reader(store: Store | str | os.PathLike[str], name: str) -> AsyncGenerator[RoomReader]:
    async with opened_store(store, read_only=True) as opened:
        yield RoomReader(opened, name)


@asynccontextmanager
async def opened_store(store: Store | str | os.PathLike[str], *, read_only: bool = False) -> AsyncGenerator[Store]:
    """Open and close a store that is given by its path or address; leave an open one to its owner."""
    if isinstance(store, (str, os.PathLike)):
        async with open_place(store, read_only=read_only) as opened:
            yield opened
    else:
        yield store
