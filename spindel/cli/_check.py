"""`spindel check`: verify every stored invariant."""

from __future__ import annotations

import click

__all__ = ["check"]


@click.command(short_help="Verify every stored invariant of a file.")
@click.option("--db", metavar="FILE", default="spindel.db", show_default=True, help="The file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def check(db: str, as_json: bool) -> int:
    """Verify every stored invariant of a file, also while its rooms are in use. It changes nothing.

    Exit codes: 0 all hold, 1 at least one doesn't, 2 the file can't be read.
    """
    import trio

    from spindel.cli._checking import print_check

    return trio.run(print_check, db, as_json)
