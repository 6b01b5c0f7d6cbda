"""Durable structured concurrency for Trio.

General layout, from the top; imports point down only:

- `spindel.testing`: what a user's own tests need.
- `spindel.cli`: the command `spindel`.
- `spindel.control`: the operators' door of a running process.
- `spindel.operator`: what only somebody with authority over a room may do.
- `spindel.runs`: rooms, Runs, families, the worker pool. Most programs need nothing else.
- `spindel.store`: durable facts, and what keeps them.
- `spindel.observe`: what happened, as events.
- `spindel.errors`: every error, by who must act.
- `spindel.clock`, `spindel.codec`, `spindel.ids`, `spindel.process`: time, portable values, identities.

The everyday names stand here too. They are looked up at first use, so that the command line answers `--help` without
waiting for Trio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from spindel.errors import RunWaiting, SpindelError
    from spindel.ids import RunId
    from spindel.runs import (
        Child,
        Outcome,
        Room,
        Run,
        RunOptions,
        current_run,
        observe_settlement,
        open_reader,
        open_room,
    )
    from spindel.store import MemoryStore, PostgresStore, RunStatus, SqliteStore

__all__ = [
    "Child",
    "MemoryStore",
    "Outcome",
    "PostgresStore",
    "Room",
    "Run",
    "RunId",
    "RunOptions",
    "RunStatus",
    "RunWaiting",
    "SpindelError",
    "SqliteStore",
    "current_run",
    "observe_settlement",
    "open_reader",
    "open_room",
]

_HOMES: Final = {
    "spindel.errors": ("RunWaiting", "SpindelError"),
    "spindel.ids": ("RunId",),
    "spindel.store": ("MemoryStore", "PostgresStore", "RunStatus", "SqliteStore"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'spindel' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF.get(name, "spindel.runs")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
