"""Who owns a room: a lock of the operating system for each room beside the file, and a record of the owner for humans.

The lock is the authority: the system frees it when its process ends, however it ends. The record in the row names the
owner to whoever is refused, and speaks up in one case: the lock was free and yet the recorded process lives, because
somebody removed the lock file under it.

What the lock can't see, such as a process that was stopped while its machine's lock was lost, is left to the epoch in
every mutation.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from spindel.codec import encode_json
from spindel.errors import WriteRefusedError
from spindel.process import ProcessIdentity, current_process, host_name, process_lives, program_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["RoomLock", "describe_owner", "lock_path", "owner_known_dead", "owner_lives", "owner_lives_here"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def describe_owner(at: int) -> str:
    """Give the JSON text that records this process as an owner since `at`."""
    here = current_process()
    return encode_json(
        {
            "pid": here.pid,
            "started": here.started,
            "boot": here.boot,
            "host": host_name(),
            "since": (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "command": program_name(),
        }
    )


def owner_lives(text: str) -> bool:
    """Tell whether a recorded owner is another process that is known to live.

    This process itself never counts: it holds the lock now, so it has no block of this room any more.
    """
    owner = _read_owner(text)
    if owner is None or owner.pid == os.getpid():
        return False
    return process_lives(owner) is True


def owner_lives_here(owner: Mapping[str, Any]) -> bool:
    """Tell whether a recorded owner is another process of this machine that is known to live.

    For a database that many machines share: what another one recorded as its process may be any process here.
    """
    return owner.get("host") == host_name() and owner_lives(encode_json(dict(owner)))


def owner_known_dead(text: str) -> bool:
    """Tell whether a recorded owner is a process that is known to have ended, this machine's own restart included."""
    owner = _read_owner(text)
    if owner is None:
        return False
    lives = process_lives(owner)
    if lives is None and owner.boot is not None:
        here = current_process()
        return _read(text).get("host") == host_name() and here.boot not in {None, owner.boot}
    return lives is False


def _read_owner(text: str) -> ProcessIdentity | None:
    owner = _read(text)
    pid, started, boot = owner.get("pid"), owner.get("started"), owner.get("boot")
    if not isinstance(pid, int):
        return None
    return ProcessIdentity(pid, started if isinstance(started, int) else None, boot if isinstance(boot, str) else None)


def _read(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def lock_path(path: str, room: str) -> Path:
    """Give the lock file of a room: beside the file itself, whatever links led to it.

    A room's name has none of the characters that file systems refuse but `/`, and `+` is free to stand for it.
    """
    return Path(f"{os.path.realpath(path)}-room-{room.replace('/', '+')}.lock")


class RoomLock:
    """Holds a room's lock file, from entering the block until leaving it.

    Args:
        path: the database.
        room: the room.

    `held` says after entering whether it was free. The file is removed on the way out, under the lock; whoever opened
    it in between notices that its file is no longer the one of that name, and takes the new one.
    """

    __slots__ = ("_file", "_path", "held")

    def __init__(self, path: str, room: str) -> None:
        self._path = lock_path(path, room)
        self._file = -1
        self.held = False

    def __enter__(self) -> Self:
        try:
            while not self.held:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
                if not _try_lock(self._file):
                    self._close()
                    break
                self.held = self._names_our_file()
                if not self.held:
                    self._close()
        except OSError as problem:
            self._close()
            raise WriteRefusedError(
                "room-lock", transient=True, detail=f"{self._path} can't be locked: {problem.strerror}"
            ) from problem
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.held:
            self.held = False
            if sys.platform != "win32":  # which removes no file that somebody has open
                self._path.unlink(missing_ok=True)
        self._close()

    def _names_our_file(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._file))

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: int) -> bool:
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: int) -> bool:
        # A lock of the open file, not of the process: a second opener in this process is refused, too.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
