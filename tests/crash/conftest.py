"""What the tests of cut connections need of the machine: a server of their own, other hosts, a network."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.crash.network import Cable

if TYPE_CHECKING:
    from collections.abc import Iterator


def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def other_host() -> list[str]:
    """A command in front of the program with `--host`: it then takes itself to be on another machine."""
    if os.geteuid() != 0 or not _works("unshare", "--uts", "true"):
        pytest.skip("needs root and unshare, for a process that takes itself to be on another machine")
    return ["unshare", "--uts"]


@pytest.fixture
def cable() -> Iterator[Cable]:
    """A cable between this machine's network and one in a namespace, which can be cut."""
    if os.geteuid() != 0 or not _works("unshare", "--net", "ip", "link", "add", "type", "veth"):
        pytest.skip("needs root, unshare and ip (iproute2) with veth, for a client in a network of its own")
    with Cable() as made:
        yield made
