"""What a power cut leaves of a store: everything that was acknowledged, nothing that was refused."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import apsw
import attrs
import pytest

from spindel.errors import RefusedError, SpindelError, UnknownOutcomeError, WriteRefusedError, WriteUncertainError
from spindel.ids import RunId, WitnessStage, witness_id
from spindel.store._contract import Confirmation
from spindel.store._mutations import AdmitRun, FinishRun
from spindel.store._records import RunStatus
from spindel.store._sqlite import SqliteStore
from spindel.testing.powerloss import PowerLossVFS
from spindel.testing.store_contract import open_commands

if TYPE_CHECKING:
    from pathlib import Path

CRASHES = 200


@attrs.define
class Told:
    """What a program was told before its power failed."""

    acknowledged: list[AdmitRun | FinishRun] = attrs.Factory(list)
    refused: list[AdmitRun | FinishRun] = attrs.Factory(list)


@attrs.define
class Reality:
    """What a reboot found: the file's own check, and which acknowledgements were lies."""

    intact: bool
    lost: int = 0
    revived: int = 0


async def run_until_power_fails(path: Path, vfs: PowerLossVFS, cut_after: int, told: Told) -> None:
    """Open, claim, and write batches of Runs with their ends, until a write is refused or 24 batches are written."""
    vfs.cut_power(cut_after)
    with suppress(RefusedError, UnknownOutcomeError):
        async with SqliteStore(path, executor="inline", vfs=vfs.name) as store, open_commands(store) as room:
            for size in range(24):
                runs = [room.admit() for _ in range(1 + size % 7)]
                batch: list[AdmitRun | FinishRun] = [*runs, *(room.finish(run) for run in runs[1:])]
                for mutation, result in zip(batch, await store.write_each(batch), strict=True):
                    if isinstance(result, WriteRefusedError):
                        told.refused.append(mutation)
                    elif not isinstance(result, WriteUncertainError):
                        told.acknowledged.append(mutation)
                # One batch more meets a disk that is known to be dead.
                if told.refused:
                    return


async def look(path: Path, told: Told) -> Reality:
    """Open what is left, as a new file if nothing is, on a disk that does not really wait for syncs; compare."""
    vfs = PowerLossVFS()
    try:
        connection = apsw.Connection(str(path), vfs=vfs.name)
        intact = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
        reality = Reality(intact)
        async with SqliteStore(path, executor="inline", vfs=vfs.name) as store:
            for mutation in told.acknowledged:
                record = await store.load_run(mutation.room, RunId(mutation.id))
                ended = isinstance(mutation, FinishRun)
                if (
                    record is None
                    or (ended and record.status is not RunStatus.COMPLETED)
                    or (ended and record.family_return_ack != witness_id(WitnessStage.FAMILY_RETURN, mutation.id))
                ):
                    reality.lost += 1
            for mutation in told.refused:
                reality.revived += await store.confirm(mutation) is Confirmation.PRESENT
    except (apsw.Error, SpindelError):
        return Reality(intact=False)
    return reality


async def crash(folder: Path, seed: int, *, lying: bool = False) -> tuple[Told, Reality]:
    before, after = folder / f"{seed}-before", folder / f"{seed}-after"
    before.mkdir()
    after.mkdir()
    vfs = PowerLossVFS()
    vfs.lying = lying
    told = Told()
    # The seeds spread the cut over opening, migrations, claim and all batches.
    await run_until_power_fails(before / "rooms.db", vfs, 1 + (seed * 7) % 260, told)
    vfs.write_survivors(after, seed)
    return told, await look(after / "rooms.db", told)


@pytest.mark.slow
async def test_acknowledged_writes_survive_power_loss(tmp_path: Path) -> None:
    """R-01: after 200 power cuts, each at another operation, no acknowledged write is lost, none refused is there."""
    acknowledged = refused = 0
    for seed in range(CRASHES):
        told, reality = await crash(tmp_path, seed)
        acknowledged += len(told.acknowledged)
        refused += len(told.refused)

        assert reality == Reality(intact=True), f"seed {seed}"

    assert acknowledged > 10 * CRASHES, "cuts so early that there was nothing to lose prove nothing"
    assert refused, "no write ever met the dead disk"


async def test_disk_that_lies_about_syncs_loses_acknowledged_writes(tmp_path: Path) -> None:
    """R-01 can fail: with a disk that only says it has synced, the same cuts lose what was acknowledged."""
    realities = [(await crash(tmp_path, seed, lying=True))[1] for seed in range(20, 60)]

    assert any(reality.lost or not reality.intact for reality in realities)


async def test_what_is_confirmed_after_a_failed_sync_survives_power_loss(tmp_path: Path) -> None:
    """R-02 with R-01: after a sync that failed, what `confirm` calls PRESENT and what a repeat acknowledges is kept.

    The data of a failed sync can be read back and yet never reaches the disk, so reading alone proves nothing.
    """
    uncertain = 0
    for n in range(1, 40):
        before, after = tmp_path / f"{n}-before", tmp_path / f"{n}-after"
        before.mkdir()
        after.mkdir()
        vfs = PowerLossVFS()
        told = Told()
        async with (
            SqliteStore(before / "rooms.db", executor="inline", vfs=vfs.name) as store,
            open_commands(store) as room,
        ):
            vfs.fail_sync(n)
            for _ in range(40):
                run = room.admit()
                try:
                    await store.write(run)
                except WriteUncertainError:
                    uncertain += 1
                    if await store.confirm(run) is not Confirmation.PRESENT:
                        await store.write(run)
                told.acknowledged.append(run)
            vfs.cut_power()
            vfs.write_survivors(after, n)
            # The claim's own end meets the dead disk; that is no concern of this test.

        assert await look(after / "rooms.db", told) == Reality(intact=True), f"sync {n}"

    assert uncertain > 20
