"""A real process that owns a Job is killed between two of its stages, and the file says what can be proved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from spindel.errors import SchemaError
from spindel.ids import WitnessStage, witness_id
from spindel.jobs import JobView, get_job, list_jobs, observe_settlement
from spindel.runs import Presence, SettlementReport, WitnessFact, open_reader, open_room
from spindel.store import RunRecord, RunStatus, SqliteStore

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.crash, pytest.mark.slow]

# Its callbacks say in a file of their own, synced, that they were entered and that they are about to return.
PROGRAM = """
import os, signal, sys
import trio
from spindel.errors import RunWaiting
from spindel.jobs import Observation, start_job
from spindel.runs import Finishing, open_room
from spindel.testing import Steps
from uuid import UUID

path, log, point = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def say(what):
    with open(log, "a") as file:
        file.write(what + "\\n")
        file.flush()
        os.fsync(file.fileno())
    if what == point:
        die()

def callback(name):
    async def call(outcome):
        say(f"{name} entered")
        await trio.lowlevel.checkpoint()
        say(f"{name} returns")
    return call

async def work(run):
    say("work entered")
    await trio.lowlevel.checkpoint()
    if point == "waiting":
        raise RunWaiting("approval")
    return "value"

async def store_nothing(self, **facts):
    die()

def release_and_die(self):
    release(self)
    die()

release = Finishing.release_lease

async def main():
    if point == "core acknowledged":
        Finishing.store_outcome = store_nothing
    if point == "adapter acknowledged":
        Finishing.release_lease = lambda self: die()
    if point == "released":
        Finishing.release_lease = release_and_die
    if point.isdigit():
        steps = Steps(int(point))
        trio.lowlevel.add_instrument(steps)
        steps.arm(die)
    async with open_room(path, name="main") as room:
        observation = Observation(UUID(int=1), UUID(int=2), lambda outcome: UUID(int=3))
        job = await start_job(
            room, work, key="k", before_finish=callback("core"), on_settled=callback("adapter"), observation=observation
        )
        await job.outcome()
        say("settled")
        if point == "waiting":
            die()

trio.run(main)
"""


def run(path: Path, point: str) -> tuple[int, list[str]]:
    """Run the program until it is killed at that point. Gives its exit code and what its callbacks said."""
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(log), point],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    return done.returncode, log.read_text().splitlines() if log.exists() else []


async def rows_of(path: Path) -> list[RunRecord]:
    async with open_reader(path, name="main") as reader:
        return list((await reader.list_runs(limit=100)).runs)


async def reopen(path: Path) -> tuple[JobView, SettlementReport]:
    """See the only Job as the next owner of its room does, twice, since nothing may change it any more."""
    seen = []
    for _ in range(2):
        async with open_room(path, name="main") as room:
            assert room.live() == ()
            assert room.held() == ()
            (listed,) = (await list_jobs(room)).jobs
            view = await get_job(room, listed.id)
            assert view == listed
            seen.append((view, await observe_settlement(room, view.id)))
    assert seen[0] == seen[1]
    async with SqliteStore(path, read_only=True) as store:
        checked = await store.check()
    assert checked.ok, checked.findings
    return seen[0]


def facts(report: SettlementReport) -> tuple[WitnessFact, WitnessFact, WitnessFact, bool]:
    assert (report.lease, report.owner) == (Presence.ABSENT, Presence.ABSENT)
    return report.family, report.core, report.adapter, report.settled


@pytest.mark.parametrize("point", ["settled", "released", "adapter acknowledged"])
async def test_killed_with_all_its_evidence_it_is_settled(tmp_path: Path, point: str) -> None:
    """J-38: killed once settled, or after the adapter's witness was stored: settled for every later owner."""
    code, said = run(tmp_path / "jobs.db", point)
    view, report = await reopen(tmp_path / "jobs.db")

    assert code == -signal.SIGKILL
    assert said[:5] == ["work entered", "core entered", "core returns", "adapter entered", "adapter returns"]
    assert (view.status, view.settled, view.result_state) == (RunStatus.COMPLETED, True, "available")
    assert facts(report) == (WitnessFact.VALID, WitnessFact.VALID, WitnessFact.VALID, True)


@pytest.mark.parametrize("point", ["work entered", "core entered", "core returns"])
async def test_killed_before_core_is_acknowledged_it_is_an_orphan(tmp_path: Path, point: str) -> None:
    """J-39: killed before the core witness, even with the callback over: orphaned, unsettled for ever, not called."""
    code, said = run(tmp_path / "jobs.db", point)
    view, report = await reopen(tmp_path / "jobs.db")

    assert code == -signal.SIGKILL
    assert said[-1] == point
    assert (view.status, view.reason, view.settled) == (RunStatus.FAILED, "orphaned", False)
    assert (view.result_state, view.scorecard) == ("unavailable", None)
    assert facts(report) == (WitnessFact.ABSENT, WitnessFact.ABSENT, WitnessFact.ABSENT, False)


async def test_killed_before_its_outcome_is_stored_it_keeps_the_evidence_of_its_core(tmp_path: Path) -> None:
    """J-39: killed with core acknowledged and no outcome: orphaned, unsettled for ever, with the two witnesses it has."""
    code, said = run(tmp_path / "jobs.db", "core acknowledged")
    view, report = await reopen(tmp_path / "jobs.db")

    assert code == -signal.SIGKILL
    assert said == ["work entered", "core entered", "core returns"]
    assert (view.status, view.reason, view.settled) == (RunStatus.FAILED, "orphaned", False)
    assert view.result_state == "unavailable"
    assert facts(report) == (WitnessFact.VALID, WitnessFact.VALID, WitnessFact.ABSENT, False)


@pytest.mark.parametrize("point", ["adapter entered", "adapter returns"])
async def test_killed_before_the_adapter_is_acknowledged_it_stays_unknown(tmp_path: Path, point: str) -> None:
    """J-40: killed before the adapter's witness it keeps its outcome, has no lease or owner, and never settles."""
    code, said = run(tmp_path / "jobs.db", point)
    view, report = await reopen(tmp_path / "jobs.db")

    assert code == -signal.SIGKILL
    assert said[-1] == point
    assert (view.status, view.reason, view.settled, view.stage) == (RunStatus.COMPLETED, None, False, None)
    assert view.result_state == "available"
    assert facts(report) == (WitnessFact.VALID, WitnessFact.VALID, WitnessFact.ABSENT, False)


async def test_killed_after_it_waited_it_goes_on_waiting(tmp_path: Path) -> None:
    """J-41: a waiting Job had reached done; killed, its row still waits, with two witnesses, and isn't settled."""
    code, said = run(tmp_path / "jobs.db", "waiting")
    view, report = await reopen(tmp_path / "jobs.db")

    assert code == -signal.SIGKILL
    assert said[-1] == "settled"
    assert (view.status, view.reason, view.settled, view.result_state) == (RunStatus.WAITING, "approval", False, None)
    assert facts(report) == (WitnessFact.VALID, WitnessFact.VALID, WitnessFact.ABSENT, False)


def check_evidence(row: RunRecord, said: list[str]) -> None:
    """Check that the row claims nothing that the callbacks didn't say before."""
    if row.job_core_cleanup_ack is not None:
        assert "core returns" in said
        assert row.job_core_cleanup_ack == witness_id(WitnessStage.CORE_CLEANUP, row.id)
        assert row.family_return_ack == witness_id(WitnessStage.FAMILY_RETURN, row.id)
    if row.status is RunStatus.COMPLETED:
        assert row.job_core_cleanup_ack is not None
    if "adapter entered" in said:
        assert row.status is RunStatus.COMPLETED
    if row.job_adapter_cleanup_ack is not None:
        assert "adapter returns" in said
        assert row.job_adapter_cleanup_ack == witness_id(WitnessStage.ADAPTER_CLEANUP, row.id)
    if "settled" in said:
        assert row.job_adapter_cleanup_ack is not None
    assert len(said) == len(set(said)), "a callback was entered twice"


async def test_killed_after_any_step_the_file_claims_no_more_than_was_done(tmp_path: Path) -> None:
    """J-38, J-39, J-40: wherever it is killed, witnesses are there only for what had returned; nothing is called again."""
    path = tmp_path / "jobs.db"
    ends: set[tuple[str, bool]] = set()
    for step in count(5, 2):
        code, said = run(path, str(step))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        rows: list[RunRecord] = []
        # It may have been killed before there was a file, or before there was anything in it.
        with suppress(SchemaError):
            rows = await rows_of(path)
        if rows:
            (row,) = rows
            check_evidence(row, said)
            view, report = await reopen(path)
            assert report.settled == (row.job_adapter_cleanup_ack is not None)
            assert view.status is (RunStatus.FAILED if row.status is RunStatus.RUNNING else row.status)
            ends.add((view.status, view.settled))
        else:
            assert said == []
        path.unlink(missing_ok=True)

    assert ends == {("failed", False), ("completed", False), ("completed", True)}
