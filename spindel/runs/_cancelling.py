"""Cancellation: sticky, in one turn, for a Run and everything below it.

First the flags and events of all, then the callbacks, parents before children, then the scopes. So a callback sees
every flag set, and no body is resumed before the callbacks have run.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Final

import trio

from spindel.observe import RunCancelRequested
from spindel.runs._frontier import enter_run, without_frontiers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from contextvars import Context

    from spindel.runs._entry import Entry
    from spindel.runs._hosting import FamilyHost
    from spindel.runs._room import Room

__all__ = ["add_callback", "request_cancel"]

_log: Final = logging.getLogger("spindel.runs")


@trio.lowlevel.enable_ki_protection
def request_cancel(tops: Iterable[Entry], reason: str) -> None:
    """Ask these Runs, and all live or reserved descendants, to stop.

    A Run that has decided keeps its outcome; its children are asked all the same. A Run that was asked before gets
    its callbacks called again, nothing else. A lease that is only reserved takes the flag with it into its admission.
    """
    asked, fresh, families = _flag(tops, reason)
    if not asked:
        return
    room = asked[0].room
    # Where a callback asks, whoever was asked before is told in this turn anyway; again could go on without an end.
    told = fresh if room.calling_back else asked
    with _calling_back(room):
        for entry in told:
            for key, callback in tuple((entry.callbacks or {}).items()):
                _call(entry, key, callback, entry.cancel_reason or reason)
    # One scope for all children of a Run: cancelling each child's own costs twice what the rest of its end does.
    for host in families:
        host.cancel_children()
    for entry in fresh:
        if entry.host is not None:
            entry.host.cancel_tasks()
        if entry.scope is not None and not _covered(entry):
            entry.scope.cancel()


def _covered(entry: Entry) -> bool:
    """True if the scope around all children of its parent was cancelled, which its own lies in."""
    parent = entry.parent
    return parent is not None and parent.host is not None and parent.host.children_cancelled


def _flag(tops: Iterable[Entry], reason: str) -> tuple[list[Entry], list[Entry], list[FamilyHost]]:
    """Set the flags.

    Returns:
        The undecided Runs that were asked, those of them for whom it is the first time, and the hosts of all whose
        children are asked, parents first: those of decided Runs, too.
    """
    asked: list[Entry] = []
    fresh: list[Entry] = []
    families: list[FamilyHost] = []
    pending = list(tops)
    for entry in pending:
        if entry.family is not None:
            # The list grows while it is walked: parents come before their children, and deep trees need no stack.
            pending.extend(entry.family.leases.values())
            if entry.host is not None:
                families.append(entry.host)
        if entry.verdict is not None:
            continue
        asked.append(entry)
        if entry.cancel_reason is None:
            entry.cancel_reason = reason
            fresh.append(entry)
            if entry.live:
                entry.room.events.emit(RunCancelRequested, entry.run_id, reason)
    return asked, fresh, families


def add_callback(entry: Entry, key: str, callback: Callable[[str], None]) -> bool:
    """Register a cancel callback; the same key replaces. Returns False, without calling, once the Run has decided."""
    if entry.verdict is not None:
        return False
    if entry.callbacks is None:
        entry.callbacks = {}
    entry.callbacks[key] = callback
    if entry.cancel_reason is not None:
        with _calling_back(entry.room):
            _bound_to(entry).run(callback, entry.cancel_reason)
    return True


@contextmanager
def _calling_back(room: Room) -> Generator[None]:
    outer, room.calling_back = room.calling_back, True
    try:
        with without_frontiers():
            yield
    finally:
        room.calling_back = outer


def _bound_to(entry: Entry) -> Context:
    """Give a context for a callback: its own Run's, whoever called, and under nothing that the caller holds."""
    context = copy_context()
    context.run(enter_run, entry)
    return context


def _call(entry: Entry, key: str, callback: Callable[[str], None], reason: str) -> None:
    try:
        _bound_to(entry).run(callback, reason)
    except BaseException as error:  # noqa: ASYNC103, BLE001  one bad callback must not keep the rest from stopping
        if not isinstance(error, Exception):
            entry.room.interrupt(error)
        _log.warning(
            "cancel callback %r of run %s raised %s; the others were called",
            key,
            entry.run_id,
            type(error).__qualname__,
            extra={"run_id": str(entry.run_id)},
        )
