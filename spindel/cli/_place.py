"""Where a command looks for a room: a file, or a PostgreSQL database."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

import click

from spindel.cli._exit import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["takes_place"]

F = TypeVar("F", bound="Callable[..., int]")

# As in spindel.store, which is imported late.
_SCHEMES = ("postgresql://", "postgres://")
_SECRETS = frozenset({"password", "sslpassword"})


def takes_place(help_file: str) -> Callable[[F], F]:
    """Give a command the options `--db` and `--store`. It gets what was said as `db`, None if nothing was.

    Args:
        help_file: what `--db` means here.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def merged(*args: Any, db: str | None, store: str | None, **options: Any) -> int:
            return function(*args, db=_choose(db, store), **options)

        decorated: Any = merged
        for option in (
            click.option("--store", metavar="URL", help="Instead of a file, a database: postgresql://USER@HOST/NAME."),
            click.option("--db", metavar="FILE", help=help_file),
        ):
            decorated = option(decorated)
        return cast("F", decorated)

    return decorate


def _choose(db: str | None, store: str | None) -> str | None:
    if db is not None and store is not None:
        raise CommandError("--db names a file and --store a database; give one of them.")
    if db is not None and db.startswith(_SCHEMES):
        raise CommandError("--db names a file; give the address of a database as --store.")
    if store is None:
        return db
    if not store.startswith(_SCHEMES):
        raise CommandError("--store names a database by its address, postgresql://USER@HOST/NAME; give a file as --db.")
    if _has_secret(store):
        # Nor is it repeated here: this goes to terminals and logs.
        raise CommandError(
            "the address has a password, which everybody sees who lists this machine's processes; leave it out and "
            "set PGPASSWORD, or keep it in ~/.pgpass."
        )
    return store


def _has_secret(address: str) -> bool:
    try:
        parts = urlsplit(address)
    except ValueError:  # libpq knows better what is wrong with it
        return "@" in address
    return parts.password is not None or not _SECRETS.isdisjoint(parse_qs(parts.query))
