"""A network of its own for a process, at the other end of a cable that can be cut without a word to either side."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

# Of the range for tests of networks, which is routed nowhere.
HERE: Final = "198.18.77.1"
THERE: Final = "198.18.77.2"


class Cable:
    """Joins this machine's network, as `HERE`, to one in a namespace, as `THERE`.

    The namespace is kept by a process that only waits. Whoever is cut off isn't told: what it sends is lost.
    """

    def __init__(self) -> None:
        self._near = f"spindel{os.getpid() % 10_000_000}"
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def inside(self) -> list[str]:
        """A command in front of another one, which is then run at the other end, on what it takes to be its machine."""
        assert self._keeper is not None, "the cable is there"
        return ["nsenter", f"--net=/proc/{self._keeper.pid}/ns/net", f"--uts=/proc/{self._keeper.pid}/ns/uts"]

    def __enter__(self) -> Self:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert self._keeper.stdout is not None
            assert self._keeper.stdout.readline() == b"\n"
            self._ip("link", "add", self._near, "type", "veth", "peer", "name", "there", "netns", str(self._keeper.pid))
            self._ip("address", "add", f"{HERE}/30", "dev", self._near)
            self._ip("link", "set", self._near, "up")
            self._run(*self.inside, "ip", "link", "set", "lo", "up")
            self._run(*self.inside, "ip", "address", "add", f"{THERE}/30", "dev", "there")
            self._run(*self.inside, "ip", "link", "set", "there", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._remove()

    def cut(self) -> None:
        """Lose whatever is sent from now on, in both directions."""
        self._ip("link", "set", self._near, "down")

    def mend(self) -> None:
        """Carry again what is sent."""
        self._ip("link", "set", self._near, "up")

    def _ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, check=False, capture_output=True, text=True)

        assert done.returncode == 0, (command, done.stderr)

    def _remove(self) -> None:
        # The namespace goes with its last process, and the cable with one of its ends; here at once, for the next test.
        subprocess.run(["ip", "link", "delete", self._near], check=False, capture_output=True)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.communicate()
