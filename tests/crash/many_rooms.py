"""Many rooms of several processes on one PostgreSQL database: `python -m tests.crash.many_rooms` is the long form.

Each process has one store and opens all its rooms on it at once; a root Run in each starts its share of durable child
Runs. The long form has two processes with 200 rooms each, and 20,000 child Runs altogether.
"""

# ruff: noqa: T201  a command prints

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import attrs
import trio

from spindel import open_room
from spindel.runs import Child
from spindel.store import PostgresStore
from spindel.testing.postgres import PostgresCluster
from tests.cli.commands import ENVIRONMENT, ROOT
from tests.crash.besieged import check_database
from tests.store.postgres import plain_session

if TYPE_CHECKING:
    from spindel import Run

PROCESSES: Final = 2
DEADLINE_SECONDS: Final = 600


async def leaf(run: Run[None]) -> None:
    """Do nothing, durably."""
    await trio.lowlevel.checkpoint()


async def branch(run: Run[int], children: int) -> int:
    """Start so many children at once; gives how many have completed."""
    done = 0
    for child in await run.start_children([Child.of(leaf) for _ in range(children)]):
        if isinstance(child, Exception):
            raise child
        await child.result()
        done += 1
    return done


async def work(dsn: str, name: str, rooms: int, children: int) -> None:
    """Be one process."""
    done = 0

    async def work_in(number: int) -> None:
        nonlocal done
        async with open_room(store, name=f"{name}/{number}") as room:
            run = await room.start(branch, children)
            children_done = await run.result()
            done += children_done

    async with PostgresStore(dsn) as store:
        async with trio.open_nursery() as nursery:
            for number in range(rooms):
                nursery.start_soon(work_in, number)
        print(done, store.commits)


@attrs.frozen
class Told:
    """What the processes said, and how long it took."""

    children: int
    commits: int
    complaints: str
    seconds: float
    check_seconds: float


def run_all(dsn: str, rooms: int, children: int) -> Told:
    """Run the processes together, check the database, and compare it with what they said."""
    each = children // PROCESSES // rooms
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.crash.many_rooms", "--work", dsn, f"p{number}", str(rooms), str(each)],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    try:
        ended = [process.communicate(timeout=DEADLINE_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    took = time.monotonic() - began
    complaints = "".join(err for _, err in ended)

    assert [process.returncode for process in processes] == [0] * PROCESSES, complaints[-4000:]
    done, commits = (sum(figures) for figures in zip(*(map(int, out.split()) for out, _ in ended), strict=True))
    with plain_session(dsn) as session:
        (found,) = session.execute(
            "SELECT count(*) FILTER (WHERE parent_id IS NOT NULL AND status = 'completed' AND family_return_ack IS NOT NULL),"
            " count(*) FILTER (WHERE parent_id IS NULL AND status = 'completed' AND family_return_ack IS NOT NULL),"
            " count(*), count(DISTINCT room) FROM spindel.runs"
        ).fetchall()
    expected = each * PROCESSES * rooms

    assert done == expected
    assert found == (expected, PROCESSES * rooms, expected + PROCESSES * rooms, PROCESSES * rooms)
    began = time.monotonic()
    check_database(dsn)
    return Told(done, commits, complaints, took, time.monotonic() - began)


def main() -> None:
    """Be one of the processes, or run all of them and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=int, default=200, help="of each process")
    parser.add_argument("--children", type=int, default=20_000, help="of all processes")
    parser.add_argument("--work", nargs=4, metavar=("DSN", "NAME", "ROOMS", "CHILDREN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.work is not None:
        dsn, name, rooms, children = options.work
        trio.run(work, dsn, name, int(rooms), int(children))
        return
    with PostgresCluster(settings={"fsync": "on", "full_page_writes": "on"}) as cluster:
        told = run_all(cluster.create_database(), options.rooms, options.children)
    print(
        f"{PROCESSES} processes, {options.rooms} rooms each, {told.children:,} child Runs: {told.seconds:.1f} s,"
        f" {told.commits:,} commits; checked in {told.check_seconds:.1f} s"
    )
    print(told.complaints or "no complaints")


if __name__ == "__main__":
    main()
