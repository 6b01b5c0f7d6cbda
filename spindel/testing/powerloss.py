"""A disk under SQLite whose power can fail: what was not synced may be lost, sector by sector.

`PowerLossVFS` passes everything on to real files, so that whatever looks at them sees them as usual. Beside each it
keeps what would survive: the content as of the last sync, and the writes and truncations since then. After the power
is cut, `write_survivors` makes a folder as a reboot would find it: of each unsynced write any sectors may be missing.

A failed sync is modelled as operating systems do it: what it should have brought to the disk is readable as before,
but no later sync brings it there, unless it is written again.
"""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from random import Random  # noqa: TID251  seeded: the seed that failed replays the same loss
from typing import TYPE_CHECKING, Any, Final

import apsw
import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SECTOR", "PowerLossVFS"]

SECTOR: Final = 512
"""What a disk writes whole or not at all."""

_names: Final = count(1)


@attrs.frozen
class _Write:
    offset: int
    data: bytes

    def keep(self, content: bytearray, survives: Callable[[], bool]) -> None:
        for start in range(0, len(self.data), SECTOR):
            if survives():
                sector = self.data[start : start + SECTOR]
                at = self.offset + start
                if len(content) < at:
                    content.extend(bytes(at - len(content)))
                content[at : at + len(sector)] = sector


@attrs.frozen
class _Truncation:
    size: int

    def keep(self, content: bytearray, survives: Callable[[], bool]) -> None:
        if survives():
            del content[self.size :]
            content.extend(bytes(self.size - len(content)))


@attrs.define(eq=False)
class _Disk:
    """What a file has on the disk, and what is only in the system's memory."""

    synced: bytearray
    unsynced: list[_Write | _Truncation] = attrs.Factory(list["_Write | _Truncation"])

    def sync(self) -> None:
        for change in self.unsynced:
            change.keep(self.synced, lambda: True)
        self.unsynced.clear()


class PowerLossVFS(apsw.VFS):
    """A VFS over the default one; give its `name` to whatever opens the database.

    Writes, truncations and syncs are its operations; plans count them from the moment of the plan. Safe to be used
    from several threads.

    Attributes:
        name: registered with SQLite under this name, as long as this object lives.
        operations: how many operations there were.
        powered: False once the power is cut; then every operation fails. Reads go on, so a program that trusts what
            it can read back is found out.
        lying: True makes a disk that says it has synced and has not: a test must fail on it, or it tests nothing.
    """

    def __init__(self) -> None:
        self.name = f"spindel-power-loss-{next(_names)}"
        self.operations = 0
        self.powered = True
        self.lying = False
        self._disks: dict[str, _Disk] = {}
        self._removed: dict[str, _Disk] = {}
        self._lock = threading.Lock()
        self._cut_at: int | None = None
        self._sync_faults: tuple[int, int] = (0, 0)
        self._full = False
        super().__init__(self.name, base="")

    # -- plans -------------------------------------------------------------------------------------------------------

    def cut_power(self, n: int = 1) -> None:
        """Cut the power in the n-th operation from now; that one may still have reached the disk, in part."""
        with self._lock:
            self._cut_at = self.operations + n

    def fail_sync(self, n: int = 1, *, times: int = 1) -> None:
        """Fail the n-th sync from now, and `times` in all; what they should have kept is lost for good."""
        with self._lock:
            self._sync_faults = (n, times)

    def fill_disk(self) -> None:
        """From now on no file can grow."""
        with self._lock:
            self._full = True

    def free_disk(self) -> None:
        """Let files grow again."""
        with self._lock:
            self._full = False

    def write_survivors(self, folder: Path, seed: int) -> None:
        """Write what a reboot would find into an existing folder, under the files' own names.

        Args:
            folder: not the one that the files are in.
            seed: decides what of the unsynced survives: nothing, all of it, its beginning, or scattered sectors.
        """
        random = Random(seed)  # noqa: S311  no secret
        survives = _survival(random)
        with self._lock:
            for path, disk in [*self._removed.items(), *self._disks.items()]:
                if path in self._removed and path not in self._disks and random.random() < 0.5:
                    continue
                content = bytearray(disk.synced)
                for change in disk.unsynced:
                    change.keep(content, survives)
                (folder / Path(path).name).write_bytes(content)

    # -- SQLite's calls ----------------------------------------------------------------------------------------------

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> _PowerLossFile:  # noqa: N802  SQLite's name
        """Open a file and begin to keep what of it would survive."""
        return _PowerLossFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802  SQLite's name
        """Delete a file; until its folder or a file is synced it may be there again after a power loss."""
        with self._lock:
            self._begin_operation()
            super().xDelete(filename, syncdir)
            disk = self._disks.pop(filename, None)
            if disk is not None and not syncdir:
                self._removed[filename] = disk

    # -- what the files call -----------------------------------------------------------------------------------------

    def _disk_of(self, path: str) -> _Disk:
        with self._lock:
            disk = self._disks.get(path)
            if disk is None:
                there = Path(path)
                disk = self._disks[path] = _Disk(bytearray(there.read_bytes() if there.exists() else b""))
                self._removed.pop(path, None)
            return disk

    def _begin_operation(self) -> None:
        """Count an operation; raises if it meets a dead disk. The caller holds the lock."""
        self.operations += 1
        if self._cut_at is not None and self.operations >= self._cut_at:
            self.powered = False
        if not self.powered:
            raise apsw.exception_for(apsw.SQLITE_IOERR_WRITE)

    def _write(self, disk: _Disk, change: _Write | _Truncation, grows: bool, really: Callable[[], None]) -> None:
        with self._lock:
            if self.powered:
                # The write that meets the power cut may reach the disk in part, too.
                disk.unsynced.append(change)
            self._begin_operation()
            if grows and self._full:
                disk.unsynced.pop()
                raise apsw.exception_for(apsw.SQLITE_FULL)
            really()

    def _sync(self, disk: _Disk) -> None:
        with self._lock:
            self._begin_operation()
            n, times = self._sync_faults
            if n > 1:
                self._sync_faults = (n - 1, times)
            elif times > 0:
                self._sync_faults = (1, times - 1)
                disk.unsynced.clear()
                raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)
            if not self.lying:
                disk.sync()
                # As with file systems that keep a journal: a sync takes the folder's earlier changes along.
                self._removed.clear()


class _PowerLossFile(apsw.VFSFile):
    def __init__(self, vfs: PowerLossVFS, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        # Files without a name are SQLite's own, temporary ones.
        self._vfs = vfs
        self._disk = _Disk(bytearray()) if path is None else vfs._disk_of(path)
        super().__init__("", name, flags)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802  SQLite's name
        change = _Write(offset, bytes(data))

        def write() -> None:
            super(_PowerLossFile, self).xWrite(data, offset)  # pyright: ignore[reportUnknownMemberType]  apsw's stub

        self._vfs._write(self._disk, change, grows=offset + len(change.data) > self.xFileSize(), really=write)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802  SQLite's name
        self._vfs._write(
            self._disk, _Truncation(newsize), grows=False, really=lambda: super(_PowerLossFile, self).xTruncate(newsize)
        )

    def xLock(self, level: int) -> None:  # noqa: N802  SQLite's name
        try:
            super().xLock(level)
        except apsw.IOError as problem:
            # A connection that only reads tries for the writer's lock when it closes, and takes no for an answer. From
            # a VFS in Python an error of the system would come out of that `close`; busy is an answer.
            raise apsw.BusyError from problem

    def xSync(self, flags: int) -> None:  # noqa: ARG002, N802  SQLite's name; the real file needs no sync
        self._vfs._sync(self._disk)


def _survival(random: Random) -> Callable[[], bool]:
    """Choose a kind of loss, and give a function that decides for one sector after the other."""
    kind = random.choice(("none", "all", "beginning", "scattered"))
    if kind == "none":
        return lambda: False
    if kind == "all":
        return lambda: True
    if kind == "scattered":
        return lambda: random.random() < 0.5
    left = iter(range(random.randrange(64)))
    return lambda: next(left, None) is not None
