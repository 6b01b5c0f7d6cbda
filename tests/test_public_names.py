"""The public names: listed, sorted, documented, and in the reference."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import spindel

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def public_modules() -> list[str]:
    """Find every module without a private part in its path."""
    names = [module.name for module in pkgutil.walk_packages(spindel.__path__, "spindel.")]
    return ["spindel", *(name for name in names if not any(part.startswith("_") for part in name.split(".")))]


@pytest.fixture(params=public_modules())
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def exported(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", [])
    assert isinstance(names, list)
    return names


def test_the_list_of_names_is_sorted_and_without_repeats(module: ModuleType) -> None:
    names = exported(module)

    # Constants, classes, functions: the order that the linter gives an __all__.
    assert len(names) == len(set(names))
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def test_every_public_definition_of_a_module_is_listed(module: ModuleType) -> None:
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        if inspect.isclass(value) or inspect.isfunction(value)
    }

    assert defined <= set(exported(module))


def test_every_listed_name_exists_and_is_documented(module: ModuleType) -> None:
    undocumented = [
        name
        for name in exported(module)
        if inspect.isclass(value := getattr(module, name)) or inspect.isfunction(value)
        if not (value.__doc__ or "").strip()
    ]

    assert module.__doc__
    assert not undocumented


def test_every_listed_name_is_in_the_reference(module: ModuleType) -> None:
    pages = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    described = re.findall(r"^\.\. automodule:: (\S+)$", pages, flags=re.MULTILINE)
    # `automodule` shows all that a module exports, also what it only passes on.
    shown = [getattr(door, name) for door in map(importlib.import_module, described) for name in exported(door)]
    missing = [name for name in exported(module) if not any(getattr(module, name) is value for value in shown)]

    assert not missing
