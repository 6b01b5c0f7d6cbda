"""`spindel runs`: read a room cold."""

from __future__ import annotations

import click

from spindel.cli._exit import CommandError
from spindel.cli._place import takes_place

__all__ = ["runs"]

_STATUSES = ("running", "waiting", "completed", "failed", "cancelled")


@click.command(short_help="Show the Runs of a room, also while it is in use.")
@takes_place("The room's file; spindel.db by default.")
@click.option("--room", metavar="NAME", default="main", show_default=True, help="The room there.")
@click.option("--tree", is_flag=True, help="Draw who owns whom, upper levels first.")
@click.option("--status", type=click.Choice(_STATUSES), help="Only Runs of this stored status; in a tree, with owners.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=0), default=100, show_default=True, help="How many; 0: all."
)
@click.option("--follow", is_flag=True, help="Go on with what begins, changes and ends, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --follow one for each line.")
def runs(db: str | None, room: str, tree: bool, status: str | None, limit: int, follow: bool, as_json: bool) -> int:
    """Show the Runs of a room, the latest start first.

    It claims nothing and changes nothing, so it may come at any time: while the room is in use, after it was closed,
    after its owner was killed.
    """
    if follow and tree:
        raise CommandError("--follow prints lines as they come, and --tree draws what is there; give one of them.")
    import trio

    from spindel.cli._listing import Listing, print_runs

    listing = Listing("spindel.db" if db is None else db, room, tree, status, limit or None, as_json)
    if not follow:
        return trio.run(print_runs, listing)
    from spindel.cli._following import follow_runs

    return trio.run(follow_runs, listing)
