"""Processes by identity."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import pytest

from spindel.process import ProcessIdentity, current_process, find_process, process_lives, program_name


def test_current_process_lives() -> None:
    here = current_process()

    assert here.pid == os.getpid()
    assert find_process(os.getpid()) == here
    assert process_lives(here) is True


@pytest.mark.slow
def test_process_that_ended_does_not_live_even_before_it_was_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = find_process(child.pid)
        assert identity is not None
        living = process_lives(identity)
        child.kill()
        # Waits for the end without counting it, so that a zombie is left.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        zombie = process_lives(identity)
    gone = process_lives(identity)

    assert (living, zombie, gone) == (True, False, False)


def test_same_pid_with_another_start_is_another_process() -> None:
    here = current_process()
    assert here.started is not None

    assert process_lives(attrs.evolve(here, started=here.started + 1)) is False


def test_process_of_another_boot_or_of_unknown_start_is_unknown() -> None:
    here = current_process()

    assert process_lives(attrs.evolve(here, boot="another")) is None
    assert process_lives(ProcessIdentity(here.pid, None, None)) is None


def test_program_name_never_shows_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/serve.py", "--password=secret"])
    script = program_name()
    monkeypatch.setattr(sys, "argv", ["-c", "--password=secret"])
    command = program_name()

    assert script == "serve.py"
    assert command == os.path.basename(sys.executable)  # noqa: PTH119  as text, as the system gives it
