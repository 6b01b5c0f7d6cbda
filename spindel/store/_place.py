"""From what a user calls a database to its store."""

from __future__ import annotations

import os
from typing import Final

from spindel.store._postgres import PostgresStore
from spindel.store._sqlite import SqliteStore

__all__ = ["ADDRESS_SCHEMES", "open_place"]

ADDRESS_SCHEMES: Final = ("postgresql://", "postgres://")
"""How the address of a PostgreSQL database begins; anything else is the path of a SQLite file."""


def open_place(place: str | os.PathLike[str], *, read_only: bool = False) -> SqliteStore | PostgresStore:
    """Give the store for the path of a file or the address of a database, to be entered with `async with`.

    Args:
        place: the path, or an address that begins with `postgresql://` or `postgres://`.
        read_only: only read.

    Raises:
        SchemaError: it is neither, or psycopg isn't installed.
    """
    text = os.fspath(place)
    if text.startswith(ADDRESS_SCHEMES):
        return PostgresStore(text, read_only=read_only)
    return SqliteStore(text, read_only=read_only)
