"""What a start may say about its Run, and the checks of it, before anything happens."""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypedDict, TypeVar, cast
from uuid import UUID

import attrs

from spindel.codec import NotPortableError, encode_json
from spindel.errors import InvalidRecordError
from spindel.runs._preparation import Preparation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from spindel.codec import JsonValue
    from spindel.ids import RunId
    from spindel.runs._finishing import Finisher
    from spindel.runs._outcome import Outcome

__all__ = ["Child", "Particulars", "RunOptions", "check_body", "check_options", "check_run_id"]

R = TypeVar("R")

_NAME_CHARACTERS_MAX: Final = 200
_NO_PROVENANCE: Final = "{}"


class RunOptions(TypedDict, total=False):
    """The keyword options of every start.

    `run_id`: the Run's id, fresh by default. `kind`, `actor`: what it is and for whom it runs, 1 to 200 characters;
    `actor` defaults to the parent's. `trigger_id`: what caused the start, for the record only. `provenance`:
    portable data for the record. `prepare`: constructs what the Run needs before its first row; its value is
    `run.resource`. `publish`: an async function of the outcome that runs on the pool after the Run has
    ended, and which the parent waits for; it must be idempotent. `context`: the body runs in a copy of it instead of
    a copy of the starter's. `on_child_failure`: `isolate` (default) or `cancel`. `finisher`: for layers above.
    """

    run_id: RunId
    kind: str
    actor: str
    trigger_id: UUID
    provenance: Mapping[str, JsonValue]
    prepare: Preparation[Any]
    publish: Callable[[Outcome[Any]], Awaitable[None]]
    context: Context
    on_child_failure: Literal["isolate", "cancel"]
    finisher: Finisher


@attrs.frozen
class Child(Generic[R]):
    """One of the children of `Run.start_children`.

    Attributes:
        fn: an async function of the Run and `args`.
        args: its further arguments.
        options: see `RunOptions`.
    """

    fn: Callable[..., Awaitable[R]]
    args: tuple[Any, ...] = ()
    options: RunOptions = attrs.field(factory=lambda: cast("RunOptions", {}))

    @classmethod
    def of(cls, fn: Callable[..., Awaitable[R]], *args: Any, **options: Any) -> Child[R]:
        """Write a child as one would write a start: `Child.of(fn, *args, kind="page")`."""
        return cls(fn, args, cast("RunOptions", options))


@attrs.frozen
class Particulars:
    """Checked options, with defaults filled in where they don't depend on the parent."""

    kind: str
    actor: str | None
    trigger_id: UUID | None
    provenance: str
    prepare: Preparation[Any] | None
    publish: Callable[[Outcome[Any]], Awaitable[None]] | None
    context: Context | None
    on_child_failure: str
    finisher: Finisher | None


PLAIN: Final = Particulars("run", None, None, _NO_PROVENANCE, None, None, None, "isolate", None)
_KNOWN: Final = frozenset(RunOptions.__optional_keys__)


def check_options(options: RunOptions) -> Particulars:
    """Check a start's options.

    Raises:
        InvalidRecordError: an unknown option, or a value that no record may hold; it names the option.
    """
    if not options:
        return PLAIN
    for key in options:
        if key not in _KNOWN:
            raise InvalidRecordError(key, f"is no option of a start; there are {', '.join(sorted(_KNOWN))}")
    _check_ids(options)
    policy = options.get("on_child_failure", "isolate")
    if policy not in ("isolate", "cancel"):
        raise InvalidRecordError("on_child_failure", f"{policy!r} is neither 'isolate' nor 'cancel'")
    _check_live_things(options)
    return Particulars(
        _check_name("kind", options.get("kind", PLAIN.kind)),
        _check_name("actor", options["actor"]) if "actor" in options else None,
        options.get("trigger_id"),
        _check_provenance(options.get("provenance")),
        options.get("prepare"),
        options.get("publish"),
        options.get("context"),
        policy,
        options.get("finisher"),
    )


def _check_ids(options: RunOptions) -> None:
    if "run_id" in options:
        check_run_id(options["run_id"])
    trigger_id = options.get("trigger_id")
    if trigger_id is not None and not isinstance(trigger_id, UUID):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRecordError("trigger_id", f"{trigger_id!r} is no UUID")


def _check_live_things(options: RunOptions) -> None:
    """Check what is called or entered after the row is stored, when nothing may raise any more."""
    preparation = options.get("prepare")
    if preparation is not None and not isinstance(preparation, Preparation):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRecordError("prepare", f"a {type(preparation).__name__} is no Preparation; wrap it in prepare()")
    publish = options.get("publish")
    if publish is not None and not callable(publish):
        raise InvalidRecordError("publish", f"a {type(publish).__name__} is no async function")
    context = options.get("context")
    if context is not None and not isinstance(context, Context):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRecordError("context", f"a {type(context).__name__} is no Context")
    finisher = options.get("finisher")
    if finisher is not None and not callable(getattr(finisher, "finish", None)):
        raise InvalidRecordError("finisher", f"a {type(finisher).__name__} has no method finish")


def check_body(fn: object) -> None:
    """Refuse what can't be called, before anything is stored; whether it is async shows only when it runs.

    Raises:
        InvalidRecordError: it isn't callable.
    """
    if not callable(fn):
        raise InvalidRecordError("fn", f"a {type(fn).__name__} is no async function")


def check_run_id(run_id: object) -> RunId:
    """Give the id back.

    Raises:
        InvalidRecordError: it is no UUID.
    """
    if not isinstance(run_id, UUID):
        raise InvalidRecordError("run_id", f"{run_id!r} is no UUID")
    return cast("RunId", run_id)


def _check_name(key: str, name: object) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_CHARACTERS_MAX or "\0" in name:
        raise InvalidRecordError(key, f"{name!r} is not 1 to {_NAME_CHARACTERS_MAX} characters of text")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidRecordError(key, f"{name!r} is not valid Unicode text") from None
    # A member of an enumeration of texts is a fine name; rows hold its text.
    return str.__str__(name)


def _check_provenance(provenance: object) -> str:
    if provenance is None:
        return _NO_PROVENANCE
    if not hasattr(provenance, "items"):
        raise InvalidRecordError("provenance", f"a {type(provenance).__name__} is no mapping")
    try:
        return encode_json(provenance)
    except NotPortableError as error:
        path = f"provenance.{error.path}" if error.path else "provenance"
        raise InvalidRecordError(path, error.problem) from error
