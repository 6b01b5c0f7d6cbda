"""From what a user writes to a function, and the sentences for what is none."""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from spindel.cli._exit import CommandError
from spindel.cli._target import check_arguments, load_target
from tests.cli.commands import PROGRAM

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program, and an interpreter that forgets what it imported."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text("def broken(:\n")
    (tmp_path / "needy.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "exits.py").write_text("raise SystemExit('no')\n")
    (tmp_path / "loud.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "json.py").write_text("async def main(run): pass\n")
    (tmp_path / "beside.py").write_text("from neighbour import main\n")
    (tmp_path / "neighbour.py").write_text("async def main(run): pass\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text("async def main(run): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def refusal(action: Callable[..., object], *args: object) -> str:
    with pytest.raises(CommandError) as caught:
        action(*args)
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize(
    "target", ["program.py:echo", "./program.py:echo", "program:echo", "package.inner:main", "beside.py:main"]
)
def test_a_file_or_a_module_gives_its_function(target: str) -> None:
    assert load_target(target).function.__name__ == target.rpartition(":")[2]


def test_a_file_that_is_named_like_a_loaded_module_leaves_that_module_alone() -> None:
    assert load_target("json.py:main").function.__name__ == "main"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("program.py", "names no function; write package.module:function or path/file.py:function"),
        (":main", "names no function"),
        ("program.py:", "names no function"),
        ("absent.py:main", "there is no file absent.py"),
        ("absent:main", "there is no module absent"),
        ("package.absent:main", "there is no module package.absent"),
        ("program.py:ecko", "has no function ecko; did you mean echo?"),
        ("program.py:zzz", "has no function zzz."),
        ("program.py:plain", "is not async; write async def plain(run, *args)"),
        ("program.py:generator", "is an async generator; write async def generator(run, *args)"),
        ("program.py:number", "is no function"),
        ("wrong.py:main", "can't be imported: SyntaxError: invalid syntax, line 1"),
        ("needy.py:main", "can't be imported: ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("needy:main", "can't be imported: ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("exits.py:main", "can't be imported: SystemExit: no"),
        ("loud.py:main", "can't be imported: RuntimeError: not today"),
    ],
)
def test_what_is_no_async_function_is_told_in_one_sentence(target: str, sentence: str) -> None:
    message = refusal(load_target, target)

    assert sentence in message
    assert "\n" not in message


async def two(run: Any, first: str, second: str) -> None: ...


async def optional(run: Any, first: str, second: str = "") -> None: ...


async def endless(run: Any, first: str, *rest: str) -> None: ...


async def anything(*everything: Any) -> None: ...


async def alone(run: Any) -> None: ...


async def keyword(run: Any, *, needed: str) -> None: ...


async def without_run() -> None: ...


@pytest.mark.parametrize(
    ("function", "count"),
    [(two, 2), (optional, 1), (optional, 2), (endless, 1), (endless, 9), (anything, 0), (alone, 0)],
)
def test_arguments_that_fit_pass(function: Any, count: int) -> None:
    check_arguments(function, "file.py:function", ["x"] * count)


def test_arguments_of_a_partial_function_are_what_is_left() -> None:
    check_arguments(functools.partial(two, second="x"), "file.py:function", ["x"])


@pytest.mark.parametrize(
    ("function", "count", "sentence"),
    [
        (two, 0, "takes 2 arguments after its Run (first, second); 0 given."),
        (two, 3, "takes 2 arguments after its Run (first, second); 3 given."),
        (optional, 0, "takes 1 to 2 arguments after its Run (first, second); 0 given."),
        (endless, 0, "takes at least 1 argument after its Run (first); 0 given."),
        (alone, 1, "takes no argument after its Run; 1 given."),
        (keyword, 0, "needs the keyword needed, which a command line can't give"),
        (without_run, 0, "takes no argument, but is given its Run; write async def function(run)."),
    ],
)
def test_arguments_that_do_not_fit_are_told_with_their_names(function: Any, count: int, sentence: str) -> None:
    assert sentence in refusal(check_arguments, function, "file.py:function", ["x"] * count)
