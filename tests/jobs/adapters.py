"""An adapter as tests need it: it notes how it is called, fails and waits on demand."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from spindel.jobs import Job, start_job
from spindel.operator import abandon_held, recover, recovery_state
from spindel.runs import open_room

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from typing import Literal

    from spindel.jobs import JobView
    from spindel.runs import Outcome, Room, Run
    from spindel.store import RunRecord, Store


@attrs.define(eq=False)
class Adapter:
    """Both callbacks of a Job.

    Attributes:
        calls: `core` and `adapter`, in the order in which they were called.
        outcomes: what each call was given.
        core_errors, adapter_errors: raised by the next calls, in order.
        core_gate, adapter_gate: what the calls wait for, if set.
    """

    calls: list[str] = attrs.Factory(list)
    outcomes: list[Outcome[Any]] = attrs.Factory(list)
    core_errors: list[BaseException] = attrs.Factory(list)
    adapter_errors: list[BaseException] = attrs.Factory(list)
    core_gate: trio.Event | None = None
    adapter_gate: trio.Event | None = None

    async def before_finish(self, outcome: Outcome[Any]) -> None:
        await self._called("core", outcome, self.core_gate, self.core_errors)

    async def on_settled(self, outcome: Outcome[Any]) -> None:
        await self._called("adapter", outcome, self.adapter_gate, self.adapter_errors)

    async def _called(
        self, name: str, outcome: Outcome[Any], gate: trio.Event | None, errors: list[BaseException]
    ) -> None:
        self.calls.append(name)
        self.outcomes.append(outcome)
        await trio.lowlevel.checkpoint()
        if gate is not None:
            await gate.wait()
        if errors:
            raise errors.pop(0)

    async def start(
        self, owner: Room | Run[Any], fn: Callable[..., Awaitable[Any]], *args: Any, **options: Any
    ) -> Job[Any]:
        """Start a Job with both callbacks."""
        return await start_job(
            owner, fn, *args, before_finish=self.before_finish, on_settled=self.on_settled, **options
        )


@asynccontextmanager
async def open_main(store: Store, **options: Any) -> AsyncGenerator[Room]:
    """Open a room whose holds are given up if the test fails, so that it fails instead of waiting for an operator."""
    async with open_room(store, name="main", **options) as room:
        try:
            yield room
        except BaseException:
            abandon_held(room)
            raise


async def give(_: Run[Any], value: object = None) -> object:
    """Work that returns a value."""
    await trio.lowlevel.checkpoint()
    return value


async def park(_: Run[Any]) -> None:
    """Work that ends by a cancel request only."""
    await trio.sleep_forever()


async def row_of(store: Store, job: Job[Any]) -> RunRecord:
    """Read a Job's row."""
    row = await store.load_run(job.view().room, job.id)
    assert row is not None
    return row


async def wait_held(job: Job[Any]) -> JobView:
    """Wait until a stage is held, and nothing moves any more."""
    view = await job.wait_done_or_held()
    await wait_all_tasks_blocked()
    assert view.cleanup_required, f"it is at {view.stage}, and nothing is held"
    return view


async def recover_now(room: Room, job: Job[Any], action: Literal["retry", "acknowledge"]) -> JobView:
    """Recover what is held now."""
    return await recover(room, recovery_state(room, job.id).locator, action)
