"""Values as text for a terminal. Names come from anywhere, so nothing of them may steer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["clip", "describe_counts", "describe_name", "printable", "printable_lines", "seconds"]

_ORDER: Final = ("running", "cancelling", "waiting", "completed", "failed", "cancelled")


def printable(text: str) -> str:
    """Escape everything that a terminal would obey or can't show, line ends among it."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def printable_lines(text: str) -> str:
    """Escape as `printable` does, but keep the lines."""
    return "\n".join(map(printable, text.split("\n")))


def clip(text: str, characters_max: int) -> str:
    """Shorten a text to so many characters, with a mark where it was cut."""
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def seconds(duration: float) -> str:
    """Write a duration so that it can be read at a glance."""
    if duration < 60:
        return f"{duration:.1f} s" if duration >= 0.05 else f"{duration * 1000:.0f} ms"
    minutes, rest = divmod(int(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Write how many Runs have each status, in a fixed order."""
    return ", ".join(f"{counts[status]:,} {status}" for status in _ORDER if counts.get(status)) or "none"


def describe_name(kind: str, provenance: Mapping[str, object]) -> str:
    """Name a Run for people: its kind, and what its starter put under `name` in the provenance."""
    name = provenance.get("name")
    return printable(kind) if not isinstance(name, str) or not name else f"{printable(kind)} {printable(name)}"
