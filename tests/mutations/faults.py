"""Deliberate faults, each with the smallest selection of tests or seeds that must catch it.

A fault is a text of the source, which must be there exactly once, and what stands in its place. When the source
changes under a fault, the check says so; find the place where the same mistake can be made now.
"""

from __future__ import annotations

import attrs

ADMISSION = "spindel/runs/_admission.py"
CANCELLING = "spindel/runs/_cancelling.py"
EMITTER = "spindel/observe/_emitter.py"
ENTRY = "spindel/runs/_entry.py"
EXECUTION = "spindel/runs/_execution.py"
FINISHING = "spindel/runs/_finishing.py"
HOSTING = "spindel/runs/_hosting.py"
MEMORY = "spindel/store/_memory.py"
OUTCOME = "spindel/runs/_outcome.py"
OWNER = "spindel/jobs/_owner.py"
PARKING = "spindel/runs/_parking.py"
POOL = "spindel/runs/_pool.py"
RECOVERY = "spindel/runs/_recovery.py"
ROOM = "spindel/runs/_room.py"
SETTLEMENT = "spindel/runs/_settlement.py"
SQLITE = "spindel/store/_sqlite_backend.py"
UNDOING = "spindel/runs/_undoing.py"
WALK = "spindel/jobs/_walk.py"


@attrs.frozen
class Fault:
    """A deliberate fault.

    Attributes:
        name: what is done wrong, in words.
        path: the file.
        before: the text that is replaced.
        after: what stands there instead.
        by: what must catch it: a scenario and how many of its seeds, or a test.
        quick: True for the handful of every run.
    """

    name: str
    path: str
    before: str
    after: str
    by: tuple[str, int] | str
    quick: bool = False


FAULTS = (
    # -- the store
    Fault(
        "an old owner's write is not fenced (memory)",
        MEMORY,
        "if room is None or room.epoch != mutation.epoch:",
        "if room is None:",
        ("families", 200),
    ),
    Fault(
        "an old owner's write is not fenced (SQLite)",
        SQLITE,
        "return epochs[room] == epoch",
        "return epochs[room] is not None",
        "tests/store/test_contract.py",
    ),
    Fault(
        "an outcome can be rewritten",
        MEMORY,
        "            if not _same_outcome(row.end, finish):",
        "            if row.end is None:",
        "tests/store/test_contract.py",
    ),
    Fault(
        "a row is admitted under a parent that has ended",
        MEMORY,
        "if parent is not None and parent.int not in room.live:",
        "if parent is not None and parent.int not in self._rows:",
        "tests/store/test_contract.py",
    ),
    Fault(
        "a fence doesn't end the row that arrived before it",
        MEMORY,
        "            self._end(room, key, row, _end_of_fence(fence))",
        "            pass",
        ("families", 300),
        quick=True,
    ),
    Fault(
        "the savepoint of a refused mutation is forgotten",
        SQLITE,
        '            connection.execute("ROLLBACK TO mutation")\n',
        "",
        "tests/store/test_contract.py",
    ),
    Fault(
        "commits are not synced",
        "spindel/store/_connection.py",
        'connection.execute("PRAGMA synchronous = FULL")',
        'connection.execute("PRAGMA synchronous = OFF")',
        "tests/store/test_powerloss.py",
    ),
    Fault(
        "what can be read after a failed sync is believed",
        SQLITE,
        "        self._checkpoint_due = True",
        "        self._checkpoint_due = False",
        "tests/store/test_powerloss.py",
    ),
    # -- admission
    Fault(
        "a sealed family admits",
        ADMISSION,
        "        if parent.sealed:\n            raise",
        "        if False:\n            raise",
        "tests/runs/test_family.py",
    ),
    Fault(
        "an uncertain first row is taken for an admission",
        ADMISSION,
        "        confirmation = Confirmation.ABSENT\n",
        "        confirmation = Confirmation.PRESENT\n",
        ("families", 1000),
    ),
    Fault(
        "a first row that is absent is taken for an admission",
        ADMISSION,
        "    if confirmation is Confirmation.PRESENT:\n        return\n",
        "    if confirmation is not Confirmation.CONFLICT:\n        return\n",
        ("runs", 100),
        quick=True,
    ),
    Fault(
        "a request to a reserved lease is forgotten",
        ADMISSION,
        "        scope.cancel()\n    run = entry.handle()",
        "        pass\n    run = entry.handle()",
        "tests/runs/test_admission.py::test_a_reservation_made_before_the_request_is_admitted_and_cancelled",
    ),
    Fault(
        "the first row is written before it is stored",
        ADMISSION,
        "            await room.store.write_shielded(row)\n",
        "            home.start_soon(room.store.write_shielded, row)\n",
        ("runs", 100),
    ),
    # -- undoing
    Fault(
        "the fence is skipped",
        UNDOING,
        "        await _fence(entry, custody)\n        custody.fenced = True",
        "        custody.fenced = True",
        "tests/runs/test_uncertain_admission.py",
    ),
    Fault(
        "a disposal that isn't done passes",
        UNDOING,
        "if answer is not Disposal.DISCARDED:",
        "if answer is Disposal.LOST:",
        "tests/runs/test_preparation.py",
    ),
    Fault(
        "what was discarded is disposed again",
        UNDOING,
        "                owned.discarded = True\n",
        "",
        ("families", 1000),
    ),
    Fault(
        "things are disposed in the order in which they were begun",
        UNDOING,
        "for owned in reversed(custody.owned):",
        "for owned in custody.owned:",
        "tests/runs/test_preparation.py",
    ),
    # -- leases and families
    Fault(
        "a lease is released before its publication",
        ENTRY,
        "        if self.publication is Publication.PENDING:\n            self.phase = LeasePhase.PUBLISHING\n        elif",
        "        if",
        ("families", 100),
        quick=True,
    ),
    Fault(
        "a lease is released inside its callback",
        ENTRY,
        "        elif self.callback_exited:",
        "        elif True:",
        ("families", 300),
    ),
    Fault(
        "a parent doesn't wait for its family",
        FINISHING,
        "        await entry.family.wait_returned()\n",
        "        pass\n",
        "tests/runs/test_pool.py",
    ),
    Fault(
        "the join of a family is skipped",
        FINISHING,
        "            returned = await _join_family(entry, family)\n",
        "            returned = True\n",
        "tests/runs/test_family.py",
    ),
    Fault(
        "a Run ends while a thread of it runs",
        FINISHING,
        "    while entry.outside:\n",
        "    while False:\n",
        "tests/runs/test_native.py",
    ),
    Fault(
        "a given up hold leaves its family trusted",
        UNDOING,
        '        if action == "abandon":\n            entry.owner.abandoned = True\n',
        "",
        ("families", 1000),
    ),
    # -- outcomes
    Fault(
        "a swallowed Cancelled completes a Run",
        OUTCOME,
        'return Decision(RunStatus.CANCELLED, cancel_reason or "cancelled", None)',
        "return Decision(RunStatus.COMPLETED, None, None)",
        ("runs", 50),
        quick=True,
    ),
    Fault(
        "a request doesn't excuse an error",
        OUTCOME,
        "    if cancel_reason is not None:\n        return Decision(RunStatus.CANCELLED, cancel_reason, error)\n",
        "",
        ("runs", 300),
    ),
    Fault(
        "a plain task's error is lost",
        EXECUTION,
        "            problem = _combine(problem, plain)\n",
        "            pass\n",
        ("runs", 200),
    ),
    Fault(
        "an uncertain outcome is told as stored",
        FINISHING,
        '            end = await _persist_again(entry, mutation, error)\n            if end != "finished":',
        '            end = "finished"\n            if end != "finished":',
        ("runs", 100),
        quick=True,
    ),
    Fault(
        "an outcome is frozen anew for each repeat",
        FINISHING,
        "            await room.store.write_shielded(mutation)\n        except Exception as again:",
        "            await room.store.write_shielded(_freeze(entry, family_returned=True))\n        except Exception as again:",
        ("runs", 200),
    ),
    # -- cancellation and waits
    Fault(
        "the shield of a wait is dropped",
        PARKING,
        "    await trio.lowlevel.wait_task_rescheduled(refuse_abort)",
        "    await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.SUCCEEDED)",
        "tests/runs/test_finishing.py",
    ),
    Fault(
        "a repeated write can be cancelled",
        PARKING,
        "    with trio.CancelScope(shield=True):\n",
        "    with trio.CancelScope():\n",
        ("runs", 1000),
    ),
    Fault(
        "a request stops at the Run itself",
        CANCELLING,
        "            pending.extend(entry.family.leases.values())\n",
        "",
        ("families", 300),
    ),
    Fault(
        "a request is told again to those who were asked",
        CANCELLING,
        "        if entry.cancel_reason is None:\n",
        "        if True:\n",
        ("runs", 200),
    ),
    Fault(
        "waiters wake before the outcome is told",
        FINISHING,
        '    if end == "finished":\n        room.events.emit(RunFinished, entry.run_id, entry.status.value, entry.reason)\n    elif',
        "    if",
        ("runs", 50),
    ),
    Fault(
        "a fence asks nobody to stop",
        ROOM,
        "        self.events.emit(RoomFenced, reason)\n        request_cancel(self.family.leases.values(), reason)\n",
        "        self.events.emit(RoomFenced, reason)\n",
        ("families", 300),
    ),
    Fault(
        "a lost room goes on",
        ROOM,
        '        request_cancel(self.family.leases.values(), "room-lost")\n',
        "",
        "tests/runs/test_room.py::TestLoss::test_a_newer_owner_ends_the_runs_of_the_old_one_without_a_claim",
    ),
    # -- recovery and launches
    Fault(
        "two recoveries may claim one hold",
        RECOVERY,
        "    hold.claimed = True\n",
        "",
        ("families", 1000),
    ),
    Fault(
        "a stale revision is accepted",
        RECOVERY,
        "entry.phase != phase or (hold is not None and hold.revision != revision):",
        "entry.phase != phase:",
        "tests/runs/test_uncertain_admission.py",
    ),
    Fault(
        "a ticket runs twice",
        POOL,
        "        if not ticket.claim():\n            return\n        launch = ticket.launch\n        if launch.hold",
        "        ticket.claim()\n        launch = ticket.launch\n        if launch.hold",
        ("families", 1000),
    ),
    Fault(
        "any answer of a worker acknowledges a family's return",
        POOL,
        "            and type(sentinel) is FamilyReturned\n",
        "            or type(sentinel) is FamilyReturned\n",
        "tests/runs/test_pool.py",
    ),
    # -- Jobs
    Fault(
        "a Job's core cleanup is not acknowledged",
        WALK,
        "core=witness_id(WitnessStage.CORE_CLEANUP, job_id)",
        "core=None",
        ("jobs", 50),
    ),
    Fault(
        "an uncertain witness is taken for stored",
        WALK,
        "await self._finishing.confirm(mutation) is Confirmation.PRESENT",
        "await self._finishing.confirm(mutation) is not Confirmation.CONFLICT",
        ("jobs", 300),
        quick=True,
    ),
    Fault(
        "an uncertain outcome of a Job is taken for stored",
        WALK,
        "await self._finishing.confirm_outcome() is Confirmation.PRESENT",
        "await self._finishing.confirm_outcome() is not Confirmation.CONFLICT",
        ("jobs", 300),
    ),
    Fault(
        "a callback that failed passes",
        WALK,
        "            await call_in(self._context(), callback, self._finishing.outcome)\n",
        "            try:\n                await call_in(self._context(), callback, self._finishing.outcome)\n"
        "            except Exception:\n                pass\n",
        ("jobs", 50),
    ),
    Fault(
        "an attested stage needs no evidence",
        WALK,
        "        if not accepted:\n",
        "        if accepted is None:\n",
        ("jobs", 1000),
    ),
    Fault(
        "a Job's key is never free again",
        OWNER,
        "        if drop_key is not None:\n            drop_key()\n        self.before_finish",
        "        self.before_finish",
        "tests/jobs/test_start.py",
    ),
    # -- telling
    Fault(
        "an event is numbered and not told",
        EMITTER,
        "        self.sequence += 1\n",
        "        self.sequence += 1 + (self.sequence == 5)\n",
        ("runs", 50),
    ),
    Fault(
        "a Run is called settled while it lives",
        SETTLEMENT,
        "        and live.lease is Presence.ABSENT\n",
        "",
        "tests/runs/test_settlement.py",
    ),
    Fault(
        "a Run is called settled without its family's witness",
        SETTLEMENT,
        "        and family is WitnessFact.VALID\n",
        "",
        "tests/runs/test_settlement.py",
    ),
)
