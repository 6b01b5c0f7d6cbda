"""A scenario of Jobs: staged cleanup that fails, is held, recovered, attested and given up."""

from __future__ import annotations

from random import Random  # noqa: TID251  seeded by the step
from typing import TYPE_CHECKING, Any
from uuid import UUID

import trio

from spindel.errors import AdmissionError, JobKeyConflictError, RunWaiting, SpindelError
from spindel.jobs import Observation, cancel_job, find_job, get_job, list_jobs, start_job
from spindel.testing.simulation._registry import scenario
from spindel.testing.simulation._trees import ProgramError, Tree, observe_some

if TYPE_CHECKING:
    from spindel.runs import Outcome, Room, Run
    from spindel.testing.simulation._world import Step, World

__all__ = ["jobs"]


class _Adapter:
    """Both callbacks of a Job; each may fail, more than once."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = Random(seed)  # noqa: S311  no secret

    async def before_finish(self, outcome: Outcome[Any]) -> None:
        await self._called(outcome, "core")

    async def on_settled(self, outcome: Outcome[Any]) -> None:
        await self._called(outcome, "adapter")

    async def _called(self, outcome: Outcome[Any], function: str) -> None:
        with self._world.history.calling(outcome.run_id, function):
            await self._world.pause()
            if self._random.random() < 0.15:
                raise ProgramError

    def result_of(self, outcome: Outcome[Any]) -> UUID | None:
        if self._random.random() < 0.2:
            raise ProgramError
        return UUID(int=outcome.value) if self._random.random() < 0.7 else None


class _Jobs:
    def __init__(self, world: World) -> None:
        self.world = world
        self.tree = Tree(world, families=False)

    async def work(self, run: Run[Any], seed: int) -> int:
        """Work of a Job: a while, some children, some of them Jobs."""
        random = Random(seed)  # noqa: S311  no secret
        with self.world.history.calling(run.id, "body"):
            for _ in range(random.randrange(5)):
                match random.choice(("checkpoint", "sleep", "child", "job", "fail", "set-aside")):
                    case "sleep":
                        await trio.sleep(random.expovariate(2.0))
                    case "child":
                        await self._start_child(run, random)
                    case "job":
                        await self.start(run, random)
                    case "fail" if random.random() < 0.4:
                        raise ProgramError
                    case "set-aside" if random.random() < 0.3:
                        raise RunWaiting("set-aside")
                    case _:
                        await trio.lowlevel.checkpoint()
            return seed

    async def _start_child(self, run: Run[Any], random: Random) -> None:
        try:
            await run.start_child(self.tree.body, random.getrandbits(32), 2)
        except AdmissionError as error:
            self.world.history.note(f"not started: {type(error).__name__}")

    async def start(self, owner: Room | Run[Any], random: Random) -> None:
        """Start a Job, under a key that may be taken, and maybe wait for it."""
        adapter = _Adapter(self.world, random.getrandbits(32))
        observation = None
        if random.random() < 0.3:
            observation = Observation(UUID(int=1), UUID(int=2), adapter.result_of)
        try:
            job = await start_job(
                owner,
                self.work,
                random.getrandbits(32),
                key=random.choice(("a", "b", None, None)),
                before_finish=adapter.before_finish if random.random() < 0.8 else None,
                on_settled=adapter.on_settled if random.random() < 0.8 else None,
                observation=observation,
            )
        except (AdmissionError, JobKeyConflictError) as error:
            self.world.history.note(f"not started: {type(error).__name__}")
            return
        if random.random() < 0.3:
            try:
                with trio.move_on_after(20):
                    await job.wait_done_or_held() if random.random() < 0.5 else await job.result()
            except SpindelError:
                await trio.lowlevel.checkpoint()


@scenario("jobs", steps=14)
async def jobs(world: World) -> None:
    """Jobs whose stages fail, under keys, with children, observed, cancelled, recovered at random."""
    program = _Jobs(world)
    async with world.open_room("jobs") as room, trio.open_nursery() as clients:
        for step in world.steps():
            clients.start_soon(_client, program, room, step)
            if step.chance(0.7):
                await trio.sleep(step.random.expovariate(2.0))


async def _client(program: _Jobs, room: Room, step: Step) -> None:
    match step.choose(("start", "start", "start", "look", "cancel", "observe")):
        case "start":
            await program.start(room, step.random)
        case "look":
            page = await list_jobs(room, limit=5)
            for view in page.jobs[:2]:
                await get_job(room, view.id, wait_seconds=step.random.random() * 5)
        case "cancel":
            job = find_job(room, "a")
            if job is not None:
                await cancel_job(room, job.id, wait_seconds=1.0)
        case _:
            await observe_some(program.world, room, step.random)
