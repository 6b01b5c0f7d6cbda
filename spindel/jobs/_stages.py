"""The stages of a Job's end, as a table. No I/O, no Trio.

A Job's work ends, and then its cleanup is walked stage by stage. A stage that passed never runs again. One that fails
is held with its error and its owner, until an operator retries it or attests what physically happened. A callback and
its acknowledgement are two stages, so that a write that failed never repeats a callback that returned.

| stage | effect | row afterwards |
|---|---|---|
| `family-join` | the sealed family is joined on a pool worker | running |
| `core` | `before_finish`: join work, return resources | running |
| `core-ack` | family and core witness, one transaction | + 2 witnesses |
| `terminal` | the frozen outcome; the execution lease is kept | terminal |
| `adapter` | `on_settled`: retire the adapter | terminal |
| `adapter-ack` | the adapter's witness | + 1 witness |
| `release` | the lease goes, `run.finished` | unchanged |
| `done` | owner and key go, waiters wake | unchanged |
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["ACKNOWLEDGED_BY", "STAGE_NEXT", "AcknowledgedBy", "Stage"]


class Stage(StrEnum):
    """How far a Job is."""

    WORK = "work"
    FAMILY_JOIN = "family-join"
    CORE = "core"
    CORE_ACK = "core-ack"
    TERMINAL = "terminal"
    ADAPTER = "adapter"
    ADAPTER_ACK = "adapter-ack"
    RELEASE = "release"
    DONE = "done"


_S = Stage
STAGE_NEXT: Final[dict[Stage, frozenset[Stage]]] = {
    _S.WORK: frozenset({_S.FAMILY_JOIN}),
    _S.FAMILY_JOIN: frozenset({_S.CORE}),
    _S.CORE: frozenset({_S.CORE_ACK}),
    _S.CORE_ACK: frozenset({_S.TERMINAL}),
    _S.TERMINAL: frozenset({_S.ADAPTER}),
    _S.ADAPTER: frozenset({_S.ADAPTER_ACK}),
    _S.ADAPTER_ACK: frozenset({_S.RELEASE}),
    _S.RELEASE: frozenset({_S.DONE}),
    _S.DONE: frozenset(),
}


class AcknowledgedBy(StrEnum):
    """What an operator's acknowledgement of a held stage needs.

    WORD: nothing but the operator's word, for a callback. ROW: the exact frozen write, found in the row. FACT: the
    observable fact: the family has returned, the lease is gone. So nothing invents a terminal row or passes a lease.
    """

    WORD = "word"
    ROW = "row"
    FACT = "fact"


ACKNOWLEDGED_BY: Final[dict[Stage, AcknowledgedBy]] = {
    _S.FAMILY_JOIN: AcknowledgedBy.FACT,
    _S.CORE: AcknowledgedBy.WORD,
    _S.CORE_ACK: AcknowledgedBy.ROW,
    _S.TERMINAL: AcknowledgedBy.ROW,
    _S.ADAPTER: AcknowledgedBy.WORD,
    _S.ADAPTER_ACK: AcknowledgedBy.ROW,
    _S.RELEASE: AcknowledgedBy.FACT,
}
