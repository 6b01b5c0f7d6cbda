"""Serving the door: a socket, a task for each connection, all of them inside the block."""

from __future__ import annotations

import logging
import os
from contextlib import asynccontextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from spindel.control._answers import answer, problem_of
from spindel.control._socket import listening
from spindel.control._wire import (
    REQUEST_BYTES_MAX,
    RESPONSE_BYTES_MAX,
    AnyRequest,
    Lines,
    LineTooLongError,
    Problem,
    Response,
    may_talk,
    peer_user,
)
from spindel.errors import SpindelError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from spindel.runs import Room

__all__ = ["open_control", "serve_room"]

_log: Final = logging.getLogger("spindel.control")
_CLIENTS_MAX: Final = 64
_RESPONSE_BYTES_AROUND: Final = 100
_STALL_SECONDS: Final = 10.0
_LAST_ANSWER_SECONDS: Final = 1.0
_ACCEPT_PAUSE_SECONDS: Final = 0.1


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_control(room: Room, path: str | os.PathLike[str]) -> AsyncGenerator[None]:
    """Let operators of the same user see and recover what lives in a room, through a Unix socket, for a block.

    The end of the block is the end of the room's body: the room is sealed, or fenced if the block raised, and the door
    stays open until every Run has returned. It is then that held cleanup needs an operator; a door that closed before
    the room's last wait would close exactly when it is needed. Requests never keep the room: when the last Run has
    returned, answers under way have a second, and all else is cancelled.

    It is a door against mistakes and other users. A process of the same user, or of root, can do all of this and more
    by other means.

    Args:
        room: the room, open.
        path: where the socket is made, at most 107 bytes. A dead process's socket there is replaced.

    Raises:
        ControlRefusedError: the path won't do, its folder isn't ours alone, or a living process listens there.
    """
    async with listening(os.fspath(path)) as listener, serve_room(room, listener):
        yield


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def serve_room(room: Room, listener: trio.SocketListener) -> AsyncGenerator[None]:
    """As `open_control`, through a socket that is there already: whoever has it knows before a room that it can be.

    Who connects before is answered now.
    """
    problem: BaseException | None = None
    async with trio.open_nursery() as nursery:
        door = _Door(room)
        # A context of its own: whoever opens the door may be inside a Run, and what operators ask for is not.
        Context().run(nursery.start_soon, door.serve, listener)
        try:
            yield
        except BaseException as error:  # noqa: ASYNC103, BLE001  raised again below, as it is
            problem = error
        room.body_ended(problem)
        met = await room.drain()
        problem = problem or met
        await door.close()
    if problem is not None:
        raise problem


class _Door:
    """The connections of one room's door."""

    def __init__(self, room: Room) -> None:
        self._room = room
        # Shielded from whatever is cancelled around the block: then, too, operators are needed until all is over.
        self._scope = trio.CancelScope(shield=True)
        self._clients = 0
        self._answering = 0
        self._quiet = trio.Event()
        self._closing = False
        self._over = trio.Event()

    async def serve(self, listener: trio.SocketListener) -> None:
        """Take connections until the door is closed."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    while True:
                        try:
                            stream = await listener.accept()
                        except OSError as error:
                            _log.warning("the operators' door can't take a connection: %s", error.strerror)
                            await trio.sleep(_ACCEPT_PAUSE_SECONDS)
                            continue
                        nursery.start_soon(self._receive, stream)
        finally:
            self._over.set()

    async def close(self) -> None:
        """Let answers under way leave, for a moment, and end everything else."""
        with trio.CancelScope(shield=True):
            self._closing = True
            if self._answering:
                with trio.move_on_after(_LAST_ANSWER_SECONDS):
                    await self._quiet.wait()
            self._scope.cancel()
            await self._over.wait()

    async def _receive(self, stream: trio.SocketStream) -> None:
        """Serve one connection. Nothing that a client does reaches anything but its own connection."""
        self._clients += 1
        try:
            async with stream:
                await self._talk(stream)
        except (trio.BrokenResourceError, trio.TooSlowError, OSError):
            return
        except Exception:  # noqa: BLE001  the room's Runs must not end for it
            _log.exception("a connection of the operators' door broke down")
        finally:
            self._clients -= 1

    async def _talk(self, stream: trio.SocketStream) -> None:
        lines = Lines(stream, REQUEST_BYTES_MAX, _STALL_SECONDS)
        if not may_talk(peer_user(stream.socket)):
            await lines.write(_refusal("other-user", "this door is for the user whose process it is, and for root"))
            return
        if self._clients > _CLIENTS_MAX:
            await lines.write(_refusal("busy", f"{_CLIENTS_MAX} clients are connected already; try again later"))
            return
        while True:
            try:
                line = await lines.read()
            except LineTooLongError:
                await lines.write(_refusal("bad-request", f"a request has at most {REQUEST_BYTES_MAX} bytes"))
                return
            if line is None:
                return
            self._answering += 1
            try:
                await lines.write(await self._respond(line))
            finally:
                self._answering -= 1
                if self._closing and not self._answering:
                    self._quiet.set()

    async def _respond(self, line: bytes) -> Response:
        try:
            request = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            return _refusal("bad-request", f"that is no request of this version: {error}")
        except UnicodeDecodeError:
            return _refusal("bad-request", "that is no request: it isn't UTF-8")
        try:
            encoded = msgspec.json.encode(await answer(self._room, request))
            if len(encoded) > RESPONSE_BYTES_MAX - _RESPONSE_BYTES_AROUND:
                return _refusal("too-long", f"the answer has {len(encoded):,} bytes, more than a client may take")
            return Response(answer=msgspec.Raw(encoded))
        except SpindelError as error:
            return Response(problem=problem_of(error))
        except Exception as error:  # noqa: BLE001  told to the client by its class, and to the log
            _log.exception("the operators' door could not answer")
            return Response(problem=problem_of(error))


_decoder: Final = msgspec.json.Decoder(AnyRequest)


def _refusal(code: str, sentence: str) -> Response:
    return Response(problem=Problem(code=code, sentence=sentence))
