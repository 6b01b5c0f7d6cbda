"""Connections to a PostgreSQL database, and what its errors mean to somebody who opens it.

An address may hold a password, and libpq quotes whole addresses in its complaints. So a database is called by a name
made from what is no secret, and a complaint about the address itself isn't passed on.

A connection that nobody answers must end by itself, on both sides: here, so that a write hears of it; there, so that
the locks of a process that vanished become free. So both sides probe an idle connection and give up after 25 seconds,
or after what the address says by libpq's own parameters: `?keepalives_idle=2&keepalives_interval=1&keepalives_count=3`
and `&tcp_user_timeout=5000`. One set for both sides: a client that gives up later than the server finds its rooms taken.
A transaction that waits for its client ends after 10 seconds, since it keeps the owners of its rooms waiting.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import psycopg
from psycopg import conninfo, sql

from spindel.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Address", "Session", "describe_problem", "open_session", "postgres_errors", "read_address"]

Session: TypeAlias = psycopg.Connection[tuple[Any, ...]]
"""One connection; every statement is a transaction of its own unless it is told otherwise."""

LOCK_SECONDS: Final = 30
"""How long another transaction's lock is waited for."""

_DEFAULTS: Final[dict[str, str]] = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
    "fallback_application_name": "spindel",
}

# What the promises need, whatever the database or the role has as default. The path is that of the system's own names:
# ours are written out, and nobody else's are to be taken for one of the system.
_SETTINGS: Final = f"""\
SET search_path = pg_catalog, pg_temp;
SET client_encoding = 'UTF8';
SET default_transaction_isolation = 'read committed';
SET default_transaction_read_only = off;
SET lock_timeout = '{LOCK_SECONDS}s';
SET idle_in_transaction_session_timeout = '10s';
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
"""

# What the server calls them, and libpq. Over a Unix socket both take them and do nothing.
_PROBES: Final = (
    ("tcp_keepalives_idle", "keepalives_idle"),
    ("tcp_keepalives_interval", "keepalives_interval"),
    ("tcp_keepalives_count", "keepalives_count"),
    ("tcp_user_timeout", "tcp_user_timeout"),
)

_PROBLEMS: Final[dict[str, str]] = {
    "08": "the connection was lost",
    "28": "the server refuses this user; check the name and the password",
    "3D": "there is no such database; create it first",
    "42501": "this user may not do that; the owner of the database grants CREATE, TEMPORARY and the tables' rights",
    "53": "the server has no resources left",
    "53300": "the server has no connection left; raise max_connections, or share one store among rooms",
    "55P03": f"another transaction kept a lock for {LOCK_SECONDS} seconds",
    "57P03": "the server is starting or stopping; try again",
    "57": "the server ended the connection",
}


@attrs.frozen
class Address:
    """How a database is reached, and what it is called.

    Attributes:
        parameters: libpq's parameters, secrets among them.
        place: its name for messages and logs, which has none.
    """

    parameters: dict[str, str] = attrs.field(repr=False)
    place: str


def read_address(dsn: str) -> Address:
    """Take an address apart.

    Raises:
        SchemaError: it is none.
    """
    try:
        parameters = {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.Error:
        # Not even as a cause: the complaint may quote the password.
        raise SchemaError(
            "the address of the database",
            "it can't be read; write postgresql://user@host:port/database, with special characters percent-encoded",
        ) from None
    return Address(_DEFAULTS | parameters, _name_of(parameters))


def _name_of(parameters: dict[str, str]) -> str:
    user, host, port = (parameters.get(name, "") for name in ("user", "host", "port"))
    where = "" if host.startswith("/") else host
    name = f"postgresql://{user}{'@' if user else ''}{where}{f':{port}' if port and where else ''}"
    name += f"/{parameters.get('dbname', '')}"
    if host.startswith("/"):
        name += f"?host={host}"
    return name


def open_session(address: Address) -> Session:
    """Connect, with every setting that our promises need.

    Raises:
        psycopg.Error: the server can't be reached or refuses.
    """
    session: Session = psycopg.connect(**address.parameters, autocommit=True)  # type: ignore[arg-type]
    try:
        setting = sql.SQL("SET {} = {};")
        probes = [setting.format(sql.Identifier(name), address.parameters[ours]) for name, ours in _PROBES]
        session.execute(_SETTINGS.encode() + sql.Composed(probes).as_bytes(session))
    except BaseException:
        session.close()
        raise
    return session


def describe_problem(problem: psycopg.Error) -> str:
    """Say in one sentence what an error of the server means for whoever opens the database."""
    state = problem.sqlstate or ""
    text = " ".join((problem.diag.message_primary or str(problem)).split())
    for known in (state, state[:2]):
        if known in _PROBLEMS:
            return f"{_PROBLEMS[known]} ({text})"
    if state:
        return f"PostgreSQL can't use it: {text} ({state})"
    return f"the server can't be reached: {text}"


@contextmanager
def postgres_errors(place: str) -> Generator[None]:
    """Turn errors of the server within the block into a `SchemaError` about this database."""
    try:
        yield
    except psycopg.errors.QueryCanceled:  # somebody stopped it on purpose
        raise
    except psycopg.Error as problem:
        raise SchemaError(place, describe_problem(problem)) from problem
