"""A program that runs durable families and Jobs on PostgreSQL, whatever is done to its connections, and its judge.

`python -m tests.crash.besieged --dsn DSN --room NAME --log FILE` is the program. It opens the room, again and again if
it has to, and says each fact that it was told in a log of its own, synced line by line, until SIGTERM ends it in order.
What holds is judged from these logs, and from rows read by plain sessions, never from what the store says of itself.

It acts as its own operator: the stages and leases that a lost connection left held are retried, which is safe, since
no callback of it ever fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self
from uuid import UUID

import attrs
import trio

from spindel import open_room
from spindel.control._holds import list_held, recover_held
from spindel.control._wire import RecoverHeld
from spindel.errors import (
    AdmissionError,
    AdmissionUncertainError,
    RoomInUseError,
    RoomOwnershipLostError,
    SchemaError,
    SpindelError,
    WriteRefusedError,
    WriteUncertainError,
)
from spindel.jobs import start_job
from spindel.runs import Child, RoomState
from spindel.store import FinishRun, PostgresStore
from tests.cli.commands import ENVIRONMENT, ROOT
from tests.store.postgres import plain_session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from spindel import Outcome, Room, Run
    from spindel.ids import RunId

TASKS: Final = 4
PAUSE_SECONDS: Final = 0.05
DEADLINE_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.01
ENDED: Final = ("completed", "failed", "cancelled")


# -- the program -------------------------------------------------------------------------------------------------------


class Program:
    """Works in its room until it is told to stop."""

    def __init__(self, store: PostgresStore, room: str, log: IO[str]) -> None:
        self._store = store
        self._name = room
        self._log = log
        self._stopping = trio.Event()

    def say(self, what: str, run_id: object = "", detail: object = "") -> None:
        """Log a fact; when this returns it survives whatever happens to the process."""
        self._log.write(json.dumps([what, str(run_id), str(detail)]) + "\n")
        self._log.flush()
        os.fsync(self._log.fileno())

    async def stop_on_signal(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as received:
            task_status.started()
            async for _ in received:
                self._stopping.set()

    async def own(self) -> None:
        """Open the room again whenever it couldn't be opened or was lost."""
        while not self._stopping.is_set():
            incarnation = ""
            owned: Room | None = None
            try:
                async with open_room(self._store, name=self._name) as room:
                    incarnation, owned = str(room.incarnation), room
                    self.say("owns", incarnation, room.epoch)
                    await self._work_in(room)
                self.say("left", incarnation)
            except RoomOwnershipLostError:
                if owned is not None:
                    self.say("late", incarnation, await self._write_late(owned))
                self.say("lost", incarnation)
            except (RoomInUseError, SchemaError, WriteRefusedError, WriteUncertainError) as problem:
                self.say("closed out", incarnation, type(problem).__name__)
                with trio.move_on_after(PAUSE_SECONDS):
                    await self._stopping.wait()

    async def _write_late(self, room: Room) -> str:
        """Write once more as the owner of a lost room; gives the refusal."""
        late = FinishRun(
            room=room.name, epoch=room.epoch, id=room.new_run_id(), status="completed", reason=None, error=None,
            ended_at=room.now_micros(), family_returned=True,
        )  # fmt: skip
        try:
            await self._store.write(late)
        except WriteRefusedError as problem:
            return problem.code
        return "acknowledged"

    async def _work_in(self, room: Room) -> None:
        async with trio.open_nursery() as helpers:
            helpers.start_soon(self._operate, room)
            helpers.start_soon(self._read, room)
            async with trio.open_nursery() as workers:
                for _ in range(TASKS):
                    workers.start_soon(self._start_jobs, room)
            helpers.cancel_scope.cancel()

    async def _start_jobs(self, room: Room) -> None:
        while not self._stopping.is_set() and room.state is RoomState.OPEN:
            run_id = room.new_run_id()
            try:
                job = await start_job(
                    room,
                    self._work,
                    run_id=run_id,
                    before_finish=self._callback("core", run_id),
                    on_settled=self._callback("adapter", run_id),
                )
                self.say("row", run_id)
                outcome = await job.outcome()
            except (AdmissionError, RoomOwnershipLostError) as problem:
                self._say_refusal(run_id, problem)
                with trio.move_on_after(PAUSE_SECONDS):
                    await self._stopping.wait()
            else:
                self.say("end", run_id, outcome.status.value)
                self.say("settled", run_id)

    def _callback(self, name: str, run_id: RunId) -> Callable[[Outcome[Any]], Awaitable[None]]:
        async def call(_: Outcome[Any]) -> None:
            self.say(name, run_id)
            await trio.lowlevel.checkpoint()

        return call

    def _say_refusal(self, run_id: object, problem: Exception) -> None:
        what = {AdmissionUncertainError: "uncertain", RoomOwnershipLostError: "nobody knows"}.get(
            type(problem), "refused"
        )
        self.say(what, run_id, getattr(problem, "code", type(problem).__name__))

    async def _work(self, run: Run[None]) -> None:
        self.say("begun", run.id)
        try:
            try:
                branch = await run.start_child(self._branch)
            except AdmissionError as problem:
                self._say_refusal(getattr(problem, "run_id", ""), problem)
                return
            self.say("row", branch.id)
            outcome = await branch.outcome()
            self.say("end", branch.id, outcome.status.value)
        except trio.Cancelled:
            self.say("cancelled", run.id, run.cancel_reason)
            raise

    async def _branch(self, run: Run[None]) -> None:
        self.say("begun", run.id)
        for leaf in await run.start_children([Child.of(self._leaf), Child.of(self._leaf)]):
            if isinstance(leaf, AdmissionError):
                self._say_refusal(getattr(leaf, "run_id", ""), leaf)
            else:
                self.say("row", leaf.id)
                outcome = await leaf.outcome()
                self.say("end", leaf.id, outcome.status.value)

    async def _leaf(self, run: Run[None]) -> None:
        self.say("begun", run.id)
        await trio.lowlevel.checkpoint()

    async def _operate(self, room: Room) -> None:
        """Retry whatever is held."""
        while True:
            for held in list_held(room).held:
                request = RecoverHeld(run_id=held.run_id, stage=held.stage, revision=held.revision, action="retry")
                with suppress(SpindelError):
                    await recover_held(room, request)
            await trio.sleep(PAUSE_SECONDS)

    async def _read(self, room: Room) -> None:
        """Read pages, so that the reader's session is in use as well."""
        while True:
            with suppress(SchemaError):
                page = await room.list_runs(limit=100)
                for record in page.runs[:3]:
                    await room.load(record.id)
            await trio.sleep(PAUSE_SECONDS)


async def run_program(dsn: str, room: str, log: Path) -> None:
    """Run the program until it is told to stop."""
    with log.open("a") as file:  # noqa: ASYNC230  each line of it is synced in the loop, on purpose
        async with PostgresStore(dsn) as store, trio.open_nursery() as nursery:
            program = Program(store, room, file)
            await nursery.start(program.stop_on_signal)
            await program.own()
            nursery.cancel_scope.cancel()


def main() -> None:
    """Be the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--room", default="main")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument(
        "--host", help="the name of the machine that it takes itself to be on; in a namespace of its own"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.host is not None:
        socket.sethostname(options.host)
    trio.run(run_program, options.dsn, options.room, options.log)


# -- from outside ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Fact:
    """One line of a log."""

    what: str
    run_id: str
    detail: str


class Besieged:
    """A process of the program, seen from outside.

    Args:
        dsn: the address of its database.
        log: where it says what it was told.
        inside: a command that runs it, such as `unshare -u`.
        options: further arguments of the program.
    """

    def __init__(self, dsn: str, log: Path, *options: str, inside: Sequence[str] = ()) -> None:
        self.log = log
        log.touch()
        self._err = log.with_suffix(".err").open("wb")
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.crash.besieged", "--dsn", dsn, "--log", str(log), *options],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._err,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._err.close()

    def facts(self) -> list[Fact]:
        """What it has said so far, in order."""
        text = self.log.read_text()
        return [Fact(*json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]

    def count(self, *what: str) -> int:
        """How often it has said one of these."""
        return sum(fact.what in what for fact in self.facts())

    @property
    def complaints(self) -> str:
        """What it wrote to standard error."""
        return self.log.with_suffix(".err").read_text()

    def wait_for(self, holds: Callable[[], object], *, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait for a fact that it brings about; that it ended first is a fault."""
        looks = int(seconds / LOOK_SECONDS)
        for _ in range(looks):
            if holds():
                return
            try:
                # Both the pause and the news that there is nothing to wait for any more.
                self.process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"it ended early ({self.process.returncode}): {self.complaints[-4000:]}")
        last = [(fact.what, fact.detail) for fact in self.facts()[-20:]]
        raise AssertionError(f"not within {seconds} s: {last}\n{self.complaints[-4000:]}")

    def wait_for_more(self, lines: int) -> None:
        """Wait until it has said so much more."""
        goal = len(self.facts()) + lines
        self.wait_for(lambda: len(self.facts()) >= goal)

    def wait_for_settled(self, jobs: int) -> None:
        """Wait until so many more Jobs are settled."""
        goal = self.count("settled") + jobs
        self.wait_for(lambda: self.count("settled") >= goal)

    def stop(self) -> list[Fact]:
        """Let it end in order; gives all that it said."""
        self.process.terminate()
        assert self.process.wait(DEADLINE_SECONDS) == 0, self.complaints[-4000:]
        return self.facts()


@attrs.frozen
class Row:
    """What a plain session reads of a Run."""

    incarnation: UUID
    status: str
    reason: str | None
    error: str | None
    ended_at: int | None
    family: UUID | None
    core: UUID | None
    adapter: UUID | None

    @property
    def outcome(self) -> tuple[str, str | None, str | None, int | None]:
        """What a terminal row never changes."""
        return self.status, self.reason, self.error, self.ended_at


ROWS: Final = (
    "SELECT id::text, incarnation, status, reason, error, ended_at, family_return_ack, job_core_cleanup_ack,"
    " job_adapter_cleanup_ack FROM spindel.runs"
)


def read_rows(dsn: str) -> dict[str, Row]:
    """Read all Runs, past the store."""
    with plain_session(dsn) as session:
        return {row[0]: Row(*row[1:]) for row in session.execute(ROWS).fetchall()}


class Terminal:
    """Remembers each terminal row that it has seen, and finds any that was written again."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._seen: dict[str, Row] = {}

    def look(self) -> dict[str, Row]:
        """Compare with what was seen before; gives all rows."""
        rows = read_rows(self._dsn)
        for run_id, before in self._seen.items():
            after = rows.get(run_id)

            assert after is not None, f"{run_id} is gone"
            assert after.outcome == before.outcome, f"{run_id} was rewritten"
            for witness in ("family", "core", "adapter"):
                assert getattr(before, witness) in (None, getattr(after, witness)), f"{run_id}: {witness}"
        self._seen.update((run_id, row) for run_id, row in rows.items() if row.status in ENDED)
        return rows


def judge(facts: Iterable[Fact], rows: Mapping[str, Row]) -> Counter[str]:
    """Compare what one process was told with the rows, after it has ended; gives how often it was told what."""
    said = Counter[tuple[str, str]]()
    for fact in facts:
        said[fact.what, fact.run_id] += 1
        row = rows.get(fact.run_id)
        match fact.what:
            case "row" | "begun" | "core" | "adapter":
                assert row is not None, fact
            case "end":
                assert row is not None, fact
                assert row.status == fact.detail, (fact, row)
                assert row.family is not None, (fact, row)
            case "settled":
                assert row is not None, fact
                assert None not in (row.core, row.adapter), (fact, row)
            case "refused":
                assert row is None, (fact, row)
            case "uncertain":
                assert row is None or row.reason in {"admission-failed", "orphaned"}, (fact, row)
            case _:
                pass
    for (what, run_id), times in said.items():
        # Nothing is executed twice, whatever became of an acknowledgement.
        assert times == 1 or not run_id or what == "cancelled", (what, run_id, times)
    return Counter(fact_what for fact_what, _ in said.elements())


def check_database(dsn: str) -> None:
    """Have the command check the database."""
    command = [sys.executable, "-m", "spindel", "check", "--store", dsn]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
