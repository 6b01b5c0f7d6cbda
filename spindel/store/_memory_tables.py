"""What parts above the core keep in memory, and how a refused mutation is taken back."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from spindel.ids import RunId
    from spindel.store._records import RunRecord

__all__ = ["MemoryTable", "MemoryTables", "UndoLog"]

_ABSENT: Final = object()


class UndoLog:
    """All or none: if a block raises, what was noted in it is taken back, latest first. Blocks may nest."""

    __slots__ = ("_marks", "_notes")

    def __init__(self) -> None:
        self._notes: list[Callable[[], object]] = []
        self._marks: list[int] = []

    def note(self, take_back: Callable[[], object]) -> None:
        """Remember how to take back what is about to be done; outside any block nothing is remembered."""
        if self._marks:
            self._notes.append(take_back)

    def __enter__(self) -> None:
        self._marks.append(len(self._notes))

    def __exit__(self, exc_type: object, exc: object, tb: object) -> None:
        mark = self._marks.pop()
        if exc_type is not None:
            for take_back in reversed(self._notes[mark:]):
                take_back()
            del self._notes[mark:]
        elif not self._marks:
            # An inner block's notes still serve the outer one.
            self._notes.clear()


class MemoryTable(MutableMapping[Any, Any]):
    """A table of a part: keys and frozen values.

    A change is taken back when its mutation is refused, so put another value instead of changing one in place.
    """

    __slots__ = ("_rows", "_undo")

    def __init__(self, undo: UndoLog) -> None:
        self._rows: dict[Any, Any] = {}
        self._undo = undo

    def __getitem__(self, key: Any) -> Any:
        return self._rows[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remember(key)
        self._rows[key] = value

    def __delitem__(self, key: Any) -> None:
        self._remember(key)
        del self._rows[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _remember(self, key: Any) -> None:
        before = self._rows.get(key, _ABSENT)
        self._undo.note(
            partial(self._rows.pop, key, None) if before is _ABSENT else partial(self._rows.__setitem__, key, before)
        )


class MemoryTables:
    """What a part's functions get from the memory store: its own tables, and the Runs to read."""

    __slots__ = ("_load", "_tables", "_undo")

    def __init__(self, undo: UndoLog, load: Callable[[str, RunId], RunRecord | None]) -> None:
        self._undo = undo
        self._load = load
        self._tables: dict[str, MemoryTable] = {}

    def table(self, name: str) -> MemoryTable:
        """Give the part's table of that name, empty at first."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = MemoryTable(self._undo)
        return table

    def load_run(self, room: str, run_id: RunId) -> RunRecord | None:
        """Read a Run within the turn of the mutation."""
        return self._load(room, run_id)
