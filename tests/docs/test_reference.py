"""The pages of the reference that are written by hand name everything that the code has, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import apsw

from docs import conf
from spindel import errors, observe
from spindel.cli._main import cli as command_line
from spindel.jobs import Stage

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"


def first_column(page: str, heading: str = "\n") -> set[str]:
    """Read the names in backticks from the first column of the tables under a heading."""
    section = (REFERENCE / page).read_text().partition(heading)[2].partition("\n## ")[0]
    return {
        name
        for cell in re.findall(r"^\|([^|]*)\|", section, flags=re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    }


def test_the_catalogue_of_events_is_complete() -> None:
    kinds = [getattr(observe, name) for name in observe.__all__]
    names = {kind.name for kind in kinds if isinstance(kind, type) and issubclass(kind, observe.RoomEvent)}

    assert first_column("events.md") == names - {""}


def test_the_table_of_stages_has_what_each_does_and_what_attests_it() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in conf.myst_substitutions["stage_table"].splitlines()[2:]
    ]

    assert [row[0] for row in rows] == [f"`{stage}`" for stage in Stage]
    assert all(len(row) == 4 and all(row) for row in rows)
    assert {row[0] for row in rows if row[3] == "your word"} == {"`core`", "`adapter`"}
    assert {row[0] for row in rows if row[3] == "never held"} == {"`work`", "`done`"}


def test_every_branch_of_the_errors_has_a_row() -> None:
    branches = {
        kind.__name__ for kind in errors.SpindelError.__subclasses__() if kind.__module__ == errors.__name__
    } - {"AdmissionError"}
    rows = re.findall(r"^\| \{py:class\}`~spindel\.errors\.(\w+)`", (REFERENCE / "errors.md").read_text(), re.MULTILINE)

    assert set(rows) == branches


def test_the_tree_of_errors_draws_every_error() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    raised = {name for name in errors.__all__ if name.endswith("Error")}

    assert drawn | {"SpindelError", "AdmissionError"} == raised


def test_every_code_that_the_schema_refuses_with_has_a_row() -> None:
    schema = "".join(path.read_text() for path in (ROOT / "spindel" / "store").rglob("*.sql"))
    codes = set(re.findall(r"RAISE\s*\(\s*ABORT\s*,\s*'([^']+)'", schema, flags=re.IGNORECASE))

    assert codes
    assert codes <= first_column("errors.md", "## Codes of a refused write")


def test_the_schema_page_names_every_column() -> None:
    connection = apsw.Connection(":memory:")
    for script in sorted((ROOT / "spindel" / "store" / "_schema").glob("runs.sqlite.*.sql")):
        connection.execute(script.read_text())
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    text = (REFERENCE / "store-schema.md").read_text()
    sections = {table: text.partition(f"\n## {table}\n")[2].partition("\n## ")[0] for table in tables}
    missing = [
        f"{table}.{column}"
        for table in tables
        for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
        if f"`{column}`" not in sections[table]
    ]

    assert tables
    assert not missing


def test_the_command_line_page_names_every_command_and_option() -> None:
    text = (REFERENCE / "command-line.md").read_text()
    sections: dict[str, str] = dict(re.findall(r"\n## spindel (\w+)\n(.*?)(?=\n## |\Z)", text, re.DOTALL))
    missing = [
        f"{name} {option}"
        for name, command in command_line.commands.items()
        for parameter in command.params
        if parameter.name != "help"
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--") and option not in sections.get(name, "")
    ]

    assert set(sections) == set(command_line.commands)
    assert not missing
