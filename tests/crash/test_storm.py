"""A few moments of the storm; `python -m tests.crash.storm` has more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.crash.storm import Job, moments

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.crash]

MOMENTS = 5
SEED = 0.11


def test_interrupted_at_any_moment_the_job_leaves_nothing_behind(tmp_path: Path) -> None:
    job = Job(tmp_path)
    duration = job.prepare()
    codes = [job.interrupt(moment) for moment in moments(MOMENTS, SEED, duration)]

    assert 130 in codes


def test_killed_at_any_moment_the_job_is_named_at_the_next_opening(tmp_path: Path) -> None:
    """R-13: what was running is orphaned, without a witness, and whoever came too early was refused."""
    job = Job(tmp_path)
    duration = job.prepare()
    cut_off = [job.kill(moment) for moment in moments(MOMENTS, SEED, duration)]

    assert any(cut_off)
