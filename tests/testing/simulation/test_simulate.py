"""`simulate`: schedules from seeds, the same in every process; failures that can be replayed and are made small."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import trio._core._run as trio_run

from spindel.store import RunStatus
from spindel.testing.simulation import (
    INVARIANTS,
    Faults,
    Invariant,
    Part,
    Restarted,
    SimulationError,
    simulate,
)
from spindel.testing.simulation._engine import play
from spindel.testing.simulation._plan import Plan, draw_plan
from spindel.testing.simulation._registry import SCENARIOS
from tests.testing.simulation.programs import counter, endless, parked, patient

if TYPE_CHECKING:
    from spindel.runs import Run
    from spindel.testing.simulation import World

ROOT = Path(__file__).parents[3]
QUIET = Faults.none()


def plan_of(*parts: Part, seed: int = 1) -> Plan:
    return Plan(seed=seed, store="memory", parts=parts)


# -- schedules -------------------------------------------------------------------------------------------------------


def order_of_tasks(seed: int) -> list[int]:
    order: list[int] = []

    async def note(number: int) -> None:
        await trio.lowlevel.checkpoint()
        order.append(number)

    async def program(_: World) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(note, number)

    played = play(program, plan_of(Part("order"), seed=seed))
    assert played.failure is None
    return order


def test_trio_orders_tasks_by_the_two_private_names_that_are_replaced() -> None:
    """Should Trio rename them, this says so; nothing else of Trio's inside is used."""
    before = trio_run._r, trio_run._ALLOW_DETERMINISTIC_SCHEDULING

    orders = {tuple(order_of_tasks(seed)) for seed in range(20)}

    assert len(orders) > 10
    assert {tuple(order_of_tasks(seed)) for seed in range(20)} == orders
    assert (trio_run._r, trio_run._ALLOW_DETERMINISTIC_SCHEDULING) == before


_TRACES = """
import hashlib
from spindel.testing.simulation._engine import play, quiet
from spindel.testing.simulation._plan import Faults, draw_plan
from spindel.testing.simulation._registry import SCENARIOS
import spindel.testing.simulation

told = hashlib.sha256()
with quiet():
    for _, known in sorted(SCENARIOS.items()):
        for seed in range(12):
            played = play(known.play, draw_plan(seed, Faults(), known.steps), trace=True)
            told.update("\\n".join(played.history.lines(every_step=True)).encode())
print(told.hexdigest())
"""


@pytest.mark.slow
def test_a_seed_gives_the_same_trace_in_five_processes() -> None:
    """Every step of every task, at its time, whatever the process's hash seed and addresses are."""
    told = {
        subprocess.run(
            [sys.executable, "-c", _TRACES],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2", "77", "random")
    }

    assert len(told) == 1


def test_tracing_changes_no_schedule() -> None:
    """What is told with a trace is what happened without."""
    known = SCENARIOS["jobs"]
    plans = [draw_plan(seed, Faults(), known.steps) for seed in range(10)]

    plain = [play(known.play, plan).history.digest for plan in plans]
    traced = [play(known.play, plan, trace=True).history.digest for plan in plans]

    assert plain == traced
    assert len(set(plain)) == 10


def test_many_schedules_leave_the_process_as_it_was() -> None:
    """Logs and the collector are put back, also after a failure."""
    logger = logging.getLogger("spindel")
    before = logger.level, gc.isenabled(), gc.get_freeze_count()

    simulate(counter, seeds=[1, 2], faults=QUIET, omit=["order", "priorities"])
    with pytest.raises(SimulationError):
        simulate(parked, seeds=1, faults=QUIET)

    assert (logger.level, gc.isenabled(), gc.get_freeze_count()) == before


async def a_second() -> None:
    await trio.sleep(1)


# -- crashes ---------------------------------------------------------------------------------------------------------


def test_a_crash_runs_no_cleanup_and_the_program_is_started_again() -> None:
    """A killed process runs no `finally`; the next life finds its Run orphaned, and goes on with the next step."""
    lives: list[int] = []
    began: list[int] = []
    cleaned: list[int] = []
    steps: list[int] = []

    async def work(_: Run[None], life: int) -> None:
        began.append(life)
        try:
            while life == 0:
                await a_second()
            await a_second()
        finally:
            cleaned.append(life)

    async def program(world: World) -> None:
        lives.append(world.incarnation)
        async with world.open_room("r") as room:
            for step in world.steps():
                steps.append(step.number)
                run = await room.start(work, world.incarnation)
                await run.wait_returned()

    parts = [Part("step", number) for number in (1, 2, 3)]
    played = play(program, plan_of(*parts, Part("crash", 30, 0.9)))
    gc.collect()
    rows = played.history.rows or {}

    assert played.failure is None
    assert lives == [0, 1]
    assert steps == [1, 2, 3]
    assert began == [0, 1, 1]
    assert cleaned == [1, 1]
    assert sorted(row.status for row in rows.values()) == [RunStatus.COMPLETED, RunStatus.COMPLETED, RunStatus.FAILED]
    assert [row.reason for row in rows.values() if row.status is RunStatus.FAILED] == ["orphaned"]


@pytest.mark.parametrize("choice", [0.9, 0.4, 0.1], ids=["kill", "power", "power in a write"])
def test_acknowledged_rows_outlive_every_kind_of_crash(choice: float) -> None:
    """R-01: whatever a SQLite file was in the middle of, what was acknowledged is there when it is opened again."""
    known = SCENARIOS["jobs"]
    restarts = 0
    for seed, at in enumerate(range(20, 220, 10)):
        steps = tuple(Part("step", number) for number in range(1, 6))
        plan = Plan(seed=seed, store="sqlite", parts=(*steps, Part("order"), Part("crash", at, choice)))
        played = play(known.play, plan)
        restarts += len(list(played.history.of(Restarted)))

        assert played.failure is None, played.failure.text

    assert restarts > 10


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_race_is_found_replayed_and_made_small(capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the seed, what is left of the plan, a trace, and a command that fails in the same way."""
    with pytest.raises(SimulationError) as caught:
        simulate(counter, seeds=200)
    error = caught.value
    first = draw_plan(error.seed, Faults(), 12)

    assert error.kind == "AssertionError"
    assert "two additions gave 1" in str(error)
    assert error.command is not None
    assert error.command in str(error)
    assert len(error.plan.parts) < len(first.parts)
    # Neither the store's failures nor steps that it doesn't take have anything to do with it.
    assert {part.kind for part in error.plan.parts} <= {"order", "priorities", "delays"}
    assert any("enters" in line or "run.started" in line for line in error.trace)

    words = error.command.split()
    omitted = words[words.index("--omit") + 1].split(",") if "--omit" in words else []
    with pytest.raises(SimulationError) as again:
        simulate(counter, seeds=[error.seed], omit=omitted, trace=True)

    assert again.value.trace == error.trace
    assert error.trace[-1] in capsys.readouterr().out


def test_a_program_inside_a_function_is_replayed_by_a_call() -> None:
    """A command can't name it, so the message says how to call `simulate`."""

    async def program(_: World) -> None:
        raise ValueError("wrong")

    with pytest.raises(SimulationError, match=r"simulate\(.*program, seeds=\[5\]") as caught:
        simulate(program, seeds=[5])

    assert caught.value.command is None
    assert caught.value.kind == "ValueError"


def test_a_schedule_in_which_nobody_can_go_on_is_told_with_who_waits() -> None:
    """Instead of hanging: every task waits, and no time will wake one."""
    with pytest.raises(SimulationError, match="every task waits") as caught:
        simulate(parked, seeds=1, faults=QUIET)

    assert caught.value.kind == "StuckError"
    assert "sleep_forever" in str(caught.value)


@pytest.mark.parametrize("program", [endless, patient])
def test_a_schedule_that_never_ends_is_ended(program: object) -> None:
    """By its steps, or by its virtual time."""
    with pytest.raises(SimulationError, match="goes on for ever"):
        simulate(program, seeds=1, faults=QUIET)  # type: ignore[arg-type]


def test_a_rule_of_ones_own_is_checked_beside_the_others() -> None:
    """Rules are told what the program notes."""

    class NeverNegative(Invariant):
        def noted(self, text: str) -> None:
            if text.startswith("stock -"):
                self.fail(text)

    async def program(world: World) -> None:
        world.history.note("stock 1")
        world.history.note("stock -1")

    simulate(program, seeds=3, faults=QUIET)
    with pytest.raises(SimulationError, match="NeverNegative: stock -1"):
        simulate(program, seeds=3, faults=QUIET, invariants=[*INVARIANTS, NeverNegative])


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["none", "", "slow=5,crashes=0"])
def test_faults_are_read_as_they_are_told(text: str) -> None:
    assert str(Faults.parse(text)) == text


@pytest.mark.parametrize("text", ["crash=1", "crashes", "crashes=-1", "crashes=x"])
def test_faults_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=NUMBER"):
        Faults.parse(text)


def test_leaving_a_step_out_changes_no_other() -> None:
    """So that a smaller scenario fails for the same reason."""
    taken: list[tuple[int, float]] = []

    async def program(world: World) -> None:
        taken.extend((step.number, step.random.random()) for step in world.steps())

    whole = plan_of(*(Part("step", number) for number in range(1, 6)))
    play(program, whole)
    all_steps = dict(taken)
    taken.clear()
    play(program, whole.without(["step@2", "step@4"]))

    assert taken == [(number, all_steps[number]) for number in (1, 3, 5)]


def test_no_faults_leave_the_order_the_times_and_the_steps() -> None:
    kinds = {part.kind for seed in range(50) for part in draw_plan(seed, QUIET, 5).parts}

    assert kinds == {"order", "priorities", "delays", "step"}
