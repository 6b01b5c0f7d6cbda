"""Processes by identity: a pid alone names nobody, since the system gives it again.

A process is its pid, the tick of the machine's clock at which it started, and the id of the boot that this clock
belongs to. Where the system doesn't tell the latter two, it is unknown whether a recorded process still lives, and the
answer says so.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Final

import attrs

__all__ = ["ProcessIdentity", "current_process", "find_process", "host_name", "process_lives", "program_name"]

_PROC: Final = Path("/proc")
_START_FIELD: Final = 19
"""Where the start tick stands after the program's name, which may itself hold spaces and brackets."""


@attrs.frozen
class ProcessIdentity:
    """One process, for ever.

    Attributes:
        pid: its number while it lives.
        started: the clock tick of its start, or None where the system doesn't tell.
        boot: the id of the boot that the tick counts from, or None.
    """

    pid: int
    started: int | None
    boot: str | None


def current_process() -> ProcessIdentity:
    """Give the identity of this process."""
    found = find_process(os.getpid())
    return ProcessIdentity(os.getpid(), None, None) if found is None else found


def find_process(pid: int) -> ProcessIdentity | None:
    """Give the identity of the living process with this pid, or None if there is none, or no way to tell.

    A zombie has ended: it holds nothing any more and only waits to be counted.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    return ProcessIdentity(pid, int(fields[_START_FIELD]), boot)


def process_lives(identity: ProcessIdentity) -> bool | None:
    """Tell whether a recorded process still lives, or None if this machine can't know.

    A process of another boot may be one of this machine before it was started again, or one of another machine, which
    may well live.
    """
    here = current_process()
    if here.boot is None or identity.started is None or identity.boot != here.boot:
        return None
    return find_process(identity.pid) == identity


def host_name() -> str:
    """Give the name of this machine."""
    return socket.gethostname()


def program_name() -> str:
    """Give the short name of this program, never its arguments: those may hold secrets."""
    script = Path(sys.argv[0]).name if sys.argv else ""
    return script if script and not script.startswith("-") else Path(sys.executable).name
