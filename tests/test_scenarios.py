"""Does the list of scenarios tell the truth about the tests?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "scenarios.md"
# The contract suite is shipped to users, so its tests stand in the package.
TEST_FOLDERS = (ROOT / "tests", ROOT / "spindel" / "testing")
NAME = re.compile(r"\b[RJHC]-\d{2,3}\b")


def named_by_tests() -> set[str]:
    """Collect the scenarios in the docstrings of test functions and test classes."""
    names: set[str] = set()
    for path in (path for folder in TEST_FOLDERS for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name.lower().startswith(
                "test"
            ):
                names.update(NAME.findall(ast.get_docstring(node) or ""))
    return names


def listed() -> list[str]:
    """Read the first column of the page's tables."""
    return re.findall(r"^\| ([RJHC]-\d+) \| \S.*\.", PAGE.read_text(), flags=re.MULTILINE)


def open_on_the_page() -> set[str]:
    """Read the section of what no test proves yet."""
    section = PAGE.read_text().partition("## Not covered yet")[2].partition("\n## ")[0]
    return set(NAME.findall(section))


def test_every_scenario_is_listed_once_with_a_sentence() -> None:
    names = listed()

    assert sorted(names) == sorted(set(names))
    assert {f"R-{number:02}" for number in range(1, 89)} <= set(names)


def test_every_scenario_that_a_test_names_is_listed() -> None:
    assert named_by_tests() <= set(listed())


def test_the_list_of_scenarios_without_a_test_is_exact() -> None:
    missing = sorted(set(listed()) - named_by_tests())
    lines = [" ".join(missing[start : start + 10]) for start in range(0, len(missing), 10)]

    assert sorted(open_on_the_page()) == missing, (
        f"under 'Not covered yet' in {PAGE.name} should stand:\n\n" + "\n".join(lines)
    )
