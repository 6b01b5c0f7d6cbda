"""Tools to test programs built on spindel: faults, power loss, clocks, named points, sweeps, simulation.

`simulate` plays a program under thousands of schedules; see `spindel.testing.simulation`.

More lies in modules of its own, because it needs more installed (`spindel[testing]`): `spindel.testing.plugin` with
fixtures for pytest, `spindel.testing.store_contract` with the suite that every store passes, and
`spindel.testing.strategies` for hypothesis.
"""

from spindel.testing.clocks import START_MICROS, ManualWallClock, autojump_clock
from spindel.testing.faults import Fault, FaultyStore, Hold, PlannedFault, SeenWrite, fail_each
from spindel.testing.powerloss import PowerLossVFS
from spindel.testing.signals import Signals, open_signals
from spindel.testing.simulation import simulate
from spindel.testing.sweep import Steps, sweep_steps

__all__ = [
    "START_MICROS",
    "Fault",
    "FaultyStore",
    "Hold",
    "ManualWallClock",
    "PlannedFault",
    "PowerLossVFS",
    "SeenWrite",
    "Signals",
    "Steps",
    "autojump_clock",
    "fail_each",
    "open_signals",
    "simulate",
    "sweep_steps",
]
