"""What passes through the operators' door: one JSON object a line, each way.

A request names its command; a response has an answer or a problem, never both. Both sides read lines of bounded length
and refuse what they don't know, so that a client of another version fails with a sentence instead of half an effect.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, Final, Literal
from uuid import UUID

import msgspec
import trio

from spindel.jobs import Stage
from spindel.store import RunStatus

__all__ = [
    "REQUEST_BYTES_MAX",
    "RESPONSE_BYTES_MAX",
    "AbandonHeld",
    "AnyRequest",
    "CancelJob",
    "Cursor",
    "Dump",
    "DumpedRun",
    "DumpedTask",
    "DumpedThread",
    "Held",
    "HeldFacts",
    "JobDetails",
    "JobFacts",
    "JobList",
    "LineTooLongError",
    "Lines",
    "ListHeld",
    "ListJobs",
    "Problem",
    "RecoverHeld",
    "Recovered",
    "Response",
    "SettlementFacts",
    "ShowJob",
    "TakeDump",
    "WaitJob",
    "may_talk",
    "peer_user",
]

REQUEST_BYTES_MAX: Final = 64 * 1024
RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024
_CHUNK: Final = 64 * 1024
_CREDENTIALS: Final = struct.Struct("3i")


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Plain data; what isn't known is refused."""


# -- requests -----------------------------------------------------------------------------------------------------------


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="command"):
    """The tag is the command."""


class Cursor(_Value, frozen=True):
    """Where a page of Jobs ended: the next one starts below it."""

    started_at: int
    id: UUID


class ListJobs(_Request, frozen=True, tag="jobs"):
    """A page of Jobs, the latest start first."""

    status: RunStatus | None = None
    before: Cursor | None = None
    limit: int = 100


class ShowJob(_Request, frozen=True, tag="job"):
    """One Job, and what can be proved about it."""

    job_id: UUID


class WaitJob(_Request, frozen=True, tag="wait"):
    """One Job, once it is done or held, or after so many seconds, at most 25."""

    job_id: UUID
    seconds: float


class CancelJob(_Request, frozen=True, tag="cancel"):
    """Ask a Job to stop."""

    job_id: UUID


class ListHeld(_Request, frozen=True, tag="held"):
    """All that waits for an operator."""


class RecoverHeld(_Request, frozen=True, tag="recover"):
    """Act on exactly one form of one hold."""

    run_id: UUID
    stage: str
    revision: UUID
    action: Literal["retry", "acknowledge"]


class AbandonHeld(_Request, frozen=True, tag="abandon"):
    """Give up all that is held at this moment."""


class TakeDump(_Request, frozen=True, tag="dump"):
    """The live tree with its tasks, and the stacks of tasks and threads."""


AnyRequest = ListJobs | ShowJob | WaitJob | CancelJob | ListHeld | RecoverHeld | AbandonHeld | TakeDump


# -- answers ------------------------------------------------------------------------------------------------------------


class JobFacts(_Value, frozen=True):
    """A Job, as `spindel.jobs.JobView` shows it."""

    id: UUID
    room: str
    kind: str
    actor: str
    key: str | None
    parent_id: UUID | None
    status: RunStatus
    reason: str | None
    error: str | None
    started_at: int
    ended_at: int | None
    cancel_requested: bool
    stage: Stage | None
    settled: bool
    cleanup_required: bool
    cleanup_stage: Stage | None
    blocked_by: tuple[UUID, ...]
    offer: UUID | None
    experiment: UUID | None
    result_state: str | None
    scorecard: UUID | None


class JobList(_Value, frozen=True):
    """A page of Jobs and where the next one starts, None at the end."""

    room: str
    jobs: tuple[JobFacts, ...]
    next: Cursor | None


class SettlementFacts(_Value, frozen=True):
    """What can be proved about a Job: the three witnesses, lease and owner, and what the store's word is worth."""

    family: str
    core: str
    adapter: str
    lease: str
    owner: str
    evidence: str


class JobDetails(_Value, frozen=True):
    """A Job and what can be proved about it."""

    job: JobFacts
    settlement: SettlementFacts


class HeldFacts(_Value, frozen=True):
    """Something that waits for an operator, in the exact form to act on.

    Attributes:
        what: whether a Job's stage, an admission lease or a launch of the pool is held, or a finisher that broke its
            promise, which can only be given up.
        kind: of the Run that owes it; None before its first row.
        stage: the stage, lease phase or launch kind.
        code: what went wrong: a code or a class name, never a message.
        since: wall time in UTC microseconds.
        revision: of this form of the hold; it goes stale when the hold changes.
        claimed: True while somebody recovers it.
    """

    what: Literal["stage", "lease", "launch", "finisher"]
    run_id: UUID
    kind: str | None
    stage: str
    code: str
    since: int
    revision: UUID
    claimed: bool
    lease_id: UUID | None
    launch_id: UUID | None


class Held(_Value, frozen=True):
    """All that waits for an operator, or all that was given up.

    Attributes:
        held: the first of it, in the order in which it came.
        omitted: how much more there is; listed again, it follows as what came before it ends.
    """

    room: str
    incarnation: UUID
    held: tuple[HeldFacts, ...]
    omitted: int = 0


class Recovered(_Value, frozen=True):
    """What became of a hold that was acted on.

    Attributes:
        held: its new form if it is held again, None if it is over.
    """

    run_id: UUID
    stage: str
    held: HeldFacts | None


class DumpedTask(_Value, frozen=True):
    """A task: its name, and where it waits, outermost first, as `file:line in function`.

    Attributes:
        frames: of a deep stack the ends, with a line between them that tells how many are left out.
        running: True for the one whose stack stands with its thread instead, since it runs at this moment.
    """

    name: str
    frames: tuple[str, ...]
    running: bool


class DumpedThread(_Value, frozen=True):
    """A thread: its name, and where it is, as `DumpedTask` tells it. That of a native launch is named by its Run."""

    name: str
    frames: tuple[str, ...]


class DumpedRun(_Value, frozen=True):
    """A live Run.

    Attributes:
        stage: where a Job's walk is; None for a plain Run.
        launches: what the pool runs or holds for it, as `kind state`.
    """

    id: UUID
    parent_id: UUID | None
    kind: str
    status: str
    started_at: int
    stage: Stage | None
    launches: tuple[str, ...]
    tasks: tuple[DumpedTask, ...]


class Dump(_Value, frozen=True):
    """What lives in a process at one moment. No values of variables, no messages of errors.

    Attributes:
        tasks: those that belong to no Run shown.
        omitted: how many live Runs are left out, the latest admitted.
        omitted_tasks: how many more tasks are left out, of these Runs and of none; the tasks of omitted Runs are not counted.
        omitted_threads: how many threads are left out.
    """

    room: str
    state: str
    runs: tuple[DumpedRun, ...]
    tasks: tuple[DumpedTask, ...]
    threads: tuple[DumpedThread, ...]
    omitted: int
    omitted_tasks: int
    omitted_threads: int


class Problem(_Value, frozen=True):
    """Why there is no answer: a code for programs, a sentence for people."""

    code: str
    sentence: str


class Response(_Value, frozen=True):
    """An answer, which is null where there is a problem."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    problem: Problem | None = None


# -- lines --------------------------------------------------------------------------------------------------------------


class LineTooLongError(Exception):
    """The other side sent more than a line may have."""


class Lines:
    """Reads and writes lines on a stream; a line that is once begun must be over within a time, each way.

    Args:
        stream: the connection.
        bytes_max: how long a line may be that is read.
        stall_seconds: how long it may take from its first byte to its last, and to be taken; None for ever.
    """

    def __init__(self, stream: trio.SocketStream, bytes_max: int, stall_seconds: float | None) -> None:
        self._stream = stream
        self._bytes_max = bytes_max
        self._stall_seconds = float("inf") if stall_seconds is None else stall_seconds
        self._rest = bytearray()

    async def read(self) -> bytes | None:
        """Give the next line without its end; None if there is none any more.

        Raises:
            LineTooLongError: it is too long.
            trio.TooSlowError: it was begun and not ended in time.
            trio.BrokenResourceError: the connection broke.
        """
        deadline = trio.current_time() + self._stall_seconds if self._rest else float("inf")
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            if len(self._rest) > self._bytes_max:
                raise LineTooLongError
            searched = len(self._rest)
            with trio.fail_at(deadline):
                chunk = await self._stream.receive_some(_CHUNK)
            if not chunk:
                return None
            if not self._rest:
                deadline = trio.current_time() + self._stall_seconds
            self._rest += chunk
        if end > self._bytes_max:
            raise LineTooLongError
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    async def write(self, value: msgspec.Struct) -> None:
        """Send a value as a line.

        Raises:
            trio.TooSlowError: the other side doesn't take it.
            trio.BrokenResourceError: the connection broke.
        """
        with trio.fail_after(self._stall_seconds):
            await self._stream.send_all(msgspec.json.encode(value) + b"\n")


def peer_user(connection: Any) -> int:
    """Ask the system which user is at the other end of a Unix socket."""
    raw: bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def may_talk(user: int) -> bool:
    """Tell whether that user and this process may talk: the same one, or root, who could do all of it anyway."""
    return user in (os.geteuid(), 0)
