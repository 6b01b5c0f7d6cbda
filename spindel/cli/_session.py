"""Running one function as the root Run of a room, under the signals of a terminal."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections import Counter
from contextlib import nullcontext, suppress
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import trio
from attrs import frozen

from spindel.cli._display import Display, PlainDisplay, log_to
from spindel.cli._report import Report, describe_error, describe_held
from spindel.cli._text import describe_name, printable, printable_lines
from spindel.control import describe_dump, take_dump
from spindel.control._server import serve_room
from spindel.control._socket import listening
from spindel.errors import OutcomeError
from spindel.jobs import start_job
from spindel.jobs._start import RESERVED_KINDS
from spindel.operator import abandon_held
from spindel.runs import WitnessFact, observe_settlement, open_room

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.cli._signals import Signals
    from spindel.cli._target import Target
    from spindel.runs import HeldObligation, Outcome, Room, Run, SettlementReport

    _Callback: TypeAlias = Callable[[Outcome[Any]], Awaitable[None]] | None

__all__ = ["Request", "Session"]

_PAGE: Final = 100
_NAMED_MAX: Final = 10
"""How many live Runs the second signal names."""


@frozen(kw_only=True)
class Request:
    """What to run, and where.

    Attributes:
        target: how the user wrote it.
        store: the path of a database, None for memory.
        control: where the operators' door is to be, None for none.
    """

    target: Target
    name: str
    arguments: tuple[str, ...]
    store: str | None
    room: str
    quiet: bool
    control: str | None


class Session:
    """One run of `spindel run`."""

    def __init__(self, request: Request, signals: Signals) -> None:
        self._request = request
        self._signals = signals
        self._display = Display()
        self._room: Room | None = None
        self._opening = trio.CancelScope()
        self._abandoned: list[HeldObligation] = []
        self._report: Report | None = None

    async def run(self) -> tuple[Report | None, BaseException | None]:
        """Open the room, run the function, close the room.

        Returns:
            What became of the function, None if it never began; and what the room raised, None if nothing.
        """
        send, receive = trio.open_memory_channel[int](math.inf)
        token = trio.lowlevel.current_trio_token()
        self._signals.listen(lambda number: token.run_sync_soon(send.send_nowait, number))
        self._signals.dump_by(lambda: self._dump(token))
        self._display = _choose_display(quiet=self._request.quiet)
        handler = log_to(self._display, quiet=self._request.quiet)
        logger = logging.getLogger("spindel")
        logger.addHandler(handler)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, receive)
                problem = await self._run_in_room(nursery)
                nursery.cancel_scope.cancel()
        finally:
            self._signals.end()
            logger.removeHandler(handler)
            self._display.close()
        return self._report, problem

    async def _run_in_room(self, nursery: trio.Nursery) -> BaseException | None:
        """Do it all; gives what the room raised, rather than let it meet the nursery."""
        request = self._request
        try:
            with self._opening:
                # The door's place is taken first, so that one which won't do is refused before anything begins.
                async with (
                    nullcontext() if request.control is None else listening(request.control) as listener,
                    open_room(request.store, name=request.room) as room,
                ):
                    self._room = room
                    # The room decides when its Runs are cancelled, and joins them; this waits for the end of that.
                    with trio.CancelScope(shield=True):
                        ready = trio.Event()
                        nursery.start_soon(self._follow, room, ready)
                        await ready.wait()
                        if self._signals.first is None:
                            nursery.start_soon(self._tell_holds, room)
                            # Its end waits for all that lives, so that whatever is held can be recovered through it.
                            async with nullcontext() if listener is None else serve_room(room, listener):
                                await self._run_root(room)
        except (Exception, KeyboardInterrupt, SystemExit) as problem:  # noqa: BLE001  told by the command
            return problem
        return None

    async def _follow(self, room: Room, ready: trio.Event) -> None:
        try:
            await self._display.follow(room, ready)
        except Exception as problem:  # noqa: BLE001  no Run may fail because it can't be shown
            self._display.close()
            self._display.warn(f"warning: the display broke down: {printable(describe_error(problem))}")
        finally:
            ready.set()

    async def _run_root(self, room: Room) -> None:
        request = self._request
        began = trio.current_time()
        name = printable(request.name)
        kind = printable(getattr(request.target.function, "__name__", "main"))
        if kind in RESERVED_KINDS:
            # A fine name of a function all the same; only its row must not be taken for what it isn't.
            kind = "job"
        function = cast("Callable[[Run[Any], *tuple[str, ...]], Awaitable[Any]]", request.target.function)
        job = await start_job(
            room,
            function,
            *request.arguments,
            before_finish=cast("_Callback", request.target.before_finish),
            on_settled=cast("_Callback", request.target.on_settled),
            kind=kind,
            provenance={"name": name},
        )
        run = job.run
        place = "memory" if request.store is None else printable(request.store)
        self._display.say(f"run {run.id} of {name} in room {room.name} of {place}")
        unknown: OutcomeError | None = None
        error: BaseException | None = None
        value: Any = None
        reason: str | None = None
        status = "running"
        try:
            await run.wait_returned()
            outcome = run.outcome_nowait()
        except OutcomeError as problem:
            error = unknown = problem
        else:
            status, reason, value, error = outcome.status.value, outcome.reason, outcome.value, outcome.error
        duration = trio.current_time() - began
        settlement = await observe_settlement(room, run.id)
        record = await room.load(run.id)
        if unknown is not None and record is not None:
            # What was given up after its outcome was stored has that outcome all the same.
            status, reason = record.status.value, record.reason
        self._report = Report(
            run_id=run.id,
            name=describe_name(kind, {"name": name}),
            status=status,
            reason=reason,
            ended=unknown is None,
            settled=settlement.settled,
            witnesses=_witnesses(settlement),
            runs=await _count_runs(room, 0 if record is None else record.started_at),
            value=value,
            error=error,
            held=(*self._abandoned, *room.held()),
            duration_seconds=duration,
        )

    async def _tell_holds(self, room: Room) -> None:
        """Say what an operator can do about each new hold; what is held at all, `spindel held` tells."""
        told = 0
        while True:
            changed = room.holds.changed
            # Not what takes another form after a recovery that failed: whoever tried that was told.
            fresh = room.holds.after(told)
            if not fresh:
                await changed.wait()
                continue
            told = fresh[-1].number
            for hold in fresh:
                self._display.say(f"held: {describe_held(hold.facts())}")
            control = self._request.control
            self._display.say(
                "  recover it: spindel held --control " + quote(printable(control))
                if control is not None
                else "  it can only be given up, by a second signal: without --control nobody can reach it"
            )
            await changed.wait()

    # -- signals ----------------------------------------------------------------------------------------------------

    async def _obey(self, numbers: trio.MemoryReceiveChannel[int]) -> None:
        first = True
        async for number in numbers:
            name = signal.Signals(number).name
            if first:
                self._cancel(name)
            else:
                self._give_up(name)
            first = False

    def _dump(self, token: trio.lowlevel.TrioToken) -> None:
        """Tell where everything is. Called in a signal's handler, between any two steps of the program."""
        room = self._room
        if room is None:
            raise RuntimeError("no room yet")
        text = printable_lines(describe_dump(take_dump(room)))
        try:
            trio.lowlevel.current_task()
        except RuntimeError:
            # All tasks wait, so the loop is free to write without tearing the tree that is drawn there.
            token.run_sync_soon(self._display.warn, text)
            return
        # Something runs, perhaps for ever, and perhaps inside a write: straight to the descriptor.
        rest = memoryview(f"{text}\n".encode())
        with suppress(OSError):
            while rest:
                rest = rest[os.write(sys.stderr.fileno(), rest) :]

    def _cancel(self, name: str) -> None:
        if self._room is None:
            self._opening.cancel()
            return
        asked = self._room.cancel_all(name.lower())
        self._display.say(
            f"{name}: {asked:,} live Run{'' if asked == 1 else 's'} asked to stop, and waited for; "
            "a second signal gives up what is held, a third leaves at once"
        )

    def _give_up(self, name: str) -> None:
        room = self._room
        if room is None:
            return
        abandoned = abandon_held(room)
        self._abandoned.extend(abandoned)
        self._display.warn(f"{name}: {len(abandoned):,} held and given up; a third signal leaves at once")
        for held in abandoned:
            self._display.warn(f"  given up: {describe_held(held)}")
        live = room.live()
        for snapshot in live[-_NAMED_MAX:]:
            self._display.warn(f"  still there: run {snapshot.id} {printable(snapshot.kind)} {snapshot.status}")
        if len(live) > _NAMED_MAX:
            self._display.warn(f"  and {len(live) - _NAMED_MAX:,} more")


def _choose_display(*, quiet: bool) -> Display:
    """Give the display that fits where standard error leads to."""
    if quiet:
        return Display()
    if sys.stderr.isatty():
        from spindel.cli._live import LiveDisplay

        return LiveDisplay()
    return PlainDisplay()


def _witnesses(report: SettlementReport) -> tuple[str, ...]:
    """Name the witnesses that are there."""
    facts = {"family": report.family, "core": report.core, "adapter": report.adapter}
    return tuple(name for name, fact in facts.items() if fact is WitnessFact.VALID)


async def _count_runs(room: Room, since: int) -> dict[str, int]:
    """Count the Runs of this opening by stored status: newest first, until the rows are older than the first of them."""
    counts: Counter[str] = Counter()
    if room.store is None:
        return dict(counts)
    page = await room.list_runs(limit=_PAGE)
    while True:
        counts.update(record.status.value for record in page.runs if record.incarnation == room.incarnation)
        if page.next is None or page.next.started_at < since:
            return dict(counts)
        page = await room.list_runs(before=page.next, limit=_PAGE)
