"""Throw-away servers: quick, ordinary, and gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import spindel
from spindel.testing import postgres as postgres_module
from spindel.testing.postgres import PostgresCluster, find_server_binaries
from tests.testing.test_plugin import run_suite

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


def test_a_server_is_reached_by_its_socket_alone_and_is_gone_afterwards() -> None:
    with PostgresCluster() as cluster:
        folder, pid = cluster.folder, cluster.pid
        dsn = cluster.create_database()
        with psycopg.connect(dsn) as session:
            session.execute("CREATE TABLE there ()")
            listening = session.execute("SHOW listen_addresses").fetchone()
        copy = cluster.create_database(dsn)
        with psycopg.connect(copy) as session:
            session.execute("SELECT FROM there")
        cluster.drop_database(copy)
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(copy)
        owner = (folder / "data").stat().st_uid

    assert listening == ("",)
    assert owner != 0, "no server runs as root"
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="no server"):
        _ = cluster.pid


def test_a_server_that_was_killed_or_stopped_starts_again_with_what_was_committed() -> None:
    with PostgresCluster(settings={"max_connections": "7"}) as cluster:
        dsn = cluster.create_database()
        with psycopg.connect(dsn) as session:
            session.execute("CREATE TABLE there (number int)")
        for end in (cluster.kill, cluster.stop):
            with psycopg.connect(dsn) as session:
                session.execute("INSERT INTO there VALUES (1)")
            end()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(dsn)
            cluster.start()
        with psycopg.connect(dsn) as session:
            count = session.execute("SELECT count(*) FROM there").fetchone()
            allowed = session.execute("SHOW max_connections").fetchone()

    assert count == (2,)
    assert allowed == ("7",)


KILLED = """
import os, signal
from spindel.testing.postgres import PostgresCluster
cluster = PostgresCluster().__enter__()
print(cluster.folder, cluster.pid, cluster._keeper.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_when_the_process_that_asked_for_it_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(spindel.__file__).parents[1])},
    )
    folder, server, keeper = done.stdout.split()
    # They are nobody's children now, so their end is waited for by what the system tells of them.
    for pid in (int(keeper), int(server)):
        _wait_for_end(pid)

    assert done.returncode == -signal.SIGKILL
    assert not Path(folder).exists()


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor) as process:
        # Readable once it has ended.
        import select  # noqa: PLC0415  here alone

        select.select([process], [], [], 30)


def test_a_server_that_can_t_start_shows_the_end_of_its_log() -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"), PostgresCluster(settings={"no_such_setting": "1"}):
        pass


def test_debian_s_newest_version_is_found_off_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in ("9", "15", "main", "14"):
        (tmp_path / version / "bin").mkdir(parents=True)
        for program in ("initdb", "postgres"):
            (tmp_path / version / "bin" / program).touch()
    (tmp_path / "17" / "bin").mkdir(parents=True)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(postgres_module, "_DEBIAN", tmp_path)

    assert find_server_binaries() == tmp_path / "15" / "bin"


SUITE = """
import pytest
import spindel.testing.plugin as plugin
from spindel.testing import postgres

{missing}

def test_one(postgres_store):
    assert postgres_store.place.startswith("postgresql://")

def test_two(postgres_dsn, postgres_pool):
    with postgres_pool.lend() as another:
        assert another() != postgres_dsn
"""
MISSING = "plugin.find_server_binaries = postgres.find_server_binaries = lambda: None"


def test_fixtures_bring_a_server_to_a_user_s_suite(tmp_path: Path) -> None:
    done = run_suite(tmp_path, SUITE.format(missing=""), "-p", "no:trio")

    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_without_a_server_tests_are_skipped_in_one_line(tmp_path: Path) -> None:
    done = run_suite(tmp_path, SUITE.format(missing=MISSING), "-p", "no:trio", "-rs")
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]

    assert len(lines) == 1
    assert "[2]" in lines[0]
    assert "apt-get install postgresql" in lines[0]


def test_without_a_server_tests_fail_where_one_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = "import os\nos.environ['SPINDEL_REQUIRE_POSTGRES'] = '1'\n" + SUITE.format(missing=MISSING)
    done = run_suite(tmp_path, suite, "-p", "no:trio")

    assert "2 errors" in done.stdout
    assert "this machine has no PostgreSQL server" in done.stdout
