"""Scenarios by name, for the command and the suite. A layer that brings a scenario of its own registers it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spindel.testing.simulation._world import World

__all__ = ["SCENARIOS", "Registered", "find_scenario", "scenario"]


@attrs.frozen
class Registered:
    """A scenario that the command knows.

    Attributes:
        name: for `--scenario`.
        play: the program.
        steps: how many steps it takes at most, by default.
        about: its first line of documentation.
    """

    name: str
    play: Callable[[World], Awaitable[object]]
    steps: int
    about: str


SCENARIOS: dict[str, Registered] = {}
"""All that were registered, by name."""


def scenario(name: str, *, steps: int = 12) -> Callable[[Any], Any]:
    """Register the decorated async function of a `World` under a name.

    Args:
        name: for `--scenario`.
        steps: how many steps it takes at most.
    """

    def register(play: Callable[[World], Awaitable[object]]) -> Callable[[World], Awaitable[object]]:
        SCENARIOS[name] = Registered(name, play, steps, (play.__doc__ or "").strip().partition("\n")[0])
        return play

    return register


def find_scenario(name: str) -> Registered:
    """Give a registered scenario, or `module:function` of anybody's.

    Raises:
        LookupError: there is none of that name.
    """
    if name in SCENARIOS:
        return SCENARIOS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise LookupError(f"no scenario {name!r}; there are {', '.join(sorted(SCENARIOS))}, or name module:function")
    try:
        play = getattr(import_module(module), function)
    except (ImportError, AttributeError) as problem:
        raise LookupError(f"no scenario {name!r}: {problem}") from problem
    return next(
        (known for known in SCENARIOS.values() if known.play is play),
        Registered(name, play, 12, (play.__doc__ or "").strip().partition("\n")[0]),
    )
