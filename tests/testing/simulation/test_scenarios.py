"""Spindel's own scenarios, under a few seeds each; `.ci/run` plays a few hundred, and anybody plays thousands."""

from __future__ import annotations

import pytest

from spindel.testing.simulation import (
    Answered,
    Closed,
    Faults,
    Happened,
    Observed,
    Operated,
    Recorded,
    Restarted,
    simulate,
)
from spindel.testing.simulation._engine import play, quiet
from spindel.testing.simulation._plan import draw_plan
from spindel.testing.simulation._registry import SCENARIOS


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_no_schedule_breaks_a_rule(name: str, store: str) -> None:
    """R-18, R-30, R-42, R-51, R-64, J-17: whatever fails, is cancelled, recovered or dies, and whenever."""
    report = simulate(SCENARIOS[name].play, seeds=40 if store == "memory" else 15, store=store)  # type: ignore[arg-type]

    assert report.lives > report.seeds


def tell(record: Recorded) -> str:  # noqa: PLR0911  one word for each kind
    """Name the kind of trouble that a record is."""
    match record:
        case Answered(answer=answer, code=code):
            return f"{answer} {code}"
        case Happened(event=event):
            return f"{event.name} {getattr(event, 'phase', None)}"
        case Operated(action=action):
            return action
        case Restarted(why=why):
            return why
        case Observed(report=report):
            return f"settled {report.settled}"
        case Closed(state=state):
            return state
        case _:
            return getattr(record, "text", "")


@pytest.mark.slow
def test_scenarios_meet_what_they_are_there_for() -> None:
    """A simulation in which nothing goes wrong proves nothing: each kind of trouble is met in some schedule."""
    met: set[str] = set()
    with quiet():
        for name in ("families", "jobs"):
            known = SCENARIOS[name]
            for seed in range(250):
                met.update(map(tell, play(known.play, draw_plan(seed, Faults(), known.steps)).history.records))
    expected = {
        *("stored None", "uncertain None", "refused injected", "refused not-owner", "a late write arrives"),
        *("kill", "power", "it was cut short", "closed", "lost", "settled True", "settled False"),
        *("retry", "acknowledge", "abandon", "no ticket could be made", "a launch is refused"),
        *("a launch is taken, and the answer lost", "everything is asked to stop", "the program is asked to stop"),
        *(f"run.held {phase}" for phase in ("starting", "fencing", "disposing", "terminal", "publishing", "join")),
        *(f"run.held {phase}" for phase in ("core", "core-ack", "adapter", "adapter-ack", "native", "cleanup")),
    }

    assert sorted(expected - met) == []
