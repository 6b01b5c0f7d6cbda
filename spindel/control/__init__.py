"""The operators' door of a running process: a Unix socket, for the same user, beside the room.

    async with open_room("runs.db", name="main") as room, open_control(room, "main.sock"):
        ...

What is held lives in the process that holds it, with its callbacks and its private errors; so whoever is to recover
it must reach that process. Through the door one sees Jobs, what is held with its exact locator, and where every task
and thread is; and acts by the functions of `spindel.operator`, on exactly what was read.

| who | may |
|---|---|
| the same user, and root | all that the door offers; and more by other means, so it guards against mistakes alone |
| other users | nothing: mode 0600, and the kernel is asked who is at the other end |
| a Run, tool or token | nothing: none of them gets the path from here |

Requests and responses are one JSON object a line. An error travels as a code and a sentence.
"""

from spindel.control._client import ControlClient, open_client
from spindel.control._dump import describe_dump, take_dump
from spindel.control._server import open_control
from spindel.control._wire import (
    Cursor,
    Dump,
    DumpedRun,
    DumpedTask,
    DumpedThread,
    Held,
    HeldFacts,
    JobDetails,
    JobFacts,
    JobList,
    Recovered,
    SettlementFacts,
)

__all__ = [
    "ControlClient",
    "Cursor",
    "Dump",
    "DumpedRun",
    "DumpedTask",
    "DumpedThread",
    "Held",
    "HeldFacts",
    "JobDetails",
    "JobFacts",
    "JobList",
    "Recovered",
    "SettlementFacts",
    "describe_dump",
    "open_client",
    "open_control",
    "take_dump",
]
