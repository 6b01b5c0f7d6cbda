"""A service whose cleanup fails at random, until an operator has seen to all of it: one Job for each order.

    python docs/examples/orders.py shop &
    python docs/examples/orders_operator.py shop

An order is packed at a place of its own at the bench. When it has been packed, its place is cleared (`before_finish`)
and its customer is told (`on_settled`). Both go wrong half of the time, in one of two ways that look the same from
inside: nothing has happened, or it has happened and the answer was lost. So no program can know whether to repeat them,
and each that went wrong is held until somebody looks. In the folder an operator can see what there is:

    shop/orders.db      the room
    shop/door           the operators' socket
    shop/bench/ID       the place of an order, while it has one; ID is its Run's
    shop/told.txt       a line with its ID for each customer that was told; twice told is a complaint

The service ends by itself when each order is settled, and leaves with 0. SIGINT or SIGTERM closes it: nothing new is
begun and what is at work is cancelled, but what is held keeps it open, and is named; it leaves with 130 or 143 when
that, too, is settled. A second signal gives up what is held, and it leaves with 3.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from spindel import Outcome, Run, open_room
from spindel.control import open_control
from spindel.errors import AdmissionError, RoomCloseRefusedError, RunAbandonedError
from spindel.jobs import start_job
from spindel.operator import abandon_held

if TYPE_CHECKING:
    from spindel import Room

PLACES: Final = 32  # at the bench; a held order doesn't keep the next one from being packed
GRACE_SECONDS: Final = 1.0
NAMED_MAX: Final = 5


@dataclass
class Shop:
    """What all orders share."""

    folder: Path
    orders: int
    failures: float
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    settled: int = 0
    given_up: int = 0
    closed_by: signal.Signals | None = None

    def draw(self, *what: object) -> float:
        """Give a number from 0 to 1, the same for the same question, in whatever order they are asked."""
        digest = hashlib.blake2b(repr((self.seed, *what)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


class SoldOutError(Exception):
    """An order that can't be packed; it is cleaned up after like any other."""


class Order:
    """One order: its work and the two parts of its cleanup."""

    def __init__(self, shop: Shop, number: int) -> None:
        self._shop = shop
        self._number = number
        self._id = ""
        self._calls: Counter[str] = Counter()

    async def pack(self, run: Run[int]) -> int:
        """Do the work, at a place that bears the Run's id, so that whoever finds it knows whose it is."""
        self._id = str(run.id)
        await trio.Path(self._shop.folder, "bench", self._id).mkdir()
        await trio.sleep(self._shop.draw(self._number, "weight") / 50)
        if self._shop.draw(self._number, "stock") < 0.05:
            raise SoldOutError(f"order {self._number}")
        return self._number

    async def clear_place(self, outcome: Outcome[int]) -> None:  # noqa: ARG002  packed or not, the place is cleared
        """Give the place back. Repeated after it was given back, it fails: there is no place any more."""
        answer = self._begin("clear")
        await trio.Path(self._shop.folder, "bench", self._id).rmdir()
        answer()

    async def tell_customer(self, outcome: Outcome[int]) -> None:  # noqa: ARG002  packed or not, the customer waits
        """Tell the customer. Repeated, it is told again."""
        answer = self._begin("tell")
        async with await trio.open_file(self._shop.folder / "told.txt", "a") as told:
            await told.write(f"{self._id}\n")
        answer()

    def _begin(self, what: str) -> _Answer:
        """Fail before anything has happened, or arrange that the answer is lost, or neither."""
        self._calls[what] += 1
        luck = self._shop.draw(self._number, what, self._calls[what])
        if luck < self._shop.failures / 2:
            raise ConnectionError("nobody was reached")
        return _Answer(lost=luck < self._shop.failures)


@dataclass
class _Answer:
    lost: bool

    def __call__(self) -> None:
        if self.lost:
            raise TimeoutError("no answer came")


async def serve(shop: Shop) -> int:
    """Run the service to its end; gives its exit code."""
    async with trio.open_nursery() as beside:
        # Signals and counts are beside the room, since they are needed until it has ended, whatever its block raises.
        async with (
            open_room(shop.folder / "orders.db", name="shop") as room,
            open_control(room, shop.folder / "door"),
            trio.open_nursery() as nursery,
        ):
            await beside.start(obey_signals, shop, room)  # noqa: ASYNC111  a closed room holds nothing
            beside.start_soon(show, shop, room)  # noqa: ASYNC111  as above
            say(f"open: spindel held --control {shop.folder / 'door'}")
            places = trio.Semaphore(PLACES)
            for number in range(shop.orders):
                await places.acquire()
                nursery.start_soon(fulfil, shop, room, Order(shop, number), places)
        beside.cancel_scope.cancel()
    say(describe(shop, held=0))
    outcomes = ", ".join(f"{count:,} {status}" for status, count in sorted(shop.counts.items()))
    print(f"{shop.settled:,} orders settled ({outcomes or 'none'}), {shop.given_up:,} given up")
    if shop.given_up:
        return 3
    return 0 if shop.closed_by is None else 128 + shop.closed_by


async def fulfil(shop: Shop, room: Room, order: Order, places: trio.Semaphore) -> None:
    """See one order through. Its place in the queue is free again once it is held: others needn't wait for operators."""
    try:
        job = await start_job(
            room, order.pack, kind="order", before_finish=order.clear_place, on_settled=order.tell_customer
        )
        await job.wait_done_or_held()
    except AdmissionError:
        if shop.closed_by is None:
            raise
        return  # it came after the shop had closed; it was never begun
    finally:
        places.release()
    try:
        outcome = await job.outcome()
    except RunAbandonedError:
        shop.given_up += 1
    else:
        shop.counts[outcome.status] += 1
        shop.settled += job.view().settled


async def obey_signals(shop: Shop, room: Room, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Close the shop at the first signal, give up what is held at each further one."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if shop.closed_by is None:
                    shop.closed_by = signal.Signals(number)
                    nursery.start_soon(close, shop, room)
                else:
                    abandon_held(room)


async def close(shop: Shop, room: Room) -> None:
    """Try to close the room; say what keeps it open."""
    try:
        await room.close(grace_seconds=GRACE_SECONDS)
    except RoomCloseRefusedError as refused:
        say(f"can't close yet: {len(refused.held):,} held")
        for hold in room.held()[:NAMED_MAX]:
            say(f"  order {hold.run_id} at {hold.phase}: {hold.code}")
        say(f"recover them (spindel held --control {shop.folder / 'door'}), or give them up by another signal")


async def show(shop: Shop, room: Room) -> None:
    """Say how far it is, once a second if that has changed."""
    told = ""
    while True:
        text = describe(shop, held=len(room.held()))
        if text != told:
            say(text)
        told = text
        await trio.sleep(1)


def describe(shop: Shop, held: int) -> str:
    """Say how far it is."""
    return f"{shop.settled:,} of {shop.orders:,} settled, {held:,} held"


def say(text: str) -> None:
    """Say something to whoever watches."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description="Pack orders; see the head of this file.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--failures", type=float, default=0.5, help="the share of cleanup that fails")
    parser.add_argument("--seed", type=int, default=0, help="of what fails")
    options = parser.parse_args()
    shop = Shop(options.folder, options.orders, options.failures, options.seed)
    os.makedirs(shop.folder / "bench", exist_ok=True)
    (shop.folder / "told.txt").touch()
    logging.basicConfig(filename=shop.folder / "orders.log", format="%(asctime)s %(levelname)s %(message)s")
    return trio.run(serve, shop)


if __name__ == "__main__":
    sys.exit(main())
