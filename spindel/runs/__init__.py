"""Runs, rooms and families: executions that one can answer for."""

from spindel.runs._entry import FamilyReturned
from spindel.runs._finishing import Finisher, Finishing
from spindel.runs._frontier import current_run, frontier, held_frontier
from spindel.runs._holds import HeldObligation
from spindel.runs._options import Child, RunOptions
from spindel.runs._outcome import Outcome
from spindel.runs._pool import Executor, Launch, Ticket, WorkerPool
from spindel.runs._preparation import Acquisition, Disposal, Preparation, prepare
from spindel.runs._reader import RoomReader, open_reader
from spindel.runs._room import Room, open_room
from spindel.runs._run import Run
from spindel.runs._settlement import (
    LaunchFacts,
    LeaseFacts,
    Presence,
    SettlementReport,
    TerminalOutcome,
    WitnessFact,
    observe_settlement,
)
from spindel.runs._states import LaunchKind, LaunchState, LeasePhase, Publication, RoomState, TicketState
from spindel.runs._token import AdmissionToken
from spindel.runs._watch import RoomSnapshot, RoomWatch, RunSnapshot

__all__ = [
    "Acquisition",
    "AdmissionToken",
    "Child",
    "Disposal",
    "Executor",
    "FamilyReturned",
    "Finisher",
    "Finishing",
    "HeldObligation",
    "Launch",
    "LaunchFacts",
    "LaunchKind",
    "LaunchState",
    "LeaseFacts",
    "LeasePhase",
    "Outcome",
    "Preparation",
    "Presence",
    "Publication",
    "Room",
    "RoomReader",
    "RoomSnapshot",
    "RoomState",
    "RoomWatch",
    "Run",
    "RunOptions",
    "RunSnapshot",
    "SettlementReport",
    "TerminalOutcome",
    "Ticket",
    "TicketState",
    "WitnessFact",
    "WorkerPool",
    "current_run",
    "frontier",
    "held_frontier",
    "observe_settlement",
    "open_reader",
    "open_room",
    "prepare",
]
