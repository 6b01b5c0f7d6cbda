"""Scenarios of Runs and families: random trees that start, fail, wait, stop and use each other."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from random import Random  # noqa: TID251  seeded by the step
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from spindel.errors import (
    AdmissionError,
    CauseNotDurableError,
    InvalidRecordError,
    NotConstructedError,
    OutcomeError,
    RunWaiting,
    SpindelError,
)
from spindel.runs import Child, Disposal, Preparation, observe_settlement
from spindel.testing.simulation._history import Observed, Returned
from spindel.testing.simulation._registry import scenario

if TYPE_CHECKING:
    from spindel.ids import RunId
    from spindel.runs import Acquisition, Outcome, Room, Run
    from spindel.testing.simulation._world import World

__all__ = ["Tree", "families", "runs"]

_DEPTH_MAX: Final = 3


class ProgramError(Exception):
    """A body, a task or a callback of a scenario fails, as programs do."""


class _NotYetError(Exception):
    """A disposal that isn't done."""


@attrs.define(eq=False)
class Tree:
    """Bodies that do a few random things each, and start more of their kind below them.

    Attributes:
        world: where they live.
        families: give Runs preparations and publications, reserve by hand, choose the policy `cancel`.
        known: every Run so far, to be waited for by others.
    """

    world: World
    families: bool
    known: list[Run[Any]] = attrs.Factory(list["Run[Any]"])

    async def body(self, run: Run[Any], seed: int, depth: int) -> int:
        """Do random things, until they are done or one fails."""
        random = Random(seed)  # noqa: S311  no secret
        with self.world.history.calling(run.id, "body"):
            self.known.append(run)
            for _ in range(random.randrange(7)):
                await self._act(run, random, depth)
            return seed

    async def _act(self, run: Run[Any], random: Random, depth: int) -> None:  # noqa: C901, PLR0912  a case for each act
        match random.choice(_ACTS):
            case "checkpoint":
                await trio.lowlevel.checkpoint()
            case "sleep":
                await trio.sleep(random.expovariate(2.0))
            case "child" if depth < _DEPTH_MAX:
                await self._start_child(run, random, depth)
            case "group" if depth < _DEPTH_MAX:
                await self._start_group(run, random, depth)
            case "reserve" if self.families and depth < _DEPTH_MAX:
                await self._reserve(run, random, depth)
            case "task":
                run.start_soon(self._task, run, random.getrandbits(32))
            case "native":
                await run.run_native(self._native, run, random.random())
            case "wait":
                await self._wait_for_another(run, random)
            case "stubborn":
                with trio.CancelScope(shield=True):
                    await trio.sleep(random.expovariate(1.0))
            case "cancel" if self.known:
                random.choice(self.known).cancel("scenario")
            case "seal" if random.random() < 0.3:
                run.seal()
            case "fail" if random.random() < 0.3:
                raise ProgramError
            case "set-aside" if random.random() < 0.3:
                raise RunWaiting("set-aside")
            case _:
                pass

    async def _start_child(self, run: Run[Any], random: Random, depth: int) -> None:
        seed = random.getrandbits(32)
        try:
            child = await run.start_child(self.body, seed, depth + 1, **self.options(random))
        except AdmissionError as error:
            await self._look_at_lease(run, error)
            return
        if random.random() < 0.4:
            await self._await_result(child)

    async def _start_group(self, run: Run[Any], random: Random, depth: int) -> None:
        group = [
            Child(self.body, (random.getrandbits(32), depth + 1), self.options(random))
            for _ in range(random.randint(1, 4))
        ]
        await run.start_children(group)

    async def _reserve(self, run: Run[Any], random: Random, depth: int) -> None:
        try:
            with run.reserve() as token:
                await self.world.pause()
                if random.random() < 0.3:
                    run.seal()
                if random.random() < 0.8:
                    await run.admit(token, self.body, random.getrandbits(32), depth + 1, **self.options(random))
                await self.world.pause()
        except AdmissionError as error:
            await self._look_at_lease(run, error)

    async def _look_at_lease(self, run: Run[Any], error: AdmissionError) -> None:
        """Some wait until an uncertain admission is no longer owed."""
        lease_id = getattr(error, "lease_id", None)
        if lease_id is not None and getattr(error, "held", True):
            with trio.move_on_after(5):
                await run.wait_lease(lease_id)

    async def _task(self, run: Run[Any], seed: int) -> None:
        random = Random(seed)  # noqa: S311  no secret
        with self.world.history.calling(run.id, f"task {seed}"):
            await trio.sleep(random.expovariate(2.0))
            if random.random() < 0.15:
                raise ProgramError

    def _native(self, run: Run[Any], choice: float) -> None:
        with self.world.history.calling(run.id, f"native {choice}"):
            if choice < 0.15:
                raise ProgramError

    async def _wait_for_another(self, run: Run[Any], random: Random) -> None:
        if not self.known:
            return
        other = random.choice(self.known)
        try:
            if random.random() < 0.3:
                other.outcome_nowait()
                await run.record_cause(other.id)
                return
            with trio.move_on_after(10):
                await other.outcome()
        except (SpindelError, trio.WouldBlock):
            # Itself, an ancestor, one that was given up, or of another life: whatever it is, it is told at once.
            await trio.lowlevel.checkpoint()

    async def _await_result(self, child: Run[Any]) -> None:
        with suppress(OutcomeError, CauseNotDurableError):
            await child.result()

    def options(self, random: Random) -> Any:
        """Choose a start's options."""
        options: dict[str, Any] = {}
        if self.families:
            if random.random() < 0.3:
                options["prepare"] = Thing(self.world, random.getrandbits(32))
            if random.random() < 0.4:
                options["publish"] = Publication(self.world, random.getrandbits(32)).publish
            if random.random() < 0.3:
                options["on_child_failure"] = "cancel"
        return options


_ACTS: Final = (
    *("checkpoint", "sleep", "child", "child", "child", "group", "reserve", "reserve", "task", "native", "wait"),
    *("stubborn", "cancel", "seal", "fail", "set-aside"),
)


class Thing(Preparation[int]):
    """Something outside that a Run needs: taken in two effects, each of which may fail, also while it is undone."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = Random(seed)  # noqa: S311  no secret
        self._here: set[int] = set()

    async def construct(self, run_id: RunId, acquisition: Acquisition) -> int:
        """Take it."""
        with self._world.history.calling(run_id, "construct"):
            if self._random.random() < 0.1:
                raise NotConstructedError("simulated")
            for number in (1, 2):
                if self._random.random() < 0.9:
                    acquisition.begin(self, partial(self._dispose, run_id, number))
                    self._here.add(number)
                else:
                    acquisition.nothing()
                await self._world.pause()
                if self._random.random() < 0.1:
                    raise ProgramError
            return len(self._here)

    async def _dispose(self, run_id: RunId, number: int) -> Disposal:
        with suppress(_NotYetError), self._world.history.calling(run_id, f"dispose {number}"):
            await self._world.pause()
            if self._random.random() < 0.2:
                raise ProgramError
            if self._random.random() < 0.2:
                # Told as a failure: what doesn't say DISCARDED is called again.
                raise _NotYetError
            self._here.discard(number)
            return Disposal.DISCARDED
        return Disposal.INCOMPLETE


class Publication:
    """A publication that may fail, and is idempotent."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = Random(seed)  # noqa: S311  no secret

    async def publish(self, outcome: Outcome[Any]) -> None:
        """Publish an outcome."""
        with self._world.history.calling(outcome.run_id, "publish"):
            await self._world.pause()
            if self._random.random() < 0.2:
                raise ProgramError


async def _play(world: World, name: str, *, families: bool, durable: bool) -> None:
    tree = Tree(world, families=families)
    async with world.open_room(name, durable=durable) as room:
        for step in world.steps():
            match step.choose(("start", "start", "start", "sleep", "cancel", "observe", "close")):
                case "start":
                    await _start_root(tree, room, step.random)
                case "sleep":
                    await trio.sleep(step.random.expovariate(1.0))
                case "cancel" if step.chance(0.3):
                    room.cancel_all("scenario")
                case "observe":
                    await observe_some(world, room, step.random)
                case "close" if step.chance(0.1):
                    await _close(room)
                case _:
                    await trio.lowlevel.checkpoint()


async def _start_root(tree: Tree, room: Room, random: Random) -> None:
    try:
        await room.start(tree.body, random.getrandbits(32), 0, **tree.options(random))
    except AdmissionError as error:
        tree.world.history.note(f"not started: {type(error).__name__}")


async def observe_some(world: World, room: Room, random: Random) -> None:
    """Look at what settles some Runs, the ended ones too."""
    from_log = [record.run_id for record in world.history.of(Returned)]
    for run_id in random.sample(from_log, min(3, len(from_log))):
        world.history.add(Observed(await observe_settlement(room, run_id)))


async def _close(room: Room) -> None:
    try:
        await room.close(grace_seconds=1.0)
    except (OutcomeError, SpindelError, InvalidRecordError):
        await trio.lowlevel.checkpoint()


@scenario("runs", steps=20)
async def runs(world: World) -> None:
    """Random trees of Runs that fail, wait, stop, use each other, and run tasks and threads."""
    await _play(world, "runs", families=False, durable=True)


@scenario("families", steps=20)
async def families(world: World) -> None:
    """The same with preparations, publications, reservations by hand, seals and the policy `cancel`."""
    await _play(world, "families", families=True, durable=True)


@scenario("volatile", steps=20)
async def volatile(world: World) -> None:
    """The same in a room without a store."""
    await _play(world, "volatile", families=True, durable=False)
