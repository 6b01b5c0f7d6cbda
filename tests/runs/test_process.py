"""Processes: a session of their own, ended as a group, and nothing of them left in the process table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.clock import foreign_work
from spindel.errors import InvalidRecordError, RunFailedError
from spindel.runs import LaunchKind, LaunchState, Run, observe_settlement, open_room
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from subprocess import CompletedProcess

    from spindel.testing.sweep import Steps
    from tests.conftest import Sweep

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to look for what is left")

MARK = "SPINDEL_TEST_PROCESS"
GRACE_SECONDS = 0.05

# A grandchild that ignores TERM, and says so once it does.
DEAF_GRANDCHILD = """sh -c 'trap "" TERM; echo grandchild > "$FIFO"; exec sleep 1000' &"""
# A leader that ignores it as well, and stays.
DEAF_LEADER = """trap "" TERM; echo leader > "$FIFO"; exec sleep 1000"""


@attrs.frozen
class Processes:
    """Finds what was started with this test's mark, and hears from it through a named pipe."""

    mark: str
    fifo: Path
    stream: trio.lowlevel.FdStream

    @property
    def env(self) -> Mapping[str, str]:
        return {MARK: self.mark, "FIFO": str(self.fifo), "PATH": os.environ["PATH"]}

    async def hear(self, *expected: str) -> None:
        """Wait until each of these was said, in whatever order."""
        left, heard = set(expected), b""
        while left:
            heard += await self.stream.receive_some()
            left -= set(heard.decode().split())

    def left(self) -> dict[int, str]:
        """Give the marked processes that still run, by pid; the dead who wait to be counted don't."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() not in (folder / "environ").read_bytes():
                    continue
                state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
                if state not in (b"Z", b"X"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found


@pytest.fixture
async def processes(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Processes]:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Open for both, so that it never ends while nobody writes.
    stream = trio.lowlevel.FdStream(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
    found = Processes(f"{os.getpid()}-{request.node.name}", fifo, stream)
    yield found
    await stream.aclose()
    # A test that failed must not leave anything behind either.
    for pid in found.left():
        os.kill(pid, signal.SIGKILL)


async def shell(run: Run[Any], script: str, processes: Processes, **options: Any) -> CompletedProcess[bytes]:
    options.setdefault("grace_seconds", GRACE_SECONDS)
    return await run.run_process(["sh", "-c", script], env=processes.env, **options)


async def run_shell(
    run: Run[CompletedProcess[bytes]], script: str, processes: Processes, options: dict[str, Any]
) -> CompletedProcess[bytes]:
    return await shell(run, script, processes, **options)


def is_open(run: Run[Any]) -> bool:
    try:
        run.outcome_nowait()
    except trio.WouldBlock:
        return True
    return False


# -- what it gives ---------------------------------------------------------------------------------------------------


async def test_input_and_output_are_carried(processes: Processes, tmp_path: Path) -> None:
    """R-76: what it reads, what it says on both outputs, where it runs and its environment are the caller's."""
    script = f'cat; pwd; echo "${MARK}" >&2'
    options = {"stdin": b"in\n", "capture_stdout": True, "capture_stderr": True, "cwd": tmp_path}
    async with open_room(name="r") as room:
        done = await (await room.start(run_shell, script, processes, options)).result()
        busy = foreign_work().count

    assert done.returncode == 0
    assert done.stdout == f"in\n{tmp_path}\n".encode()
    assert done.stderr == f"{processes.mark}\n".encode()
    assert busy == 0


async def test_a_process_has_a_session_of_its_own(processes: Processes) -> None:
    """R-76: signals of this process's terminal don't reach it, and its group is its own."""
    program = "import os; print(os.getsid(0) == os.getpgrp() == os.getpid())"

    async def body(run: Run[bytes]) -> bytes:
        done = await run.run_process([sys.executable, "-c", program], capture_stdout=True, env=processes.env)
        return done.stdout

    async with open_room(name="r") as room:
        assert await (await room.start(body)).result() == b"True\n"


@pytest.mark.parametrize("check", [True, False])
async def test_an_exit_that_is_not_zero_is_an_error_or_a_fact(processes: Processes, check: bool) -> None:
    """R-76: checked, it raises with code and output; unchecked, the code is in the result."""
    async with open_room(name="r") as room:
        options = {"check": check, "capture_stdout": True}
        run = await room.start(run_shell, "echo out; exit 3", processes, options)
        if check:
            with pytest.raises(RunFailedError) as caught:
                await run.result()
            error = caught.value.__cause__
            assert isinstance(error, subprocess.CalledProcessError)
            done: Any = error
        else:
            done = await run.result()

    assert (done.returncode, done.stdout) == (3, b"out\n")


async def test_a_program_that_does_not_exist_is_an_os_error(processes: Processes) -> None:
    """R-76: nothing was started, nothing is left, the Run may go on."""

    async def body(run: Run[str]) -> str:
        with pytest.raises(FileNotFoundError):
            await run.run_process(["no-such-program-here"], env=processes.env)
        return "went on"

    async with open_room(name="r") as room:
        value = await (await room.start(body)).result()
        busy, launches = foreign_work().count, dict(room.pool.launches)

    assert value == "went on"
    assert (busy, launches) == (0, {})


# -- how it ends -----------------------------------------------------------------------------------------------------


async def test_a_cancelled_process_is_asked_to_end(processes: Processes) -> None:
    """R-76: cancelled, the group gets TERM, and one that listens cleans up by itself, however long the grace is."""
    script = """trap 'echo cleaned > "$FIFO"; exit 0' TERM; echo ready > "$FIFO"; while :; do sleep 0.01; done"""
    async with open_room(name="r") as room:
        run = await room.start(run_shell, script, processes, {"grace_seconds": 1_000})
        await processes.hear("ready")
        run.cancel()
        await run.wait_returned()
        left = processes.left()
        await processes.hear("cleaned")

        assert run.outcome_nowait().status is RunStatus.CANCELLED
        assert left == {}


@pytest.mark.parametrize(
    "script",
    [
        f"{DEAF_GRANDCHILD} {DEAF_LEADER}",
        f"{DEAF_GRANDCHILD} echo leader > $FIFO; exec sleep 1000",
        f"{DEAF_GRANDCHILD} ({DEAF_GRANDCHILD} {DEAF_LEADER}) & wait",
    ],
    ids=["both are deaf", "only the grandchild is deaf", "three generations"],
)
async def test_what_ignores_the_request_is_killed_with_its_whole_group(processes: Processes, script: str) -> None:
    """R-76: after the grace the group is killed, down to grandchildren whose parent has already gone."""
    async with open_room(name="r") as room:
        run = await room.start(run_shell, script, processes, {})
        await processes.hear("leader", "grandchild")
        before = processes.left()
        run.cancel()
        await run.wait_returned()
        left = processes.left()

        assert len(before) >= 2
        assert left == {}
        assert run.outcome_nowait().status is RunStatus.CANCELLED


async def test_what_a_process_leaves_behind_is_ended_with_it(processes: Processes) -> None:
    """R-76: a process that ended well, and left a child running, is over when that child is."""
    deaf = """sh -c 'trap "" TERM; : > "$FIFO.deaf"; exec sleep 1000' &"""
    script = f'{deaf} until [ -e "$FIFO.deaf" ]; do sleep 0.01; done'
    async with open_room(name="r") as room:
        done = await (await room.start(run_shell, script, processes, {})).result()
        left = processes.left()

    assert done.returncode == 0
    assert left == {}


async def test_a_grandchild_that_keeps_the_output_open_is_ended_by_a_cancel(processes: Processes) -> None:
    """R-76: while somebody of the group holds the captured output the call waits; a cancel ends them all."""
    async with open_room(name="r") as room:
        run = await room.start(run_shell, DEAF_GRANDCHILD, processes, {"capture_stdout": True})
        await processes.hear("grandchild")
        await wait_all_tasks_blocked()
        open_before = is_open(run)
        run.cancel()
        await run.wait_returned()
        left = processes.left()

    assert open_before
    assert left == {}


async def test_closing_the_room_ends_its_processes(processes: Processes) -> None:
    """R-16, R-76: `close` cancels and waits, and nothing of the process is left when it returns."""
    async with open_room(name="r") as room:
        run = await room.start(run_shell, f"{DEAF_GRANDCHILD} {DEAF_LEADER}", processes, {})
        await processes.hear("leader", "grandchild")
        await room.close()
        left = processes.left()

        assert left == {}
        assert run.outcome_nowait().reason == "room-closing"


@pytest.mark.parametrize("cancel", [True, False])
async def test_a_process_is_ended_while_trios_limiter_is_exhausted(processes: Processes, cancel: bool) -> None:
    """R-48, R-76: ending a group, cancelled or what an ended leader left of it, waits for nobody else's thread."""
    limiter = trio.to_thread.current_default_thread_limiter()
    leader = DEAF_LEADER if cancel else """echo leader > "$FIFO"; until [ -e "$FIFO.go" ]; do sleep 0.01; done"""
    async with open_room(name="r") as room:
        run = await room.start(run_shell, f"{DEAF_GRANDCHILD} {leader}", processes, {})
        await processes.hear("leader", "grandchild")
        borrowers = [object() for _ in range(int(limiter.available_tokens))]
        for borrower in borrowers:
            limiter.acquire_on_behalf_of_nowait(borrower)
        if cancel:
            run.cancel()
        else:
            processes.fifo.with_name("fifo.go").touch()
        with trio.move_on_after(20):
            await run.wait_returned()
        returned, left = not is_open(run), processes.left()
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)

    assert returned
    assert left == {}


async def test_a_process_is_a_launch_of_its_run(processes: Processes) -> None:
    """R-76: it is seen while it runs, a Run waits for one that somebody else started for it, and then it is gone."""
    stop = trio.Event()

    async def wait(_: Run[None]) -> None:
        await stop.wait()

    async with open_room(name="r") as room, trio.open_nursery() as nursery:
        run = await room.start(wait)
        script = """echo ready > "$FIFO"; exec sleep 1000"""
        nursery.start_soon(shell, run, script, processes)
        await processes.hear("ready")
        (facts,) = (await observe_settlement(room, run.id)).launches
        busy = foreign_work().count
        stop.set()
        await wait_all_tasks_blocked()
        open_before = is_open(run)
        nursery.cancel_scope.cancel()

    assert (facts.kind, facts.state) == (LaunchKind.NATIVE, LaunchState.RUNNING)
    assert busy == 1
    assert open_before
    assert room.pool.launches == {}
    assert run.outcome_nowait().status is RunStatus.COMPLETED
    assert processes.left() == {}


async def test_wherever_it_is_cancelled_nothing_is_left(processes: Processes, sweep: Sweep) -> None:
    """R-76: cancelled after any step of its start, its life and its end, no process stays."""
    script = f"{DEAF_GRANDCHILD} cat"
    ends: set[str] = set()

    async def scenario(steps: Steps) -> None:
        async def body(run: Run[None]) -> None:
            steps.arm(run.cancel)
            await shell(run, script, processes, stdin=b"x" * 100, grace_seconds=0.0)

        async with open_room(name="r") as room:
            run = await room.start(body)
            await run.wait_returned()
            ends.add(run.outcome_nowait().status.value)
            left = processes.left()

            assert left == {}
            assert foreign_work().count == 0

    assert await sweep(scenario) > 5
    assert ends == {"cancelled", "completed"}


async def test_empty_command_is_refused() -> None:
    async def main(run: Run[Any]) -> None:
        await run.run_process([])

    async with open_room(name="r") as room:
        run = await room.start(main)
        with pytest.raises(RunFailedError) as failed:
            await run.result()

    assert isinstance(failed.value.__cause__, InvalidRecordError)
    assert str(failed.value.__cause__) == "command: it is empty; give a program and its arguments"
