"""Jobs: Runs whose cleanup is staged, acknowledged on disk, and held when it fails.

A Job is a Run: one row, one lease, one task. What is added is an owner, which keeps its callbacks, its outcome and its
waiters in this process until physical cleanup has been acknowledged. It is neither another engine nor a stored
workflow: after a restart the row is adopted like any orphan, and no callback is restored or replayed.

| fact | who is right |
|---|---|
| outcome | the owner until the terminal write, then the row |
| witnesses, identities, result reference | the row |
| execution lease; children returned | the room's registry; the family |
| settled | computed from evidence, never stored |

Terminal is not settled: the row may say completed while the adapter is being retired. Waiters wake at done.
"""

from spindel.jobs._job import Job, JobView, ResultState
from spindel.jobs._owner import HoldLocator, Observation, RecoveryState
from spindel.jobs._reads import JobPage, cancel_job, get_job, list_jobs, observe_settlement
from spindel.jobs._stages import Stage
from spindel.jobs._start import find_job, start_job

__all__ = [
    "HoldLocator",
    "Job",
    "JobPage",
    "JobView",
    "Observation",
    "RecoveryState",
    "ResultState",
    "Stage",
    "cancel_job",
    "find_job",
    "get_job",
    "list_jobs",
    "observe_settlement",
    "start_job",
]
