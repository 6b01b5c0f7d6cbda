"""Asking the door, from another process or another task."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal, TypeVar, final

import msgspec
import trio

from spindel.control._socket import check_path
from spindel.control._wire import (
    RESPONSE_BYTES_MAX,
    AbandonHeld,
    CancelJob,
    Cursor,
    Dump,
    Held,
    JobDetails,
    JobFacts,
    JobList,
    Lines,
    LineTooLongError,
    ListHeld,
    ListJobs,
    Recovered,
    RecoverHeld,
    Response,
    ShowJob,
    TakeDump,
    WaitJob,
    may_talk,
    peer_user,
)
from spindel.errors import ControlLostError, ControlRefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from uuid import UUID

    from spindel.store import RunStatus

__all__ = ["ControlClient", "open_client"]

A = TypeVar("A", bound=msgspec.Struct)
_response: Final = msgspec.json.Decoder(Response)


@asynccontextmanager
async def open_client(path: str | os.PathLike[str]) -> AsyncGenerator[ControlClient]:
    """Connect to the operators' door of a running process, for a block.

    Raises:
        ControlRefusedError: nobody listens there, or it belongs to another user.
    """
    place = os.fspath(path)
    check_path(place)
    try:
        stream = await trio.open_unix_socket(place)
    except OSError as error:
        raise ControlRefusedError(
            "unreachable",
            f"{place} can't be reached: {error.strerror}; is the process there, and was it started with that socket?",
        ) from error
    async with stream:
        # Whoever listens learns what is asked and says what is believed, so it must be our own user or root.
        if os.geteuid() and not may_talk(peer_user(stream.socket)):
            raise ControlRefusedError("other-user", f"{place} is another user's; nothing was asked")
        yield ControlClient(place, stream)


@final
class ControlClient:
    """Asks a running process. Made by `open_client` only. One request at a time; other tasks wait for their turn.

    Every method raises `ControlRefusedError` with the code of the error that refused, and `ControlLostError` where
    the connection ended before the answer: what was asked may then have been done.

    Cancellation: each is a checkpoint; one that is cancelled while it waits for its answer ends the connection.
    """

    def __init__(self, path: str, stream: trio.SocketStream) -> None:
        self._path = path
        self._lines = Lines(stream, RESPONSE_BYTES_MAX, None)
        self._turn = trio.Lock()
        self._usable = True

    async def list_jobs(
        self, *, status: RunStatus | None = None, before: Cursor | None = None, limit: int = 100
    ) -> JobList:
        """Give a page of Jobs, the latest start first."""
        return await self._ask(ListJobs(status=status, before=before, limit=limit), JobList)

    async def show_job(self, job_id: UUID) -> JobDetails:
        """Give a Job and what can be proved about it."""
        return await self._ask(ShowJob(job_id=job_id), JobDetails)

    async def wait_job(self, job_id: UUID, *, seconds: float = 25.0) -> JobFacts:
        """Give a Job once it is done or held, or after so many seconds, at most 25."""
        return await self._ask(WaitJob(job_id=job_id, seconds=seconds), JobFacts)

    async def cancel_job(self, job_id: UUID) -> JobFacts:
        """Ask a Job to stop; a finished one stays as it is."""
        return await self._ask(CancelJob(job_id=job_id), JobFacts)

    async def list_held(self) -> Held:
        """Give all that waits for an operator, each in the exact form to act on."""
        return await self._ask(ListHeld(), Held)

    async def recover(
        self, run_id: UUID, stage: str, revision: UUID, action: Literal["retry", "acknowledge"]
    ) -> Recovered:
        """Act on exactly one form of one hold: a Job's stage, an admission lease, or a launch.

        `retry` says that repeating the step is safe; `acknowledge` attests what physically happened. See the functions
        of `spindel.operator`.
        """
        return await self._ask(RecoverHeld(run_id=run_id, stage=stage, revision=revision, action=action), Recovered)

    async def abandon(self) -> Held:
        """Give up all that is held at this moment, and tell what that was."""
        return await self._ask(AbandonHeld(), Held)

    async def dump(self) -> Dump:
        """Tell what lives in the room, and where all tasks and threads of the process are."""
        return await self._ask(TakeDump(), Dump)

    async def _ask(self, request: msgspec.Struct, kind: type[A]) -> A:
        async with self._turn:
            if not self._usable:
                raise ControlLostError(self._path)
            # Until the answer has come this connection is of no use to anybody else, who would read that answer.
            self._usable = False
            response = await self._exchange(request)
            self._usable = True
        if response.problem is not None:
            raise ControlRefusedError(response.problem.code, response.problem.sentence)
        try:
            return msgspec.json.decode(response.answer, type=kind)
        except msgspec.MsgspecError as error:
            raise self._foreign(error) from error

    async def _exchange(self, request: msgspec.Struct) -> Response:
        # A door that refuses at once says why and closes, perhaps before it was asked; so a failed writing still reads.
        lost: Exception | None = None
        try:
            await self._lines.write(request)
        except trio.BrokenResourceError as error:
            lost = error
        try:
            line = await self._lines.read()
        except (trio.BrokenResourceError, LineTooLongError) as error:
            raise ControlLostError(self._path) from error
        if line is None:
            raise ControlLostError(self._path) from lost
        try:
            return _response.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._foreign(error) from error

    def _foreign(self, error: Exception) -> ControlLostError:
        return ControlLostError(
            self._path, f"answered what this version of spindel doesn't know ({type(error).__name__})"
        )
