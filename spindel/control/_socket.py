"""The socket in the file system: claimed by one living process, for its own user, and taken away at the end."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from spindel.errors import ControlRefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["check_path", "listening"]

_PATH_BYTES_MAX: Final = 107
"""What the kernel's address has room for."""
_BACKLOG: Final = 16
_LOCK_TRIES: Final = 200
_LOCK_PAUSE_SECONDS: Final = 0.01


@asynccontextmanager
async def listening(path: str) -> AsyncGenerator[trio.SocketListener]:
    """Listen on a path for the length of a block.

    Raises:
        ControlRefusedError: the path won't do, or a living process listens there.
    """
    check_path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        identity = await _claim(path, listener)
        try:
            async with trio.SocketListener(trio.socket.from_stdlib_socket(listener)) as opened:
                yield opened
        finally:
            _remove(path, identity)
    finally:
        listener.close()


def check_path(path: str) -> None:
    """Refuse a path that no Unix socket can have.

    Raises:
        ControlRefusedError: it is empty or too long.
    """
    length = len(os.fsencode(path))
    if not 1 <= length <= _PATH_BYTES_MAX or "\0" in path:
        raise ControlRefusedError(
            "bad-path",
            f"{path!r} has {length} bytes; the path of a Unix socket has 1 to {_PATH_BYTES_MAX}, none of them 0: name "
            "another one",
        )


async def _claim(path: str, listener: socket.socket) -> tuple[int, int]:
    """Bind and listen, in the place of a socket whose process is dead; gives which file it is."""
    folder = os.path.dirname(path) or "."  # noqa: PTH120  a socket's address is a text, not a Path
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ControlRefusedError(
            "bad-folder", f"{path} can't be made: its folder can't be opened ({error.strerror}); name one that is there"
        ) from error
    try:
        _check_folder(path, os.fstat(descriptor))
        # Of two who find the same dead socket, the second would take away what the first has just made. The lock is
        # on the folder itself, so no file stays behind, and the kernel lets go of it whatever becomes of us.
        await _lock(path, descriptor)
        _clear(path)
        try:
            listener.bind(path)
            # Nobody can connect before `listen`, so there is no moment in which others could.
            os.chmod(path, 0o600)  # noqa: PTH101  as above
            listener.listen(_BACKLOG)
            found = os.lstat(path)
        except OSError as error:
            raise ControlRefusedError("bad-path", f"{path} can't be made: {error.strerror}") from error
        return found.st_dev, found.st_ino
    finally:
        os.close(descriptor)


def _check_folder(path: str, folder: os.stat_result) -> None:
    """Refuse a folder in which somebody else could put another socket in the place of ours."""
    mode = folder.st_mode
    others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and folder.st_gid != os.getegid())
    if others and not mode & stat.S_ISVTX:
        raise ControlRefusedError(
            "bad-folder",
            f"{path} would lie in a folder that others may write to; use one of your own, such as $XDG_RUNTIME_DIR",
        )
    if folder.st_uid not in (os.geteuid(), 0):
        raise ControlRefusedError("bad-folder", f"{path} would lie in another user's folder; use one of your own")


async def _lock(path: str, descriptor: int) -> None:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                # A file system that knows no locks: what is lost is only the guard against two at the same moment.
                return
            await trio.sleep(_LOCK_PAUSE_SECONDS)
        else:
            await trio.lowlevel.checkpoint()
            return
    raise ControlRefusedError("in-use", f"{path} can't be made: another process keeps its folder locked; try again")


def _clear(path: str) -> None:
    """Take a dead process's socket away; refuse anything else that is there."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ControlRefusedError("bad-path", f"{path} can't be looked at: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ControlRefusedError("bad-path", f"{path} is there and is no socket; name another path, or take it away")
    if _is_listening(path):
        raise ControlRefusedError("in-use", f"{path} belongs to a living process; name another path, or end that one")
    try:
        os.unlink(path)  # noqa: PTH108  as above
    except OSError as error:
        raise ControlRefusedError(
            "bad-path", f"{path} is a dead process's socket and can't be taken away: {error.strerror}"
        ) from error


def _is_listening(path: str) -> bool:
    """Tell whether a living process listens on a socket; a full queue of connections is a living one's, too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise ControlRefusedError("in-use", f"{path} can't be reached: {error.strerror}") from error
    return True


def _remove(path: str, identity: tuple[int, int]) -> None:
    """Take our own socket away, and nobody else's that has come in its place."""
    try:
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == identity:
            os.unlink(path)  # noqa: PTH108  as above
    except OSError:
        return
