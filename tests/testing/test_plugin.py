"""The fixtures that a user's own suite gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import spindel

SUITE = """
import pytest
import trio

from spindel.store import MemoryStore, SqliteStore
from spindel.testing.clocks import START_MICROS


def test_memory_store(memory_store):
    assert type(memory_store) is MemoryStore


def test_sqlite_store(sqlite_store, tmp_path):
    async def rooms():
        async with sqlite_store as store:
            return await store.list_rooms()

    assert type(sqlite_store) is SqliteStore
    assert trio.run(rooms) == ()
    assert list(tmp_path.iterdir())


def test_wall_clock_alone(wall_clock):
    assert wall_clock.now_micros() == START_MICROS
"""

TRIO_SUITE = """
import trio

from spindel.store import MemoryStore
from spindel.testing.clocks import START_MICROS
from spindel.testing.store_contract import StoreContract
import pytest


async def test_clocks_go_together(wall_clock, spindel_clock):
    await trio.sleep(3600)

    assert wall_clock.now_micros() == START_MICROS + 3_600_000_000


class TestMine(StoreContract):
    @pytest.fixture
    def reopen(self):
        store = MemoryStore()
        return lambda: store


class Forgetful(MemoryStore):
    async def load_run(self, room, run_id):
        return None


class TestForgetful(StoreContract):
    @pytest.fixture
    def reopen(self):
        store = Forgetful()
        return lambda: store
"""


def run_suite(folder: Path, suite: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(suite)
    # The entry point is there only where spindel is installed; loaded by hand, it is there once in any case.
    command = [sys.executable, "-m", "pytest", "-p", "no:spindel", "-p", "spindel.testing.plugin", "-W", "error"]
    return subprocess.run(
        [*command, "-q", "--no-header", "-p", "no:cacheprovider", *options, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(Path(spindel.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.slow
def test_fixtures_serve_a_suite_without_pytest_trio(tmp_path: Path) -> None:
    done = run_suite(tmp_path, SUITE, "-p", "no:trio")

    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_fixtures_and_the_contract_serve_a_suite_with_pytest_trio(tmp_path: Path) -> None:
    """A user's store is held to the suite without any setting, and a wrong one fails it, with the values shown."""
    done = run_suite(tmp_path, SUITE + TRIO_SUITE, "-o", "trio_mode=true")

    assert "has no run" in done.stdout
    assert "TestForgetful::test_admitted_run_is_read_as_it_was_written" in done.stdout
    assert "TestMine::" not in done.stdout
    assert "test_clocks_go_together" not in done.stdout


@pytest.mark.slow
def test_the_contract_marks_its_own_tests(tmp_path: Path) -> None:
    suite = TRIO_SUITE.replace("async def test_clocks", "@pytest.mark.trio\nasync def test_clocks")
    done = run_suite(tmp_path, "import pytest\n" + suite)

    assert "TestForgetful::" in done.stdout
    assert "TestMine::" not in done.stdout
    assert "test_clocks_go_together" not in done.stdout
