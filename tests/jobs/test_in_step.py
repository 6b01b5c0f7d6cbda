"""Jobs beside each other share their commits: what a Job costs the disk, counted and not timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from spindel.jobs import start_job
from spindel.runs import open_room
from spindel.store import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

    from spindel.runs import Run

WRITES = 4
TASKS = 50
JOBS = 4


@pytest.mark.parametrize("executor", ["thread", "inline"])
async def test_jobs_that_follow_each_other_take_as_many_commits_as_one_beside_none(
    tmp_path: Path, executor: Any
) -> None:
    """Each task has its next Job in the very batch in which the others have theirs, again and again."""

    async def work(_: Run[None]) -> None:
        pass

    async def start_some() -> None:
        for _ in range(JOBS):
            await (await start_job(room, work)).outcome()

    async with SqliteStore(tmp_path / "jobs.db", executor=executor) as store, open_room(store, name="main") as room:
        before = store.commits
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(start_some)
        commits = store.commits - before

    # One more if the first hand-over met the tasks in the middle of their first tick.
    assert WRITES * JOBS <= commits <= WRITES * JOBS + 1
