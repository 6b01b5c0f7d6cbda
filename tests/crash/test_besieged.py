"""Sessions, servers and networks are cut under programs at work on PostgreSQL, and the rows stay true.

`SPINDEL_CUTS=200` makes it the long form: so many cuts of each kind, instead of a few.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Final

import pytest

from spindel.store._postgres_ownership import lock_key
from spindel.testing.postgres import PostgresCluster
from tests.crash.besieged import Besieged, Terminal, check_database, judge, read_rows
from tests.crash.network import HERE, THERE
from tests.crash.storm import moments
from tests.store.postgres import plain_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.crash.besieged import Fact
    from tests.crash.network import Cable

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.postgres, pytest.mark.timeout(1200)]

CUTS: Final = int(os.environ.get("SPINDEL_CUTS", "12"))
SEED: Final = float(os.environ.get("SPINDEL_SEED", "0.37"))
LINES: Final = 40
"""About as many facts as four Jobs at once make: a cut may come anywhere among them."""

SESSIONS: Final = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'spindel'"
OF_LOCKS: Final = "AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
QUICK: Final = "keepalives_idle=1&keepalives_interval=1&keepalives_count=2&tcp_user_timeout=3000"


def lines_between(cuts: int) -> Iterator[int]:
    """Give how many facts to wait for before each cut."""
    return (1 + int(moment) for moment in moments(cuts, SEED, LINES))


def cut_sessions(dsn: str, which: str) -> int:
    """Terminate sessions of the store; gives how many there were."""
    with plain_session(dsn) as session:
        return len(session.execute(f"SELECT pg_terminate_backend(pid) {SESSIONS} {which}".encode()).fetchall())


def owners(*logs: list[Fact]) -> dict[int, tuple[int, str]]:
    """Give who has owned each epoch: the number of its log, and its incarnation."""
    owned: dict[int, tuple[int, str]] = {}
    for number, log in enumerate(logs):
        for fact in log:
            if fact.what == "owns":
                assert int(fact.detail) not in owned, "an epoch has one owner"
                owned[int(fact.detail)] = number, fact.run_id
    return owned


def test_sessions_that_end_at_any_moment_lose_nothing_and_cost_no_room(postgres_dsn: str, tmp_path: Path) -> None:
    """With nobody else there the room is never lost: its lock is taken again, and all told is true."""
    terminal = Terminal(postgres_dsn)
    ended = 0
    with Besieged(postgres_dsn, tmp_path / "log") as program:
        program.wait_for_settled(5)
        for number, lines in enumerate(lines_between(CUTS)):
            program.wait_for_more(lines)
            # All of them, or just one: the writer goes on without the locks, and the other way round.
            ended += cut_sessions(postgres_dsn, "" if number % 2 else f"ORDER BY pid OFFSET {number % 3} LIMIT 1")
            terminal.look()
        program.wait_for_settled(5)
        with plain_session(postgres_dsn) as session:
            taken = (
                "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND (classid::bigint << 32 | objid::bigint) = %s"
            )
            program.wait_for(lambda: session.execute(taken.encode(), (lock_key("main"),)).fetchall())
        facts = program.stop()
    rows = terminal.look()
    said = judge(facts, rows)

    assert ended > CUTS
    assert (said["owns"], said["lost"], said["left"]) == (1, 0, 1)
    assert said["settled"] >= 10
    assert {row.status for row in rows.values()} <= {"completed", "failed"}
    check_database(postgres_dsn)


def test_a_killed_server_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Not by kill -9 of the server and all its processes, under load; programs go on when it is back."""
    with PostgresCluster() as cluster:
        dsn = cluster.create_database()
        terminal = Terminal(dsn)
        with (
            Besieged(dsn, tmp_path / "first", "--room", "first") as first,
            Besieged(dsn, tmp_path / "second", "--room", "second") as second,
        ):
            programs = first, second
            for program in programs:
                program.wait_for_settled(3)
            for lines in lines_between(max(3, CUTS // 4)):
                first.wait_for_more(lines)
                cluster.kill()
                cluster.start()
                terminal.look()
                for program in programs:
                    program.wait_for_settled(3)
            logs = [program.stop() for program in programs]
        rows = terminal.look()
        for log in logs:
            said = judge(log, rows)

            assert (said["owns"], said["lost"], said["left"]) == (1, 0, 1)
        assert {row.status for row in rows.values()} <= {"completed", "failed"}
        check_database(dsn)


def test_a_room_is_lost_only_to_a_newer_owner(postgres_dsn: str, other_host: list[str], tmp_path: Path) -> None:
    """R-12: two machines want one room while its locks are cut off: each epoch has one owner, who alone writes."""
    terminal = Terminal(postgres_dsn)
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Besieged(postgres_dsn, tmp_path / name, "--host", f"{name}.invalid", inside=other_host))
            for name in ("first", "second")
        ]
        for lines in lines_between(CUTS // 2):
            owned = len(owners(*(program.facts() for program in programs)))
            for attempt in count(1):
                programs[attempt % 2].wait_for_more(lines)
                cut_sessions(postgres_dsn, OF_LOCKS)
                terminal.look()
                if len(owners(*(program.facts() for program in programs))) > owned:
                    break
        at_the_end = max(owners(*(program.facts() for program in programs)))
        logs = [program.stop() for program in programs]
    rows = terminal.look()
    with plain_session(postgres_dsn) as session:
        ((newest, closed),) = session.execute("SELECT epoch, closed_at IS NOT NULL FROM spindel.rooms").fetchall()

    for epoch, (number, incarnation) in owners(*logs).items():
        ends = [fact.what for fact in logs[number] if fact.what in {"lost", "left"} and fact.run_id == incarnation]
        assert len(ends) == 1, (epoch, ends)
        # Whoever is stopped leaves in order, and the other one may open the room once more.
        assert ends == ["lost"] if epoch < at_the_end else ends == ["left"] or epoch < newest, (epoch, ends, newest)
    assert closed
    for log in logs:
        judge(log, rows)
    assert {row.status for row in rows.values()} <= {"completed", "failed", "cancelled"}
    check_database(postgres_dsn)


def test_a_client_that_was_cut_off_comes_back_to_a_lost_room(cable: Cable, tmp_path: Path) -> None:
    """R-12: cut off over TCP and taken over meanwhile, it is refused, cancels its Runs, and has changed no row since.

    While it is cut off it doesn't hang: its writes are refused within its own time-outs, and its lock ends by those
    that it has set in the server.
    """
    with PostgresCluster(settings={"listen_addresses": HERE}) as cluster:
        with (cluster.folder / "data" / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {THERE}/32 trust\n")
        cluster.run_sql("SELECT pg_reload_conf()")
        dsn = cluster.create_database()
        far = dsn.replace(f"host={cluster.folder}", f"host={HERE}") + f"&{QUICK}"
        terminal = Terminal(dsn)
        with Besieged(far, tmp_path / "first", "--host", "far.invalid", inside=cable.inside) as first:
            first.wait_for_settled(3)
            first.wait_for_more(int(SEED * LINES))
            cable.cut()
            first.wait_for(lambda: first.count("refused") or "not stored yet" in first.complaints, seconds=20)
            with Besieged(dsn, tmp_path / "second") as second:
                second.wait_for(lambda: second.count("owns"), seconds=20)
                (incarnation,) = (fact.run_id for fact in first.facts() if fact.what == "owns")
                second.wait_for_settled(3)
                terminal.look()
                taken_over = {key: row for key, row in read_rows(dsn).items() if str(row.incarnation) == incarnation}
                assert not first.count("lost")
                cable.mend()
                first.wait_for(lambda: first.count("lost"))
                second.wait_for_settled(3)
                (after, other) = first.stop(), second.stop()
        rows = terminal.look()
        judge(after, rows)
        said = judge(other, rows)

        assert {key: row for key, row in rows.items() if str(row.incarnation) == incarnation} == taken_over
        assert "running" not in {row.status for row in taken_over.values()}
        assert {fact.detail for fact in after if fact.what == "late"} == {"not-owner"}
        assert {fact.detail for fact in after if fact.what == "cancelled"} <= {"room-lost"}
        assert (said["lost"], said["left"]) == (0, 1)
        check_database(dsn)
