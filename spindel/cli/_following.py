"""Following a room: what is there, then each Run that begins, changes or ends, as a line of its own.

The store tells that something may have happened, never what: that is read from the rows. A look reads

- the latest starts, down to a minute before the newest one that was seen;
- what is running;
- by its id, each Run that was seen alive or that still owed a witness.

So a lost hint or a lost connection loses no Run. Only one that ended between two looks and is dated more than a minute
before the newest, by a clock that was put back, isn't seen.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from spindel.cli._exit import CommandError, ExitCode, code_of_signal, refuse
from spindel.cli._listing import check_room, local_time, owes_witnesses, run_facts, run_line
from spindel.cli._streams import echo, flush_streams, is_lost
from spindel.clock import Backoff
from spindel.errors import InvalidRecordError, SchemaError
from spindel.runs import open_reader
from spindel.store import RunStatus, open_place

if TYPE_CHECKING:
    from spindel.cli._listing import Listing
    from spindel.ids import RunId
    from spindel.runs import RoomReader
    from spindel.store import RunPage, RunRecord

__all__ = ["follow_runs"]

_PAGE: Final = 100
_MARGIN_MICROS: Final = 60_000_000
_RETRIES: Final = Backoff(first_seconds=0.25, longest_seconds=5.0)


async def follow_runs(listing: Listing) -> int:
    """Print what happens until a signal comes, or nobody reads any more.

    Raises:
        CommandError: the database or the room can't be read.
        BrokenPipeError: whoever read standard output has enough.
    """
    ended: list[int] = []
    problem: BaseException | None = None

    async def await_signal(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as numbers:
            task_status.started()
            async for number in numbers:
                ended.append(number)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(await_signal)
        try:
            await _follow(listing)
        except (BrokenPipeError, CommandError) as raised:
            # Carried out of the nursery, which would make a group of it.
            problem = raised
        nursery.cancel_scope.cancel()
    if problem is not None:
        raise problem
    return code_of_signal(ended[0]) if ended else ExitCode.FAILED


async def _follow(listing: Listing) -> None:
    try:
        async with open_place(listing.db, read_only=True) as store, open_reader(store, name=listing.room) as reader:
            await check_room(reader, listing.db)
            # Watched before the first look, so that nothing falls between the two.
            async with store.watch_room(listing.room) as wait_changed:
                follower = _Follower(reader, listing)
                await follower.look()
                delays = None
                while not is_lost():
                    began = trio.current_time()
                    try:
                        await wait_changed()
                        began = trio.current_time()
                        await follower.look()
                    except SchemaError as problem:
                        if delays is None:
                            delays = _RETRIES.delays()
                            echo(f"{problem}; trying again", err=True)
                        await trio.sleep(next(delays))
                        continue
                    if delays is not None:
                        delays = None
                        echo(f"reading {store.place} again", err=True)
                    # As long as it took: at most half of the database's time goes into being watched.
                    await trio.sleep(trio.current_time() - began)
    except (SchemaError, InvalidRecordError) as problem:
        refuse(problem)


class _Follower:
    """Knows what was seen, as far back as it may be seen again."""

    def __init__(self, reader: RoomReader, listing: Listing) -> None:
        self._reader = reader
        self._listing = listing
        self._seen: dict[RunId, tuple[int, tuple[Any, ...]]] = {}
        self._open: set[RunId] = set()
        self._newest: int | None = None

    async def look(self) -> None:
        """Read, and print what is new in it."""
        first = self._newest is None
        latest = await self._read_latest()
        found = {record.id: record for record in latest}
        for record in await self._read_running():
            found[record.id] = record
        for run_id in self._open - found.keys():
            loaded = await self._reader.load(run_id)
            if loaded is not None:
                found[run_id] = loaded
        shown = {record.id for record in latest[: self._listing.limit]} if first else found.keys()
        for record in sorted(found.values(), key=lambda record: (record.updated_at, record.id)):
            if self._note(record) and record.id in shown:
                self._print(record)
        self._newest = max((self._newest or 0, *(record.started_at for record in latest)))
        self._seen = {
            run_id: seen
            for run_id, seen in self._seen.items()
            if run_id in self._open or seen[0] >= self._newest - _MARGIN_MICROS
        }
        flush_streams()

    async def _read_latest(self) -> list[RunRecord]:
        newest, count = self._newest, 0 if self._newest is not None else self._listing.limit
        latest: list[RunRecord] = []
        page = await self._reader.list_runs(limit=_PAGE)
        while True:
            latest += page.runs
            if newest is None and latest:
                newest = latest[0].started_at
            last = page.next
            deep = last is None or (newest is not None and last.started_at < newest - _MARGIN_MICROS)
            if last is None or (deep and count is not None and len(latest) >= count):
                return latest
            page = await self._reader.list_runs(before=last, limit=_PAGE)

    async def _read_running(self) -> list[RunRecord]:
        running: list[RunRecord] = []
        page: RunPage = await self._reader.list_runs(status=RunStatus.RUNNING, limit=_PAGE)
        while True:
            running += page.runs
            if page.next is None:
                return running
            page = await self._reader.list_runs(status=RunStatus.RUNNING, before=page.next, limit=_PAGE)

    def _note(self, record: RunRecord) -> bool:
        """Remember how a Run is, and tell whether it was otherwise."""
        state = (
            record.status,
            record.family_return_ack,
            record.job_core_cleanup_ack,
            record.job_adapter_cleanup_ack,
            record.admission_disposal,
        )
        before = self._seen.get(record.id)
        self._seen[record.id] = (record.started_at, state)
        if not record.status.terminal or owes_witnesses(record):
            self._open.add(record.id)
        else:
            self._open.discard(record.id)
        return before is None or before[1] != state

    def _print(self, record: RunRecord) -> None:
        if self._listing.status not in {None, record.status.value}:
            return
        if self._listing.as_json:
            facts = {"room": self._listing.room, **run_facts(record), "updated_at": record.updated_at}
            echo(msgspec.json.encode(facts).decode())
        else:
            echo(f"{local_time(record.updated_at)}  {record.id}  {run_line(record)}")
