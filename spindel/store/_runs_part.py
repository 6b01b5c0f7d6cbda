"""The core as a part like any other: its tables and its mutations, in SQLite's form and in PostgreSQL's.

The memory store has its own form of it.
"""

from __future__ import annotations

from typing import Final

from spindel.store._contract import StorePart
from spindel.store._migrations import load_scripts
from spindel.store._postgres_runs import RUNS_POSTGRES
from spindel.store._sqlite_many import SQLITE_APPLY_MANY
from spindel.store._sqlite_runs import SQLITE_APPLY, SQLITE_CONFIRM

__all__ = ["RUNS_PART"]

RUNS_PART: Final = StorePart(
    name="runs",
    migrations={"sqlite": load_scripts("runs", "sqlite"), "postgres": load_scripts("runs", "postgres")},
    sqlite=SQLITE_APPLY,
    memory={},
    sqlite_confirm=SQLITE_CONFIRM,
    memory_confirm={},
    # Each of them writes with one statement, before or after it reads.
    single_statement=frozenset(SQLITE_APPLY),
    sqlite_many=SQLITE_APPLY_MANY,
    postgres=RUNS_POSTGRES,
)
