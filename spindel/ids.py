"""Identifiers: time-ordered ids from an injected source, and witnesses computed from them.

Ids are UUIDs of version 7 (RFC 9562): 48 bits of milliseconds, 12 bits that count within the millisecond, 62
random bits. One source never gives a smaller id than before, even if the wall clock steps back.

A witness is the UUID of version 5 of `v1|<stage>|<run id>` in a namespace of our own: anyone can compute it again.
"""

from __future__ import annotations

import hashlib
import random
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NewType
from uuid import UUID, SafeUUID

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "WITNESS_NAMESPACE",
    "IdSource",
    "LaunchId",
    "LeaseId",
    "Revision",
    "RunId",
    "WitnessStage",
    "parse_uuid",
    "witness_id",
    "witness_text",
]

RunId = NewType("RunId", UUID)
LeaseId = NewType("LeaseId", UUID)
LaunchId = NewType("LaunchId", UUID)
Revision = NewType("Revision", UUID)

WITNESS_NAMESPACE: Final = UUID("f6982a44-27d9-53e2-89e3-4b9a90bcc775")

_new = object.__new__
_set = object.__setattr__
_SAFE: Final = SafeUUID.unknown
_VERSION_5: Final = 0x5 << 76
_VERSION_7: Final = 0x7 << 76
_VARIANT: Final = 0x2 << 62
# What of a version 5 is the hash's own: neither version nor variant.
_HASHED_BITS: Final = (1 << 128) - 1 ^ 0xF << 76 ^ 0x3 << 62
_RANDOM_BITS: Final = 62
_COUNTER_MAX: Final = 0xFFF


def _uuid_of(number: int) -> UUID:
    """Build a UUID from a number known to be valid; the public constructor checks it for 1 us."""
    value = _new(UUID)
    _set(value, "int", number)
    _set(value, "is_safe", _SAFE)
    return value


def parse_uuid(text: str) -> UUID:
    """Read the canonical text of a UUID.

    Raises:
        ValueError: it is none.
    """
    return UUID(text)


class IdSource:
    """Makes time-ordered ids.

    Args:
        now_micros: gives the wall time in UTC microseconds.
        random_bits: gives so many random bits as an int; the default is seeded by the operating system.

    An id is no secret, so a general generator is good enough.
    """

    __slots__ = ("_last", "_now_micros", "_random_bits")

    def __init__(self, now_micros: Callable[[], int], random_bits: Callable[[int], int] | None = None) -> None:
        self._now_micros = now_micros
        self._random_bits = random.Random().getrandbits if random_bits is None else random_bits  # noqa: S311  ids are no secrets
        self._last = 0

    def next_uuid(self) -> UUID:
        """Give the next id, greater than every earlier one of this source."""
        micros = self._now_micros()
        milliseconds, rest = divmod(micros, 1000)
        # The counter field starts at the microseconds within the millisecond and counts on from there, so ids of
        # one source are ordered; a counter that runs over borrows from the next millisecond.
        stamp = (milliseconds << 12) | (rest << 2)
        if stamp <= self._last:
            stamp = self._last + 1
        self._last = stamp
        return _uuid_of(
            ((stamp >> 12) << 80)
            | _VERSION_7
            | ((stamp & _COUNTER_MAX) << 64)
            | _VARIANT << 0
            | self._random_bits(_RANDOM_BITS)
        )


class WitnessStage(StrEnum):
    """The boundaries that have a durable witness."""

    FAMILY_RETURN = "family-return"
    CORE_CLEANUP = "core-cleanup"
    ADAPTER_CLEANUP = "adapter-cleanup"


def _prefix_hash(stage: WitnessStage) -> hashlib._Hash:
    prefix = WITNESS_NAMESPACE.bytes + f"v1|{stage.value}|".encode()
    return hashlib.sha1(prefix, usedforsecurity=False)


# Hashed once: a copy of the prefix costs a third of the library's uuid5.
_PREFIXES: Final = {stage: _prefix_hash(stage) for stage in WitnessStage}

# The two highest bits of that digit tell the variant; the lower ones are the hash's own.
_VARIANT_DIGITS: Final = {f"{digit:x}": f"{8 | digit & 3:x}" for digit in range(16)}


def witness_id(stage: WitnessStage, run_id: UUID) -> UUID:
    """Compute the witness of a stage of a Run.

    It is a pure function of both, so holding one is evidence only where the store says that it was written.
    """
    digest = _PREFIXES[stage].copy()
    digest.update(str(run_id).encode())
    number = int.from_bytes(digest.digest()[:16], "big")
    return _uuid_of(number & _HASHED_BITS | _VERSION_5 | _VARIANT)


def witness_text(stage: WitnessStage, run_id: str) -> str:
    """Give the text of `witness_id` for the canonical text of a Run's id, at a third of the cost of both objects."""
    digest = _PREFIXES[stage].copy()
    digest.update(run_id.encode())
    text = digest.hexdigest()
    return f"{text[:8]}-{text[8:12]}-5{text[13:16]}-{_VARIANT_DIGITS[text[16]]}{text[17:20]}-{text[20:32]}"
