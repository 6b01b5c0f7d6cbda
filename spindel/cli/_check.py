"""`spindel check`: verify every stored invariant."""

from __future__ import annotations

import click

from spindel.cli._place import takes_place

__all__ = ["check"]


@click.command(short_help="Verify every stored invariant of a file or database.")
@takes_place("The file; spindel.db by default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def check(db: str | None, as_json: bool) -> int:
    """Verify every stored invariant of a file or database, also while its rooms are in use. It changes nothing.

    Exit codes: 0 all hold, 1 at least one doesn't, 2 it can't be read.
    """
    import trio

    from spindel.cli._checking import print_check

    return trio.run(print_check, "spindel.db" if db is None else db, as_json)
