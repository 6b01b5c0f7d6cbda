"""The list of deliberate faults fits the source as it is; `python -m tests.mutations.check` puts them into a copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations.check import ROOT, DriftError, break_source, run
from tests.mutations.faults import FAULTS, Fault

MARK = Fault("marked", "x.py", "one\n", "two\n", "tests/x.py")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: re.sub(r"\W+", "-", fault.name))
def test_a_fault_fits_the_source_and_leaves_a_program(fault: Fault) -> None:
    """Its place is there once, and what stands in its place compiles."""
    source = (ROOT / fault.path).read_text()
    broken = break_source(source, fault)

    assert broken != source
    compile(broken, fault.path, "exec")


def test_there_are_enough_of_them_and_a_handful_is_quick() -> None:
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(fault.quick for fault in FAULTS) >= 5


@pytest.mark.parametrize("source", ["two\n", "one\none\n"])
def test_a_fault_whose_place_is_not_there_once_is_drift(source: str) -> None:
    with pytest.raises(DriftError, match="not once"):
        break_source(source, MARK)


def test_a_selection_that_cannot_be_run_catches_nothing(tmp_path: Path) -> None:
    """An import that fails is no test that fails."""
    with pytest.raises(DriftError, match="can't be run"):
        run(tmp_path, "tests/nonesuch.py")
    with pytest.raises(DriftError, match="can't be run"):
        run(tmp_path, ("nonesuch", 1))
