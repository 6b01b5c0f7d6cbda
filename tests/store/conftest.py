"""What the tests of stores on disk share: a disk that fails on demand, ordinary users, and whole folders as values."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import apsw
import attrs
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
ORDINARY_USER = 65534


class FailingFile(apsw.VFSFile):
    def __init__(self, disk: FailingDisk, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk

    def xSync(self, flags: int) -> None:  # noqa: N802  SQLite's name
        if self._disk.fails_sync():
            raise apsw.IOError("the sync failed")
        super().xSync(flags)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802  as above
        if self._disk.writes_fail:
            raise apsw.FullError("no room is left")
        super().xWrite(data, offset)


class FailingDisk(apsw.VFS):
    """A disk whose next syncs, or whose writes, fail as a test says."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.name = name
        self.syncs = 0
        self.syncs_to_fail = 0
        self.writes_fail = False

    def fails_sync(self) -> bool:
        """Count a sync and tell whether it is one that fails."""
        self.syncs += 1
        self.syncs_to_fail -= 1
        return self.syncs_to_fail >= 0

    def xOpen(self, name: Any, flags: list[int]) -> FailingFile:  # noqa: N802  as above
        return FailingFile(self, name, flags)


@pytest.fixture
def disk(request: pytest.FixtureRequest) -> Iterator[FailingDisk]:
    """A disk that fails on demand; pass its name as `vfs`."""
    disk = FailingDisk(f"failing-{request.node.name}")
    yield disk
    disk.unregister()


@attrs.frozen
class Finished:
    """How a program ended."""

    code: int
    output: str
    errors: str


class RunProgram(Protocol):
    def __call__(self, program: str, *args: object, before: str | None = None) -> Finished: ...


@pytest.fixture
def run_as_user() -> RunProgram:
    """Run a Python program as somebody who is not root; skips where that can't be done."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("needs setpriv (util-linux) to become an ordinary user")
    prefix = (
        [] if os.geteuid() else [str(setpriv), f"--reuid={ORDINARY_USER}", f"--regid={ORDINARY_USER}", "--clear-groups"]
    )

    def run(program: str, *args: object, before: str | None = None) -> Finished:
        return _run([*prefix, sys.executable, "-c", program, *map(str, args)])

    return run


def _run(command: list[str]) -> Finished:
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]},
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run_on_small_disk(tmp_path: Path) -> RunProgram:
    """Run a Python program with a disk of one MiB at `sys.argv[1]`; skips where none can be mounted.

    `before` is a shell command that is run on the disk first.
    """
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {mount_point}"
    try:
        works = subprocess.run([*unshare, "sh", "-c", mount], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("needs unshare and mount (root, or user namespaces) for a small disk")

    def run(program: str, *args: object, before: str | None = None) -> Finished:
        script = f'{mount} && cd {mount_point} && {before or "true"} && exec "$@"'
        python = [sys.executable, "-c", program, str(mount_point), *map(str, args)]
        return _run([*unshare, "sh", "-c", script, "sh", *python])

    return run


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that an ordinary user can enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="spindel-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Give a folder as a value: the name and the bytes of each file."""

    def read(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    return read
