"""The family host: the task that keeps a Run's two nurseries open, made at the first child or plain task.

A leaf needs no nursery, so it doesn't pay for one. The host lives beside the Run's own task, in the nursery of the
Run's parent, and the Run joins it before it ends. It holds two nurseries, one in the other:

    children            child Runs: they never raise, and a failing plain task doesn't touch them
      └─ tasks          plain tasks: the first that raises cancels the others and the body

While the work goes on the host is parked inside both. It refuses to be cancelled, so both stay open for tasks that a
cancelled body still starts in its clean-up; being asked to abort is how it learns, in the same turn, that a plain task
failed, and it passes that on to the body.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import trio

from spindel.runs._frontier import enter_run
from spindel.runs._parking import park

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextvars import Context

    from spindel.runs._entry import Entry

__all__ = ["FamilyHost", "host_of"]


class FamilyHost:
    """The host of one Run, which must be live. See the module."""

    __slots__ = ("_entry", "_opened", "_problem", "_queued", "_resume_host", "_resume_run", "children", "over", "tasks")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.children: trio.Nursery | None = None
        self.tasks: trio.Nursery | None = None
        self.over = False
        self._opened: trio.Event | None = None
        self._queued: list[tuple[Context, Callable[..., Awaitable[object]], tuple[Any, ...], str | None]] = []
        self._problem: BaseException | None = None
        self._resume_host: Callable[[], None] | None = None
        self._resume_run: Callable[[], None] | None = None

    async def wait_open(self) -> trio.Nursery:
        """Wait until children can be started. A checkpoint only while it isn't open."""
        if self.children is None:
            if self._opened is None:
                self._opened = trio.Event()
            await self._opened.wait()
        assert self.children is not None, "the host opens its nurseries before it says so"
        return self.children

    def start_task(self, fn: Callable[..., Awaitable[object]], args: tuple[Any, ...], name: str | None) -> None:
        """Start a plain task of the Run, or queue it with a copy of the context until the nursery is open."""
        context = copy_context()
        context.run(enter_run, self._entry)
        if self.tasks is None:
            self._queued.append((context, fn, args, name))
        else:
            context.run(self.tasks.start_soon, fn, *args, name=name)

    @property
    def children_cancelled(self) -> bool:
        """True once all children, also those to come, are cancelled by their common scope."""
        return self.children is not None and self.children.cancel_scope.cancel_called

    def cancel_children(self) -> None:
        """Cancel all children. What a child does after its work, in its own task, refuses every abort."""
        if self.children is not None:
            self.children.cancel_scope.cancel()

    def cancel_tasks(self) -> None:
        """Cancel all plain tasks, also those to come."""
        if self.tasks is not None:
            self.tasks.cancel_scope.cancel()

    async def join_tasks(self, *, cancel: bool) -> BaseException | None:
        """End the plain half: wait for all plain tasks, cancelled first if the body failed. Not cancellable.

        Returns:
            What they raised, if anything: a group.
        """
        if self.children is None:
            await park(lambda resume: setattr(self, "_resume_run", resume))
        if cancel:
            self.cancel_tasks()
        await park(self._leave)
        return self._problem

    async def join(self) -> None:
        """End the host, whose children have all returned. Not cancellable."""
        if not self.over:
            # Opened after the work was over, for a child that was reserved before: there are no plain tasks.
            await self.join_tasks(cancel=False)
        await park(self._leave)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """The host's task."""
        async with trio.open_nursery() as self.children:
            try:
                async with trio.open_nursery() as self.tasks:
                    if self._entry.cancel_reason is not None:
                        self.tasks.cancel_scope.cancel()
                    self._open()
                    await self._park_until_work_over()
            except BaseException as problem:  # noqa: ASYNC103, BLE001  plain tasks' errors are the Run's, decided in its own task
                self._problem = problem
            self.over = True
            await park(self._hand_over)
        self._tell_run()

    def _open(self) -> None:
        assert self.tasks is not None, "called inside the nursery"
        for context, fn, args, name in self._queued:
            try:
                context.run(self.tasks.start_soon, fn, *args, name=name)
            except Exception as problem:  # noqa: BLE001  it isn't async, say; its caller is gone, so it fails as a task
                self.tasks.start_soon(_fail, problem)
        self._queued.clear()
        if self._opened is not None:
            self._opened.set()
        if self._resume_run is not None:
            self._tell_run()

    async def _park_until_work_over(self) -> None:
        task = trio.lowlevel.current_task()

        def aborted(_: object) -> trio.lowlevel.Abort:
            # A plain task raised, or the Run was cancelled: either way the body has to stop, in this very turn.
            scope = self._entry.scope
            if scope is not None:
                scope.cancel()
            return trio.lowlevel.Abort.FAILED

        self._resume_host = lambda: trio.lowlevel.reschedule(task)
        await trio.lowlevel.wait_task_rescheduled(aborted)

    def _leave(self, resume: Callable[[], None]) -> None:
        self._resume_run = resume
        self._tell_host()

    def _hand_over(self, resume: Callable[[], None]) -> None:
        self._resume_host = resume
        self._tell_run()

    def _tell_host(self) -> None:
        resume, self._resume_host = self._resume_host, None
        assert resume is not None, "the host is parked whenever its Run resumes it"
        resume()

    def _tell_run(self) -> None:
        resume, self._resume_run = self._resume_run, None
        assert resume is not None, "the Run is parked whenever its host resumes it"
        resume()


async def _fail(problem: Exception) -> None:
    raise problem


def host_of(entry: Entry) -> FamilyHost:
    """Give the Run's host, started now if it has none."""
    host = entry.host
    if host is None:
        assert entry.home is not None, "a live Run has a home nursery"
        host = FamilyHost(entry)
        entry.home.start_soon(host.run, name=f"family of run {entry.run_id}")
        entry.host = host
    return host
