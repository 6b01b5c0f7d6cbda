"""The shape of the repository: what a newcomer relies on and nobody looks at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRAGMENTS = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"]
BY_NEED = {"agreement", "benchmarks", "crash", "docs", "mutations", "typing"}


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_a_changelog_fragment_has_a_name_that_is_compiled_and_a_text(path: Path) -> None:
    assert re.fullmatch(r"(\d+|\+[a-z0-9-]+)\.(added|changed|fixed|removed|breaking)\.md", path.name)
    assert path.read_text().strip()


def test_test_folders_mirror_the_package_or_stand_for_a_need() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/*.py")}
    packages = {path.parent.name for path in (ROOT / "spindel").glob("*/__init__.py")}

    assert folders <= packages | BY_NEED


def test_the_readme_has_two_commands_that_make_their_own_environment() -> None:
    commands = re.findall(r"^python3 -m venv \.venv && .*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)

    assert len(commands) == 2
    assert all(".venv/bin/python -m pip install" in command for command in commands)
    assert sorted("[test]" in command for command in commands) == [False, True]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#]+)[^)]*\)", page.read_text())
    dead = [target for target in targets if not (page.parent / target).exists()]

    assert not dead
