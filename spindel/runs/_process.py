"""Processes as launches: a session of its own, and joined as a group.

Trio's own `run_process` ends the process that it started. Whatever that one started lives on, unless it happened to
be told. So a process gets a session of its own, signals go to the whole group, and the call returns when nothing of
the group is left. Processes live in real time, so the grace is counted in a thread, not on Trio's clock, which a
test may have stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import trio

from spindel.errors import InvalidRecordError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["run_process"]

_log: Final = logging.getLogger("spindel.runs")
_POLL_SECONDS: Final = 0.01
_PROC: Final = Path("/proc")


@attrs.define
class _Started:
    """Stands where a nursery's task status would, to learn the process before it ends."""

    process: trio.Process | None = None

    def started(self, value: trio.Process | None = None) -> None:
        self.process = value


async def run_process(
    command: Sequence[str | os.PathLike[str]],
    *,
    stdin: bytes,
    capture_stdout: bool,
    capture_stderr: bool,
    check: bool,
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    grace_seconds: float,
) -> subprocess.CompletedProcess[bytes]:
    """See `Run.run_process`."""
    if not command:
        raise InvalidRecordError("command", "it is empty; give a program and its arguments")
    status = _Started()
    # One of its own: ending a process must not wait until somebody else's thread is back.
    limiter = trio.CapacityLimiter(1)

    async def end(process: trio.Process) -> None:
        await trio.to_thread.run_sync(_end_group, process.pid, grace_seconds, limiter=limiter)

    try:
        completed = await trio.run_process(
            command,
            stdin=stdin,
            capture_stdout=capture_stdout,
            capture_stderr=capture_stderr,
            check=False,
            deliver_cancel=end,
            task_status=status,
            cwd=cwd,
            env=env,
            start_new_session=sys.platform != "win32",
        )
    finally:
        # What the process left behind in its group is the Run's too, however the process itself ended.
        if status.process is not None and _is_group_alive(status.process.pid):
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_end_group, status.process.pid, grace_seconds, limiter=limiter)
    if check:
        completed.check_returncode()
    return completed


if sys.platform == "win32":

    def _end_group(pid: int, grace_seconds: float) -> None:
        del grace_seconds
        # TerminateProcess is all there is without a job object; trio waits for the process itself.
        os.kill(pid, signal.SIGTERM)

    def _is_group_alive(pid: int) -> bool:
        del pid
        return False

else:

    def _end_group(pid: int, grace_seconds: float) -> None:
        """Ask the group to end, then make it. Runs in a thread, in real time."""
        patience = time.monotonic() + grace_seconds
        number = signal.SIGTERM
        while True:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                return
            except PermissionError:
                _log.warning("process group %d can't be ended: it runs as another user now", pid)
                return
            while _is_group_alive(pid):
                if number is signal.SIGTERM and time.monotonic() >= patience:
                    break
                time.sleep(_POLL_SECONDS)  # noqa: TID251  a thread waits for processes, which no clock of ours governs
            else:
                return
            number = signal.SIGKILL

    def _is_group_alive(pid: int) -> bool:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        # A zombie whose parent never reaps it still counts as a member; it has ended all the same.
        return not _PROC.is_dir() or any(_is_running_member(path, pid) for path in _PROC.glob("[0-9]*/stat"))

    def _is_running_member(path: Path, group: int) -> bool:
        try:
            # The command name stands in parentheses and may hold anything, so read from the last one on.
            fields = path.read_bytes().rpartition(b")")[2].split()
        except OSError:
            return False
        return int(fields[2]) == group and fields[0] not in (b"Z", b"X")
