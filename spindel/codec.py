"""Portable values to canonical bytes and back, and content hashes.

A portable value is None, a bool, an int of 64 bits, a finite float, a str, a list or tuple of portable values, or a
mapping from str to portable values. Nothing else ever reaches a row, an event or a snapshot.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, Union
from uuid import UUID

import msgspec

__all__ = ["JsonValue", "NotPortableError", "content_id", "decode_json", "encode_json"]

JsonValue: TypeAlias = Union[
    bool, int, float, str, "list[JsonValue]", "tuple[JsonValue, ...]", "Mapping[str, JsonValue]", None
]

DEPTH_MAX: Final = 64
_INT_LIMIT: Final = 2**63
_encoder: Final = msgspec.json.Encoder(order="sorted")
_decoder: Final = msgspec.json.Decoder()


class NotPortableError(ValueError):
    """A value that can't be stored as data.

    Attributes:
        path: where in the value it stands, such as `tags[2].owner`, or empty for the value itself.
        problem: what is wrong there.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}" if path else problem)


def encode_json(value: object) -> str:
    """Encode a portable value canonically: keys sorted, no white space.

    Raises:
        NotPortableError: it holds something that is no data, such as a function, a NaN or an endless structure.
    """
    _check(value, "", 0)
    return _encoder.encode(value).decode()


def decode_json(text: str | bytes) -> Any:
    """Decode what `encode_json` made.

    Raises:
        ValueError: the text is no JSON.
    """
    return _decoder.decode(text)


def content_id(domain: str, value: object) -> UUID:
    """Hash a portable value into a UUID of version 8, separated by domain.

    Raises:
        NotPortableError: as `encode_json`.
    """
    digest = hashlib.sha256(domain.encode() + b"\0" + encode_json(value).encode()).digest()[:16]
    number = int.from_bytes(digest, "big")
    number = number & ~(0xF000 << 64) | (8 << 76)
    number = number & ~(0xC000 << 48) | (0x8000 << 48)
    return UUID(int=number)


def _check(value: Any, path: str, depth: int) -> None:
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]  anything may come
    if value is None or kind is bool:
        return
    if kind is str:
        _check_text(value, path)
    elif kind is int:
        if not -_INT_LIMIT <= value < _INT_LIMIT:
            raise NotPortableError(path, f"{value!r} does not fit in 64 bits")
    elif kind is float:
        if not math.isfinite(value):
            raise NotPortableError(path, f"{value!r} is not a finite number")
    else:
        _check_items(value, path, depth)


def _check_items(value: Any, path: str, depth: int) -> None:
    if depth >= DEPTH_MAX:
        raise NotPortableError(path, f"nested deeper than {DEPTH_MAX} levels")
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]  anything may come
        for key, item in mapping.items():
            if type(key) is not str:
                raise NotPortableError(path, f"key {key!r} is not a str")
            _check_text(key, path)
            _check(item, f"{path}.{key}" if path else key, depth + 1)
    elif type(value) in {list, tuple}:
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    else:
        raise NotPortableError(path, f"a {type(value).__name__} is not data")


def _check_text(value: str, path: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise NotPortableError(path, f"{value!r} is not valid Unicode text") from None
