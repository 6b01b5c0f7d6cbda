"""Watching a room: what another process writes is heard of, and hearing nothing only takes longer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import spindel.store._postgres as postgres
from spindel.runs import Run, open_room
from spindel.store import PostgresStore, SqliteStore
from tests.store.postgres import plain_session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


async def _nothing(run: Run[None]) -> None:
    pass


async def _run_one(place: str | Path, name: str = "main") -> None:
    async with open_room(str(place), name=name) as room:
        run = await room.start(_nothing)
        await run.wait_returned()


class _Heard:
    """Whether a wait has returned, and the moment."""

    def __init__(self) -> None:
        self.event = trio.Event()

    async def hear(self, wait_changed: Callable[[], Awaitable[None]]) -> None:
        await wait_changed()
        self.event.set()


async def test_a_file_is_heard_of_once_another_connection_has_committed(tmp_path: Path) -> None:
    path = tmp_path / "watched.db"
    heard = _Heard()
    await _run_one(path)
    with trio.fail_after(20):
        async with (
            SqliteStore(path, read_only=True, executor="inline") as store,
            store.watch_room("main") as wait_changed,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(heard.hear, wait_changed)
            await wait_all_tasks_blocked()
            before = heard.event.is_set()
            await _run_one(path)
            await heard.event.wait()

    assert not before


@pytest.mark.postgres
async def test_a_hint_comes_with_the_commit_and_names_its_room(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_LOOK_SECONDS", math.inf)
    heard = _Heard()
    await _run_one(postgres_dsn)
    with trio.fail_after(20):
        async with (
            PostgresStore(postgres_dsn, read_only=True, executor="inline") as store,
            store.watch_room("main") as wait_changed,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(heard.hear, wait_changed)
            await wait_all_tasks_blocked()
            await _run_one(postgres_dsn, "other")
            await wait_all_tasks_blocked()
            before = heard.event.is_set()
            await _run_one(postgres_dsn)
            await heard.event.wait()

    assert not before


@pytest.mark.postgres
async def test_a_gap_in_listening_counts_as_a_change(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_LOOK_SECONDS", math.inf)
    await _run_one(postgres_dsn)
    with trio.fail_after(20):
        async with PostgresStore(postgres_dsn, read_only=True) as store, store.watch_room("main") as wait_changed:
            await _run_one(postgres_dsn)
            with plain_session(postgres_dsn) as session:
                session.execute(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            await wait_changed()


@pytest.mark.postgres
async def test_without_a_hint_it_is_looked_all_the_same(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_LOOK_SECONDS", 0.01)
    await _run_one(postgres_dsn)
    with trio.fail_after(20):
        async with PostgresStore(postgres_dsn, read_only=True) as store, store.watch_room("main") as wait_changed:
            await wait_changed()
