"""From `package.module:function` or `path/file.py:function` to what is run, before anything is opened."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from spindel.cli._exit import CommandError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import ModuleType

    # What it is called with is checked here; what it returns is the user's.
    Function: TypeAlias = Callable[..., Awaitable[Any]]

__all__ = ["Target", "check_arguments", "load_target"]

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CALLBACKS: Final = ("before_finish", "on_settled")
_FORM: Final = "write package.module:function or path/file.py:function"


class Target(NamedTuple):
    """What is to be run.

    Attributes:
        before_finish, on_settled: the functions of these names beside it, or None.
    """

    function: Function
    before_finish: Function | None = None
    on_settled: Function | None = None


def load_target(target: str) -> Target:
    """Import the target and give its function, with the cleanup that stands beside it.

    Raises:
        CommandError: there is no such thing, or it is no async function.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise CommandError(f"{target!r} names no function; {_FORM}.")
    is_file = place.endswith(".py") or "/" in place
    module = _import(place, _import_file if is_file else _import_module)
    function = _find_function(module, place, name)
    return Target(function, *(_find_callback(module, place, beside, function) for beside in _CALLBACKS))


def check_arguments(function: Function, target: str, arguments: Sequence[str]) -> None:
    """Check that `function(run, *arguments)` is a call that its signature takes.

    Raises:
        CommandError: it isn't.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # something compiled that doesn't tell
        return
    parameters = signature.parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    needed = [name for name in needed if signature.parameters[name].default is inspect.Parameter.empty]
    if needed:
        raise CommandError(
            f"{target} needs the keyword {', '.join(needed)}, which a command line can't give; give it a default."
        )
    places = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    endless = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if not places and not endless:
        raise CommandError(
            f"{target} takes no argument, but is given its Run; write async def {target.rpartition(':')[2]}(run)."
        )
    names = [parameter.name for parameter in places[1:]]
    required = sum(1 for parameter in places[1:] if parameter.default is inspect.Parameter.empty)
    if len(arguments) < required or (not endless and len(arguments) > len(names)):
        listed = f" ({', '.join(names)})" if names else ""
        amount = _amount(required, len(names), endless=endless)
        raise CommandError(f"{target} takes {amount} after its Run{listed}; {len(arguments)} given.")


def _amount(least: int, most: int, *, endless: bool) -> str:
    if endless:
        return f"at least {_arguments(least)}" if least else "any number of arguments"
    if least == most:
        return _arguments(least) if least else "no argument"
    return f"{least} to {_arguments(most)}"


def _arguments(count: int) -> str:
    return f"{count} argument{'' if count == 1 else 's'}"


def _import(place: str, importer: Callable[[str], ModuleType]) -> ModuleType:
    try:
        return importer(place)
    except CommandError:
        raise
    except (Exception, SystemExit) as problem:
        where = f", line {problem.lineno}" if isinstance(problem, SyntaxError) else ""
        text = problem.msg if isinstance(problem, SyntaxError) else problem
        raise CommandError(f"{place} can't be imported: {type(problem).__name__}: {text}{where}.") from problem


def _import_module(name: str) -> ModuleType:
    # As `python -m` does, and a script's own folder is none that a user means.
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):
            raise  # something that the module itself imports
        raise CommandError(f"there is no module {problem.name} here or among what is installed; {_FORM}.") from problem


def _import_file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise CommandError(f"there is no file {place}; {_FORM}.")
    # As for a script: what lies beside the file can be imported.
    sys.path.insert(0, str(path.parent.absolute()))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"spindel target {path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise CommandError(f"{place} is no Python file; {_FORM}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _find_function(module: ModuleType, place: str, name: str) -> Function:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        near = get_close_matches(name, [known for known in vars(module) if callable(vars(module)[known])], 1)
        raise CommandError(f"{place} has no function {name}{f'; did you mean {near[0]}?' if near else '.'}")
    if not _is_async(found):
        what = (
            "an async generator"
            if inspect.isasyncgenfunction(found)
            else "not async"
            if callable(found)
            else "no function"
        )
        raise CommandError(f"{place}:{name} is {what}; write async def {name}(run, *args).")
    function: Function = found
    return function


def _find_callback(module: ModuleType, place: str, name: str, target: Function) -> Function | None:
    """Give the cleanup of that name in the target's module, None if there is none."""
    found: Any = getattr(module, name, None)
    if found is None or found is target:
        return None
    if not _is_async(found) or not _takes_one(found):
        raise CommandError(
            f"{place} has a {name} that can't clean up after its Run; write async def {name}(outcome), or rename it."
        )
    callback: Function = found
    return callback


def _is_async(found: Any) -> bool:
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004  the method is what is looked at


def _takes_one(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # something compiled that doesn't tell
        return True
    return True
