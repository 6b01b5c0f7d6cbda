"""The small size of many rooms on one database; `python -m tests.crash.many_rooms` is the long form."""

from __future__ import annotations

import pytest

from tests.crash.many_rooms import run_all

pytestmark = [pytest.mark.slow, pytest.mark.postgres]

ROOMS = 20
CHILDREN = 500


def test_rooms_of_two_processes_share_a_database_without_waiting_for_each_other(postgres_dsn: str) -> None:
    """No lock is waited for in vain, each row is there once and complete, and the check passes."""
    told = run_all(postgres_dsn, ROOMS, CHILDREN)

    assert told.children == CHILDREN // (2 * ROOMS) * 2 * ROOMS
    assert told.complaints == ""
