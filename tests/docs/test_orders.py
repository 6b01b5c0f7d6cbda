"""The example whose cleanup fails at random, driven to its end by its operator: two real processes and a real file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from docs.examples.orders import Shop
from spindel.jobs import list_jobs
from spindel.runs import open_room
from spindel.store import RunStatus
from tests.cli.commands import DEADLINE_SECONDS, ENVIRONMENT, ROOT, Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts an example on a folder."""
    started: list[subprocess.Popen[str]] = []

    def start_example(name: str, *options: str) -> Command:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), str(tmp_path), *options],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return Command(process)

    yield start_example
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_SECONDS)


def first_calls_that_fail(folder: Path, orders: int) -> int:
    shop = Shop(folder, orders, failures=0.5, seed=0)
    return sum(shop.draw(number, what, 1) < shop.failures for number in range(orders) for what in ("clear", "tell"))


async def test_the_operator_sees_to_all_that_failed_and_the_service_ends_settled(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    service = start("orders.py", "--orders", "40")
    service.err.wait_line("open: ")
    operator = start("orders_operator.py").finish()
    ended = service.finish()
    async with open_room(tmp_path / "orders.db", name="shop") as room:
        jobs = (await list_jobs(room, limit=100)).jobs
    told = (tmp_path / "told.txt").read_text().split()

    assert (operator.code, ended.code) == (0, 0)
    assert ended.out == "40 orders settled (38 completed, 2 failed), 0 given up\n"
    assert f"\n{first_calls_that_fail(tmp_path, 40)} passed in " in operator.out
    assert operator.out.endswith("40 Runs; every Job has its witnesses: True; every invariant holds: True\n")
    # What the world says: each place is free, and each customer was told exactly once.
    assert list((tmp_path / "bench").iterdir()) == []
    assert sorted(told) == sorted(str(job.id) for job in jobs)
    assert len(jobs) == 40
    assert all(job.settled for job in jobs)
    assert sum(job.status is RunStatus.FAILED for job in jobs) == 2
    assert not (tmp_path / "door").exists()


async def test_a_signal_closes_the_service_once_what_is_held_is_settled(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    service = start("orders.py", "--orders", "3", "--failures", "1")
    service.err.wait_line("0 of 3 settled, 3 held")
    service.process.send_signal(signal.SIGTERM)
    service.err.wait_line("can't close yet: 3 held")
    named = [service.err.wait_line("  order ") for _ in range(3)]
    operator = start("orders_operator.py").finish()
    ended = service.finish()

    assert all(" at core: " in line for line in named)
    assert (operator.code, ended.code) == (0, 128 + signal.SIGTERM)
    assert ended.out == "3 orders settled (3 completed), 0 given up\n"


async def test_a_second_signal_gives_up_what_is_held_and_the_file_says_so(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    service = start("orders.py", "--orders", "3", "--failures", "1")
    service.err.wait_line("0 of 3 settled, 3 held")
    service.process.send_signal(signal.SIGINT)
    service.err.wait_line("can't close yet: 3 held")
    service.process.send_signal(signal.SIGINT)
    ended = service.finish()
    operator = start("orders_operator.py").finish()

    assert (ended.code, ended.out) == (3, "0 orders settled (none), 3 given up\n")
    assert operator.code == 3
    assert operator.out.endswith("3 Runs; every Job has its witnesses: False; every invariant holds: True\n")
