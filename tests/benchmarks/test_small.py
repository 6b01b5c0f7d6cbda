"""Every benchmark works, does what it says that it does, and says nothing else on standard output.

No test looks at a figure: times gate nothing. The checksum is made of what was counted and read back, so a benchmark
that skips its work, or a Run that isn't stored, gives another one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
HEAD = {"name", "size", "machine", "repetitions", "checksum"}
NAMES = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py"))

# Of the small size; the same whatever the store.
CHECKSUMS = {
    "admission": "2fb8595a",
    "cancel": "de6bbb07",
    "import": "069858fb",
    "join": "1dbd57e5",
    "jobs": "62dff3d7",
    "memory": "5131ffef",
    "reopen": "1800029a",
}
KEYS = {
    "admission": {
        "trio_rate",
        "task_rate",
        "task_ratio",
        "run_rate",
        "run_ratio",
        "durable_rate",
        "durable_rate_tasks",
        "writer_rate",
        "durable_ratio",
    },
    "cancel": {"cancel_ratio", "late_child_cancelled"},
    "import": {"import_seconds", "import_ratio", "idle_megabytes", "idle_ratio"},
    "join": {"wide_cost_growth", "deep_cost_growth"},
    "jobs": {
        "rate_1",
        "rate_10",
        "rate_100",
        "p50_1",
        "p95_1",
        "p99_100",
        "commits_per_job_100",
        "bare_rate_10",
        "bare_rate_100",
        "bare_ratio_10",
        "bare_ratio_100",
    },
    "memory": {"task_bytes", "run_bytes", "job_bytes", "run_ratio"},
    "reopen": {"open_growth", "orphan_rate"},
}


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)


def measure(folder: Path, *arguments: str) -> dict[str, Any]:
    done = start(*arguments, "--size", "small", "--json", "--dir", folder)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_the_list_names_every_file_with_its_question() -> None:
    lines = start().stdout.splitlines()

    assert [line.split()[0] for line in lines] == NAMES
    assert all(line.endswith("?") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_small_run_does_its_work_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    record = measure(tmp_path, name)

    assert record.keys() == HEAD | KEYS[name]
    assert (record["name"], record["size"]) == (name, "small")
    assert record["checksum"] == CHECKSUMS[name]
    assert all(record[key] > 0 for key in KEYS[name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cancel", "join", "memory"])
def test_over_the_other_store_the_same_work_is_done(name: str, tmp_path: Path) -> None:
    assert measure(tmp_path, name, "--store", "sqlite")["checksum"] == CHECKSUMS[name]


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("admission", {"mutations_per_commit", "sqlite_rate", "sqlite_ratio"}),
        (
            "jobs",
            {"mutations_per_commit_100", "sqlite_rate_100", "sqlite_ratio_1", "sqlite_ratio_10", "sqlite_ratio_100"},
        ),
    ],
)
def test_a_server_of_its_own_does_the_work_of_files_and_is_shown_beside_them(
    name: str, more: set[str], tmp_path: Path
) -> None:
    files = measure(tmp_path, name, "--store", "sqlite")
    record = measure(tmp_path, name, "--store", "postgres")

    assert record["checksum"] == files["checksum"]
    assert record.keys() == files.keys() | more
    assert all(record[key] > 0 for key in more)
    # Of a count and not of a time: many at once share their commits.
    assert max(record[key] for key in more if key.startswith("mutations_per_commit")) > 20


@pytest.mark.slow
def test_a_history_changes_nothing_of_what_is_done(tmp_path: Path) -> None:
    short = measure(tmp_path, "admission", "--store", "sqlite")
    long = measure(tmp_path, "admission", "--store", "sqlite", "--rows", "500")

    assert long["checksum"] == short["checksum"]
    assert long.keys() == {
        key for key in HEAD | KEYS["admission"] if key in HEAD or key.startswith(("durable", "writer"))
    }


@pytest.mark.slow
def test_jobs_over_a_history_are_compared_with_jobs_over_an_empty_file(tmp_path: Path) -> None:
    record = measure(tmp_path, "jobs", "--rows", "500")

    assert record["checksum"] == CHECKSUMS["jobs"]
    assert record.keys() == HEAD | KEYS["jobs"] | {"history_ratio"}
    assert record["history_ratio"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["reopen", "--store", "memory"], "reopen can't be run with --store memory"),
        (["memory", "--store", "postgres"], "memory can't be run with --store postgres"),
        (["jobs", "--store", "postgres", "--rows", "5"], "--rows fills files"),
        (["memory", "--rows", "5"], "memory takes no --rows 5"),
        (["admission", "--rows", "0"], "admission takes no --rows 0"),
        (["admission", "--dir", "/nowhere"], "--dir /nowhere is no folder"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_sentence(arguments: list[str], told: str) -> None:
    done = start(*arguments)

    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_file_explains_each_of_its_keys(name: str) -> None:
    text = (ROOT / "benchmarks" / f"bench_{name}.py").read_text().split('"""')[1]

    assert [key for key in sorted(KEYS[name]) if f"`{key}`" not in text] == []
    assert "Held fixed:" in text
    assert "Non-goals:" in text
    assert "Sketch" in text
