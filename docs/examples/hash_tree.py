"""Hash a directory tree into a file in the format of `sha256sum`: one Run for each directory.

    spindel run docs/examples/hash_tree.py:main --db runs.db -- DIR out.txt

`out.txt` then equals `find DIR -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum --`, line for line, odd names
included (escaped as by GNU coreutils 9). Symlinks aren't followed and special files are skipped, as `find` does it.
What can't be read, or vanishes meanwhile, is a problem that is told and not the end: see the value of the Run.

The Runs mirror the directories, so `spindel runs --tree` shows their shape. Live Runs and threads are bounded, however
large the tree is; what grows with it is the sorted list of lines, about 250 bytes for each file. Cancelled, it stops
between two chunks of a file, and the output is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from spindel import Child, Run
from spindel.errors import AdmissionError

if TYPE_CHECKING:
    from collections.abc import Iterable

CHUNK_BYTES: Final = 256 * 1024
BATCH_FILES: Final = 64  # a trip to a thread costs as much as hashing some small files
RUNS_MAX: Final = 256  # started together they share commits; more would only take memory
THREADS: Final = (os.cpu_count() or 1) + 2  # a few more than processors, since some of them wait for the disk
PROBLEMS_SHOWN: Final = 20
OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never wait for a pipe


@dataclass
class Job:
    """What all Runs of one tree share. Threads hand their findings over; only the loop writes here."""

    run: Run[dict[str, Any]]
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(THREADS))
    live: int = 0
    directories: int = 0
    found: int = 0
    size: int = 0
    hashes: list[tuple[bytes, str]] = field(default_factory=list)
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)

    def take_problems(self, problems: Iterable[tuple[bytes, OSError]]) -> None:
        """Count problems, keep the first, tell of the last."""
        for path, error in problems:
            self.problem_count += 1
            message = f"{show(path)}: {error.strerror}"
            if len(self.problems) < PROBLEMS_SHOWN:
                self.problems.append(message)
            self.report(message)

    def report(self, message: str) -> None:
        """Tell watchers how far the whole tree is."""
        self.run.report_progress(len(self.hashes), self.found, message)


async def main(run: Run[dict[str, Any]], root: str, out: str) -> dict[str, Any]:
    """Hash all files below `root` and write their hashes to `out`, which must lie outside of it."""
    job = Job(run)
    top = os.fsencode(root)
    target = await run.run_native(check_places, top, os.fsencode(out))
    child = await run.start_child(
        hash_directory, job, top, kind="directory", provenance={"name": show(top)}, on_child_failure="cancel"
    )
    await child.result()
    job.report(f"writing {show(os.fsencode(out))}")
    await run.run_native(write_lines, target, f".{run.id}.draft", job.hashes)
    return {
        "files": len(job.hashes),
        "directories": job.directories,
        "bytes": job.size,
        "problem_count": job.problem_count,
        "problems": job.problems,
    }


async def hash_directory(run: Run[None], job: Job, path: bytes) -> None:
    """Hash the files of one directory, then start a child for each directory in it."""
    job.live += 1
    async with job.threads:
        directories, files, problems = await run.run_native(list_directory, path)
    job.directories += 1
    job.found += len(files)
    job.take_problems(problems)
    async with trio.open_nursery() as nursery:
        for start in range(0, len(files), BATCH_FILES):
            nursery.start_soon(hash_batch, run, job, files[start : start + BATCH_FILES])
    job.report(show(path))
    while directories:
        # As many as there is room for, and always one, so that every level of the deepest branch can go on.
        count = max(1, RUNS_MAX - job.live)
        group, directories = directories[:count], directories[count:]
        for child in await run.start_children([child_of(job, directory) for directory in group]):
            if isinstance(child, AdmissionError):
                raise child
            # A child that fails cancels this Run, so whoever gets past the wait has all the hashes below.
            await child.wait_returned()
    job.live -= 1


def child_of(job: Job, path: bytes) -> Child[None]:
    """Describe the Run of a directory; its name is what the command line shows."""
    name = {"name": show(os.path.basename(path))}
    return Child.of(hash_directory, job, path, kind="directory", provenance=name, on_child_failure="cancel")


async def hash_batch(run: Run[None], job: Job, paths: list[bytes]) -> None:
    """Hash some files in one launch."""
    async with job.threads:
        hashes, size, problems = await run.run_native(hash_files, run, paths)
    job.hashes += hashes
    job.size += size
    job.take_problems(problems)


# -- in threads --------------------------------------------------------------------------------------------------------


def list_directory(path: bytes) -> tuple[list[bytes], list[bytes], list[tuple[bytes, OSError]]]:
    """List a directory: directories, regular files, problems; each path as `find` would print it."""
    directories: list[bytes] = []
    files: list[bytes] = []
    try:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    files.append(entry.path)
    except OSError as error:
        return directories, files, [(path, error)]
    return directories, files, []


def hash_files(run: Run[None], paths: list[bytes]) -> tuple[list[tuple[bytes, str]], int, list[tuple[bytes, OSError]]]:
    """Hash files until the Run is cancelled: the hashes, how many bytes that were, the problems."""
    hashes: list[tuple[bytes, str]] = []
    problems: list[tuple[bytes, OSError]] = []
    total = 0
    for path in paths:
        try:
            digest, size = hash_file(run, path)
        except OSError as error:
            problems.append((path, error))
            continue
        if run.cancel_requested:
            break  # the last one may be half read
        hashes.append((path, digest))
        total += size
    return hashes, total, problems


def hash_file(run: Run[None], path: bytes) -> tuple[str, int]:
    """Hash one file in chunks; stop early if the Run is cancelled."""
    file = os.open(path, OPEN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.ESTALE, "is no regular file any more")
        digest, size = hashlib.sha256(), 0
        while not run.cancel_requested and (chunk := os.read(file, CHUNK_BYTES)):
            digest.update(chunk)
            size += len(chunk)
    finally:
        os.close(file)
    return digest.hexdigest(), size


def write_lines(target: bytes, draft_name: str, hashes: list[tuple[bytes, str]]) -> None:
    """Write the lines beside the target, sync them, and put them in its place: whole, or not at all."""
    hashes.sort()
    directory = os.path.dirname(target)
    draft = os.path.join(directory, draft_name.encode())
    try:
        with open(draft, "xb") as file:
            file.writelines(line_of(path, digest) for path, digest in hashes)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- names and places --------------------------------------------------------------------------------------------------


def line_of(path: bytes, digest: str) -> bytes:
    """Write a line as `sha256sum` does: a name that would break the line is escaped, and the line says so in front."""
    name = path.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    mark = b"" if name == path else b"\\"
    return b"%s%s  %s\n" % (mark, digest.encode(), name)


def show(path: bytes) -> str:
    """Give a path as text for people and rows; bytes that are no text are escaped."""
    return path.decode("utf-8", "backslashreplace")


def check_places(top: bytes, out: bytes) -> bytes:
    """Refuse, before anything happens, what could not come out well; gives the file to write."""
    target = os.path.realpath(out)
    if not stat.S_ISDIR(os.lstat(os.fsdecode(top)).st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "not a directory (a symlink to one needs a slash at its end)", show(top)
        )
    if os.path.commonpath([os.path.realpath(top), target]) == os.path.realpath(top):
        raise ValueError(f"{show(target)} lies inside {show(top)}, so it would be hashed while it is written")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise ValueError(f"{show(target)} is no regular file, and would be replaced by one")
    if not os.access(os.path.dirname(target), os.W_OK | os.X_OK):
        raise ValueError(f"{show(os.path.dirname(target))} is no directory that this user may write to")
    return target
