"""What a seed decides beforehand: how tasks are ordered, which writes fail, when it is cancelled, when it dies.

A plan is data, a handful of parts that each have a label such as `lost-reply@7`. So a failing schedule can be told,
played again, and made smaller by leaving parts out.
"""

from __future__ import annotations

from random import Random  # noqa: TID251  seeded: the seed that failed replays the same schedule
from typing import TYPE_CHECKING, Final, Literal

import attrs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["Faults", "Part", "Plan", "StoreKind", "draw_plan"]

StoreKind = Literal["memory", "sqlite"]

_QUIET: Final = 0.15
_SQLITE: Final = 0.15

# In the order in which they are drawn, which is part of what a seed means.
WRITE_FAULTS: Final = ("refused", "rejected", "before", "lost-reply", "late", "slow")


@attrs.frozen(kw_only=True)
class Faults:
    """How many of which faults a schedule meets at most; a seed decides how many, where, and often none at all.

    Attributes:
        refused: writes that are refused for now.
        rejected: writes that are refused for good, so that they are held.
        before: writes that are never stored, while nobody may know.
        lost_reply: writes that are stored and seem not to be.
        late: writes that seem not to be stored, and arrive when the room has been opened again.
        slow: writes that take long; what is written after them waits behind them.
        unread: readings of a write's fate that fail.
        cancels: requests to a Run, to all Runs, or to the whole program, to stop.
        crashes: kills of the process, half of them with the power, after which the program is started again.
        takeovers: moments in which another process has the room, so that this one has lost it.
        launches: launches that the worker pool's executor refuses, or takes without an answer.
    """

    refused: int = 2
    rejected: int = 1
    before: int = 2
    lost_reply: int = 2
    late: int = 1
    slow: int = 3
    unread: int = 1
    cancels: int = 3
    crashes: int = 1
    takeovers: int = 1
    launches: int = 1

    @classmethod
    def none(cls) -> Faults:
        """Give no faults: a seed then decides the order of the tasks and the times only."""
        return cls(**dict.fromkeys((field.name for field in attrs.fields(cls)), 0))

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read what `str` gives: `none`, or what differs from the default, such as `crashes=0,slow=5`.

        Raises:
            ValueError: a name is unknown, or a number is none.
        """
        faults = cls.none() if text.startswith("none") else cls()
        changes = [part for part in text.split(",") if part not in ("none", "")]
        known = {field.name for field in attrs.fields(cls)}
        numbers: dict[str, int] = {}
        for change in changes:
            name, _, number = change.partition("=")
            name = name.strip().replace("-", "_")
            if name not in known or not number.strip().isdecimal():
                raise ValueError(f"{change!r} is not NAME=NUMBER; names are {', '.join(sorted(known))}")
            numbers[name] = int(number)
        return attrs.evolve(faults, **numbers)

    def __str__(self) -> str:
        if self == Faults.none():
            return "none"
        default = Faults()
        names = [field.name for field in attrs.fields(Faults)]
        return ",".join(
            f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(default, name)
        )


@attrs.frozen
class Part:
    """One thing that goes wrong, or one step that the scenario takes.

    Attributes:
        kind: what.
        at: which write, reading, launch, step of the schedule or step of the scenario meets it, counted from 1.
        choice: a number in [0, 1) that decides its details, such as whom a cancellation hits.
    """

    kind: str
    at: int = 0
    choice: float = 0.0

    @property
    def label(self) -> str:
        """Its name for `--omit`."""
        return f"{self.kind}@{self.at}" if self.at else self.kind


@attrs.frozen(kw_only=True)
class Plan:
    """What a seed decides beforehand.

    Attributes:
        seed: the seed.
        store: what the program stores its facts in.
        parts: what goes wrong and which steps the scenario takes; `order`: tasks are ordered at random, `priorities`:
            by changing priorities; `delays`: answers of the store take time.
        omitted: labels of parts that were left out.
    """

    seed: int
    store: StoreKind
    parts: tuple[Part, ...]
    omitted: frozenset[str] = frozenset()

    def without(self, labels: Collection[str]) -> Plan:
        """Give a smaller plan."""
        left = tuple(part for part in self.parts if part.label not in labels)
        return attrs.evolve(self, parts=left, omitted=self.omitted | frozenset(labels))

    def of(self, *kinds: str) -> list[Part]:
        """Give the parts of these kinds."""
        return [part for part in self.parts if part.kind in kinds]

    def has(self, kind: str) -> bool:
        """Tell whether there is a part of that kind."""
        return any(part.kind == kind for part in self.parts)

    def stream(self, name: str) -> Random:
        """Give a source of randomness for one purpose, which no other purpose disturbs."""
        # A text, since seeding with a text hashes it in a way that no environment changes.
        return Random(f"{self.seed} {name}")  # noqa: S311  no secret


def draw_plan(seed: int, faults: Faults, steps: int, store: StoreKind | None = None) -> Plan:
    """Draw a seed's plan.

    Args:
        seed: the seed.
        faults: what may go wrong.
        steps: how many steps the scenario takes at most.
        store: None lets the seed decide.
    """
    random = Random(f"{seed} plan")  # noqa: S311  no secret
    kind: StoreKind = "sqlite" if random.random() < _SQLITE else "memory"
    parts = [Part("order")] if random.random() < 0.9 else []
    if random.random() < 0.3:
        parts.append(Part("priorities"))
    if random.random() < 0.5:
        parts.append(Part("delays"))
    count = random.randint(1, max(1, steps))
    parts.extend(Part("step", number) for number in range(1, count + 1))
    quiet = random.random() < _QUIET
    drawn = list(_draw_faults(random, faults, count))
    return Plan(seed=seed, store=store or kind, parts=(*parts, *(() if quiet else drawn)))


def _draw_faults(random: Random, faults: Faults, steps: int) -> Iterable[Part]:
    """Draw what goes wrong. Early moments are likelier: there are always fewer late ones to meet."""
    # A step of the scenario makes a few writes and some dozens of steps of tasks; close is good enough.
    writes, turns = 3 * steps + 4, 15 * steps + 60
    for kind in WRITE_FAULTS:
        yield from _draw(random, kind, getattr(faults, kind.replace("-", "_")), writes)
    yield from _draw(random, "unread", faults.unread, 4)
    yield from _draw(random, "launch", faults.launches, steps + 2)
    yield from _draw(random, "cancel", faults.cancels, turns)
    yield from _draw(random, "crash", faults.crashes, turns)
    yield from _draw(random, "takeover", faults.takeovers, 2 * turns)


def _draw(random: Random, kind: str, most: int, span: int) -> Iterable[Part]:
    # Half of the schedules have none of a kind, so that few faults meet at a time and each is seen alone, too.
    number = random.randint(1, most) if most and random.random() < 0.5 else 0
    places = {1 + int(span * random.random() * random.random()): random.random() for _ in range(number)}
    for at, choice in sorted(places.items()):
        yield Part(kind, at, choice)
