"""Simulation: thousands of schedules of a program, each decided by a seed, that a failing seed replays exactly.

    async def program(world: World) -> None:
        async with world.open_room("orders") as room:
            for step in world.steps():
                ...

    def test_no_schedule_breaks_it() -> None:
        simulate(program, seeds=500)

A seed decides the order of tasks, the virtual time, the ids, the wall clock, which writes are refused, uncertain, slow
or answered to nobody, what is cancelled, and when the process dies and is started again. No thread and no real wait is
involved, so a schedule takes milliseconds and is the same in any process.

After each schedule rules are checked over what happened: `INVARIANTS`, and your own. A failure tells one command that
plays the schedule again with a trace, made smaller where that was possible.

`python -m spindel.testing.simulation` plays spindel's own scenarios.
"""

from spindel.testing.simulation import _jobs, _trees
from spindel.testing.simulation._durable_rules import (
    AcknowledgedIsKept,
    OneOutcome,
    SettledWithEvidence,
    WitnessesInOrder,
)
from spindel.testing.simulation._engine import Failure, Played
from spindel.testing.simulation._history import (
    Answered,
    Called,
    Closed,
    Confirmed,
    Happened,
    History,
    Issued,
    Noted,
    Observed,
    Operated,
    Recorded,
    RecordingStore,
    Restarted,
    Returned,
)
from spindel.testing.simulation._invariants import Invariant, InvariantError, check_invariants
from spindel.testing.simulation._lifecycle_rules import (
    CallbacksOnce,
    EventsAreGapless,
    EveryAdmissionEnds,
    GivenUpIsUnknown,
    NoEndBreaksDown,
    NothingOutlivesItsLease,
    OutcomesTellTheWork,
    RequestsReachAll,
)
from spindel.testing.simulation._loop import StuckError
from spindel.testing.simulation._plan import Faults, Part, Plan
from spindel.testing.simulation._registry import scenario
from spindel.testing.simulation._rules import INVARIANTS, check_left, check_live
from spindel.testing.simulation._simulate import SimulationError, SimulationReport, simulate
from spindel.testing.simulation._world import Step, World

# Importing them registers spindel's own scenarios.
_OWN_SCENARIOS = (_jobs, _trees)

__all__ = [
    "INVARIANTS",
    "AcknowledgedIsKept",
    "Answered",
    "CallbacksOnce",
    "Called",
    "Closed",
    "Confirmed",
    "EventsAreGapless",
    "EveryAdmissionEnds",
    "Failure",
    "Faults",
    "GivenUpIsUnknown",
    "Happened",
    "History",
    "Invariant",
    "InvariantError",
    "Issued",
    "NoEndBreaksDown",
    "Noted",
    "NothingOutlivesItsLease",
    "Observed",
    "OneOutcome",
    "Operated",
    "OutcomesTellTheWork",
    "Part",
    "Plan",
    "Played",
    "Recorded",
    "RecordingStore",
    "RequestsReachAll",
    "Restarted",
    "Returned",
    "SettledWithEvidence",
    "SimulationError",
    "SimulationReport",
    "Step",
    "StuckError",
    "WitnessesInOrder",
    "World",
    "check_invariants",
    "check_left",
    "check_live",
    "scenario",
    "simulate",
]
