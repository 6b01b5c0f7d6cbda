"""What a scenario sees of a simulation: its store, its time, its randomness, its steps, and rooms that are watched.

A scenario is an async function of a `World`: the program under test, from its start to its end. After a crash it is
called again, as a program is started again after one, and finds its rows where the disk kept them.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio

from spindel.errors import RoomOwnershipLostError, WriteRefusedError, WriteUncertainError
from spindel.ids import IdSource
from spindel.runs import open_room
from spindel.testing.clocks import ManualWallClock
from spindel.testing.faults import Fault
from spindel.testing.simulation._history import Closed, RecordingStore
from spindel.testing.simulation._invariants import InvariantError
from spindel.testing.simulation._operating import operate
from spindel.testing.simulation._rules import check_left, check_live
from spindel.testing.simulation._threads import simulate_launches

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
    from random import Random  # noqa: TID251  for annotations
    from types import TracebackType

    from spindel.runs import Room
    from spindel.store import Mutation, Store
    from spindel.testing.simulation._disk import Disk
    from spindel.testing.simulation._history import History
    from spindel.testing.simulation._loop import Loop
    from spindel.testing.simulation._plan import Part, Plan

__all__ = ["Step", "World"]

T = TypeVar("T")

_LIVES_MAX: Final = 6
_FAULTS: Final = {
    "refused": (Fault.REFUSED, True),
    "rejected": (Fault.REFUSED, False),
    "before": (Fault.BEFORE, True),
    "lost-reply": (Fault.LOST_REPLY, True),
    "late": (Fault.LATE, True),
}


@attrs.frozen
class Step:
    """One step that a scenario takes, with choices of its own: leaving one step out changes no other.

    Attributes:
        number: counted from 1.
        random: its own randomness.
    """

    number: int
    random: Random

    def choose(self, options: Sequence[T]) -> T:
        """Choose one of these; repeat an option to make it likelier."""
        return options[int(self.random.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """Say yes with this probability."""
        return self.random.random() < probability


class World:
    """See the module.

    Attributes:
        seed: of the schedule.
        random: the scenario's own randomness. What depends on a step should use the step's.
        history: what happened so far; note there what only the scenario can know.
        incarnation: 0, and one more each time the program is started again.
        store: the store of this life of the program, whose writes may fail.
        wall_clock: the time of rows. It goes with the loop's virtual clock, and steps when the program starts again.
        ids: the source of ids.
    """

    store: RecordingStore

    def __init__(self, plan: Plan, history: History, disk: Disk) -> None:
        self.seed = plan.seed
        self.plan = plan
        self.history = history
        self.disk = disk
        self.random = plan.stream("scenario")
        self.incarnation = 0
        self.wall_clock = ManualWallClock()
        self.ids = IdSource(self._now_micros, plan.stream("ids").getrandbits)
        self.rooms: dict[str, Room] = {}
        self.loop: Loop
        self._pauses = plan.stream("pauses")
        self._delays = plan.has("delays")
        self._moves = plan.stream("wall clock")
        self._steps = iter([part.at for part in plan.of("step")])
        self._stopping: trio.CancelScope | None = None
        self._submitted = 0
        self._read = 0
        self._cut_short = False
        self._late: list[Mutation[Any]] = []

    # -- for scenarios ----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Give the steps that are still to be taken, by this life of the program and those after it."""
        for number in self._steps:
            yield Step(number, self.plan.stream(f"step {number}"))

    async def pause(self) -> None:
        """Let others go on for a moment, or let some time pass; the seed decides."""
        pause = self._pauses.random()
        if pause < 0.3:
            return
        with trio.CancelScope(shield=True):
            if pause < 0.8:
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(self._pauses.expovariate(20.0))

    @asynccontextmanager
    async def open_room(self, name: str, *, operated: bool = True, **options: Any) -> AsyncGenerator[Room]:
        """Open a room of this world, watched for whatever breaks a rule.

        Args:
            name: the room's.
            operated: an operator takes up what is held, at random, so that the room can end.
            **options: as of `spindel.runs.open_room`.
        """
        options = {"wall_clock": self.wall_clock, "ids": self.ids, **options}
        store: Store | None = self.store if options.get("durable", True) else None
        operator = trio.CancelScope()
        try:
            async with _Opening(open_room(store, name=name, **options)) as room:
                self.rooms[name] = room
                self.history.follow(room)
                simulate_launches(room, self.history, self.pause, self.next_launch_fault)
                if operated:
                    random = self.plan.stream(f"operator {self.incarnation}")
                    self.spawn("operator", operate, room, random, self.history, scope=operator)
                await self._arrive_late(name)
                yield room
        finally:
            operator.cancel()
            if (opened := self.rooms.pop(name, None)) is not None:
                self.history.add(Closed(name, opened.state.value))
                check_left(opened)

    def spawn(
        self, name: str, fn: Callable[..., Awaitable[object]], *args: Any, scope: trio.CancelScope | None = None
    ) -> None:
        """Run something beside the program until it ends; what it raises fails the schedule.

        Args:
            name: for the trace.
            fn: an async function.
            *args: its arguments.
            scope: it runs in this one, if given.
        """

        async def run() -> None:
            try:
                with scope or trio.CancelScope():
                    await fn(*args)
            except Exception as problem:  # noqa: BLE001  a system task that raises would be Trio's own failure
                self.loop.fail(problem)

        trio.lowlevel.spawn_system_task(run, name=name)

    # -- for the engine ---------------------------------------------------------------------------------------------

    async def live(self, scenario: Any) -> None:
        """Play one life of the program."""
        self._begin_life()
        async with self.disk.open(self.wall_clock, self._hop, self._die) as opened:
            self.store = _Store(opened, self)
            self._plan_writes()
            self._cut_short = False
            with trio.CancelScope() as self._stopping:  # noqa: ASYNC912  a program that never waits isn't stopped
                try:
                    await scenario(self)
                except* (RoomOwnershipLostError, _NotOpenedError):
                    self._cut_short = True
            self._cut_short |= self._stopping.cancelled_caught
            self._stopping = None
            # Rows are read, and what came late arrives, when nothing fails any more.
            self.store.mend()
            await self.store.arrive()
            await self.history.read_rows(opened)

    def _begin_life(self) -> None:
        loop = self.loop
        start = self.wall_clock.now_micros()
        self.wall_clock = ManualWallClock(start, follows=loop.clock)
        if self.incarnation:
            # Minutes pass; now and then a machine comes up with a clock that went back.
            self.wall_clock.advance(self._moves.expovariate(0.01) if self._moves.random() < 0.8 else -3600)
        loop.each_tick = self._check_rooms
        for part in self.plan.of("cancel", "crash", "takeover"):
            if part.at > loop.steps:
                loop.at_step[part.at] = lambda part=part: self._strike(part)  # type: ignore[misc]

    def _plan_writes(self) -> None:
        """Hand this life's share of the planned faults to its store."""
        begun = self.history.writes
        for part in self.plan.of(*_FAULTS):
            if part.at > begun:
                fault, transient = _FAULTS[part.kind]
                self.store.fail(part.at - begun, fault, transient=transient)
        for part in self.plan.of("slow"):
            if part.at > begun:
                self._slow(part, part.at - begun)
        for part in self.plan.of("unread"):
            if part.at > self._read:
                self.store.fail_confirm(part.at - self._read)

    def _slow(self, part: Part, n: int) -> None:
        hold = self.store.hold(n)

        async def release() -> None:
            await hold.wait_reached()
            self.history.note(f"write {part.at} is slow")
            await trio.sleep(20 * part.choice**4)
            hold.release()

        self.spawn("slow disk", release)

    async def _arrive_late(self, room: str) -> None:
        """Let writes of the last life arrive, late or for a second time: they come from an owner that is no more."""
        late = [mutation for mutation in self._late if mutation.room == room]
        self._late = [mutation for mutation in self._late if mutation.room != room]
        for mutation, result in zip(late, await self.store.store.write_each(late), strict=True):
            self.history.note(f"a write of the last life arrives: {type(mutation).__name__}")
            if not isinstance(result, WriteRefusedError) or result.code != "not-owner":
                raise InvariantError("OldOwnersAreFenced", f"{mutation} met {result!r} after the room was opened again")

    def count_reading(self) -> None:
        """Count a reading of a write's fate, so that planned faults meet the next life's readings, too."""
        self._read += 1

    def next_launch_fault(self) -> Part | None:
        """Count a submission to an executor, and give what meets it."""
        self._submitted += 1
        return next((part for part in self.plan.of("launch") if part.at == self._submitted), None)

    def restart(self, killed: str | None) -> bool:
        """Make ready for the next life of the program, if it is to have one.

        Args:
            killed: how the last one died, or None if it came to its end.
        """
        if killed is not None:
            self.disk.crash(self._pauses, power=killed == "power")
        elif not self._cut_short or self.incarnation >= _LIVES_MAX:
            return False
        self._late += self.store._late
        written = self.store.written()
        # Two may arrive once more, such as a network's repeats. Whoever sent them is gone, whatever they say.
        self._late += [written[int(self._moves.random() * len(written))] for _ in range(2) if written]
        # What a dead life had is out of reach: to cancel it would wake tasks of a loop that was dropped.
        self._stopping = None
        self.rooms.clear()
        self.incarnation += 1
        self.history.restart(killed or "it was cut short")
        return True

    async def _hop(self) -> None:
        if self._delays:
            await self.pause()

    def _die(self) -> None:
        self.history.note("the power fails")
        self.loop.kill("power")

    def _now_micros(self) -> int:
        return self.wall_clock.now_micros()

    def _check_rooms(self) -> None:
        for room in self.rooms.values():
            check_live(room)

    def _strike(self, part: Part) -> None:
        """Do what a part plans for this moment, between two steps."""
        if self._stopping is None:
            return
        if part.kind == "crash":
            if part.choice < 0.3 and self.disk.cut_power(1 + int(part.choice * 100)):
                self.history.note("the power is about to fail")
                return
            why = "power" if part.choice < 0.6 else "kill"
            self.history.note("the power fails" if why == "power" else "the process is killed")
            self.loop.kill(why)
        elif part.kind == "takeover":
            for name in [name for name, room in self.rooms.items() if room.durable]:
                self.history.note(f"another process takes the room {name}")
                self.store.lose(name)
        else:
            self._cancel(part.choice, self._stopping)

    def _cancel(self, choice: float, stopping: trio.CancelScope) -> None:
        rooms = list(self.rooms.values())
        runs = [run for room in rooms for run in room.live()]
        if choice < 0.1:
            self.history.note("the program is asked to stop")
            stopping.cancel()
        elif choice < 0.2:
            self.history.note("everything is asked to stop")
            for room in rooms:
                room.cancel_all("simulated")
        elif runs:
            snapshot = runs[int((choice - 0.2) / 0.8 * len(runs))]
            self.history.note(f"{snapshot.id} is asked to stop")
            for room in rooms:
                run = room.find(snapshot.id)
                if run is not None:
                    run.cancel("simulated")


class _NotOpenedError(Exception):
    """A planned fault kept a room from being opened; the program is started again."""


class _Opening(AbstractAsyncContextManager["Room"]):
    """Tells a room that could not be opened, because of a planned fault, from whatever happens in it."""

    def __init__(self, room: AbstractAsyncContextManager[Room]) -> None:
        self._room = room

    async def __aenter__(self) -> Room:
        try:
            return await self._room.__aenter__()
        except (WriteRefusedError, WriteUncertainError) as problem:
            raise _NotOpenedError from problem

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> bool | None:
        return await self._room.__aexit__(exc_type, exc, tb)  # noqa: ASYNC102  the wrapped one decides


class _Store(RecordingStore):
    """The store of one life: its answers take time, and its readings are counted."""

    def __init__(self, store: Store, world: World) -> None:
        super().__init__(store, world.history)
        self._world = world
        self._arriving = False

    async def confirm(self, mutation: Any) -> Any:
        self._world.count_reading()
        return await super().confirm(mutation)

    async def reply(self) -> None:
        if self._late and not self._arriving:
            self._arriving = True
            self._world.spawn("late writes", self._arrive_soon)
        await self._world._hop()

    async def _arrive_soon(self) -> None:
        await trio.sleep(self._world._pauses.expovariate(0.1))
        self._arriving = False
        await self.arrive()
