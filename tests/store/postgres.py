"""What the tests of the PostgreSQL store look at the server with."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Plain: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"


@contextmanager
def plain_session(dsn: str) -> Iterator[Plain]:
    """A connection of the superuser, beside those of the store; each statement is a transaction."""
    with psycopg.connect(dsn, autocommit=True) as session:
        yield session


async def wait_until(holds: Callable[[], object]) -> None:
    """Wait for a fact that other threads and processes bring about."""
    with trio.fail_after(20):
        while not holds():  # noqa: ASYNC110  no event of ours comes from there
            await trio.lowlevel.checkpoint()


async def wait_for_row(session: Plain, question: str, *values: object) -> None:
    """Wait until a question to the server has a row as its answer."""
    await wait_until(lambda: session.execute(question.encode(), values).fetchall())
