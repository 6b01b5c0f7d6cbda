"""The example that hashes a tree, against the system's own tools, on names and trees that nobody would wish for."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from docs.examples import hash_tree
from spindel.errors import RunFailedError
from spindel.runs import Run, open_room
from spindel.store import RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable

ODD_NAMES = [
    b"plain",
    b"with space",
    b" leading and trailing ",
    b"-dash",
    b"back\\slash",
    b"line\nend",
    b"carriage\rreturn",
    b"all\\of\nthem\r",
    b"\xff\xfe not UTF-8",
    "ünï☃".encode(),
    b"a",
    b"a.txt",
    b"a-b",
    b".hidden",
    b"*",
]


def listing(root: bytes) -> bytes:
    """What the system's own tools make of a tree."""
    script = 'find "$1" -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum --'
    return subprocess.run(["sh", "-c", script, "sh", root], check=True, capture_output=True).stdout


async def hash_into(root: bytes, out: bytes) -> dict[str, Any]:
    async with open_room(name="main") as room:
        run = await room.start(hash_tree.main, os.fsdecode(root), os.fsdecode(out))
        value: dict[str, Any] = await run.result()
    return value


@pytest.fixture
def tree(tmp_path: Path) -> bytes:
    """A folder to be filled."""
    (tmp_path / "tree").mkdir()
    return os.fsencode(tmp_path / "tree")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the lines go."""
    return tmp_path / "out.txt"


def write(path: bytes, data: bytes = b"x") -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


async def test_odd_names_come_out_as_the_system_writes_them(tree: bytes, out: Path) -> None:
    for name in ODD_NAMES:
        write(tree + b"/" + name, name)
        write(tree + b"/folders/" + name + b"/" + name, name)
    value = await hash_into(tree, os.fsencode(out))

    assert out.read_bytes() == listing(tree)
    assert value["files"] == 2 * len(ODD_NAMES)
    assert value["directories"] == 2 + len(ODD_NAMES)
    assert value["problem_count"] == 0


@pytest.mark.parametrize("root", [b"tree", b"tree/", b"tree//", b"./tree", b".", b"../work/tree"])
async def test_paths_begin_as_the_folder_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bytes
) -> None:
    work = tmp_path / "work"
    write(os.fsencode(work / "tree" / "below" / "file"))
    monkeypatch.chdir(work)
    await hash_into(root, b"../out.txt")

    assert (tmp_path / "out.txt").read_bytes() == listing(root)


async def test_links_special_files_and_empty_folders_are_left_out(tree: bytes, out: Path) -> None:
    write(tree + b"/file")
    os.mkdir(tree + b"/empty")
    os.mkfifo(tree + b"/pipe")
    os.symlink(b"file", tree + b"/link")
    os.symlink(b"nowhere", tree + b"/dangling")
    os.symlink(b".", tree + b"/loop")
    value = await hash_into(tree, os.fsencode(out))

    assert out.read_bytes() == listing(tree)
    assert (value["files"], value["directories"]) == (1, 2)


async def test_an_empty_folder_gives_an_empty_file(tree: bytes, out: Path) -> None:
    await hash_into(tree, os.fsencode(out))

    assert out.read_bytes() == b""


@pytest.mark.slow
async def test_large_files_wide_folders_and_deep_ones(tree: bytes, out: Path) -> None:
    write(tree + b"/large", os.urandom(3 * hash_tree.CHUNK_BYTES + 1))
    for number in range(3 * hash_tree.BATCH_FILES + 1):
        write(tree + b"/wide/%d" % number, b"%d" % number)
    for number in range(hash_tree.RUNS_MAX + 10):
        write(tree + b"/many/%d/file" % number, b"%d" % number)
    write(tree + b"/d" * 200 + b"/deep")
    value = await hash_into(tree, os.fsencode(out))

    assert out.read_bytes() == listing(tree)
    assert value["bytes"] == sum(
        os.stat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(tree) for name in names
    )


async def test_the_runs_have_the_shape_and_the_names_of_the_folders(tree: bytes, out: Path) -> None:
    write(tree + b"/one/two/file")
    write(tree + b"/\xffodd/file")
    async with open_room(name="main") as room:
        run = await room.start(hash_tree.main, os.fsdecode(tree), str(out))
        await run.result()
        records = {record.id: record for record in (await room.list_runs(limit=100)).runs}
    shape = {
        record.provenance["name"]: record.parent_id and records[record.parent_id].provenance.get("name")
        for record in records.values()
        if record.kind == "directory"
    }

    assert shape == {tree.decode(): None, "one": tree.decode(), "two": "one", "\\xffodd": tree.decode()}
    assert {record.status for record in records.values()} == {RunStatus.COMPLETED}


async def test_what_vanishes_or_changes_its_nature_meanwhile_is_a_problem_and_not_the_end(
    tree: bytes, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (b"gone", b"stays", b"pipe", b"link", b"folder/file"):
        write(tree + b"/" + name)
    list_directory = hash_tree.list_directory

    def list_and_meddle(path: bytes) -> Any:
        found = list_directory(path)
        if path == tree:
            os.unlink(tree + b"/gone")
            os.unlink(tree + b"/pipe")
            os.mkfifo(tree + b"/pipe")
            os.unlink(tree + b"/link")
            os.symlink(b"stays", tree + b"/link")
            os.unlink(tree + b"/folder/file")
            os.rmdir(tree + b"/folder")
        return found

    monkeypatch.setattr(hash_tree, "list_directory", list_and_meddle)
    value = await hash_into(tree, os.fsencode(out))
    root = tree.decode()

    assert out.read_bytes() == listing(tree)
    assert value["problem_count"] == 4
    assert sorted(value["problems"]) == [
        f"{root}/folder: No such file or directory",
        f"{root}/gone: No such file or directory",
        f"{root}/link: Too many levels of symbolic links",
        f"{root}/pipe: is no regular file any more",
    ]


async def test_only_the_first_problems_are_named_and_all_are_counted(
    tree: bytes, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        write(tree + b"/%d" % number)

    def refuse(*_: object) -> tuple[str, int]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(hash_tree, "hash_file", refuse)
    value = await hash_into(tree, os.fsencode(out))

    assert (value["problem_count"], len(value["problems"])) == (30, 20)


@pytest.mark.parametrize(
    ("root", "out", "sentence"),
    [
        ("absent", "out.txt", "No such file or directory"),
        ("file", "out.txt", "not a directory"),
        ("link", "out.txt", "a symlink to one needs a slash at its end"),
        ("tree", "tree/out.txt", "lies inside tree"),
        ("tree", "alias/out.txt", "lies inside tree"),
        ("tree", "pipe", "is no regular file"),
        ("tree", "absent/out.txt", "is no directory that this user may write to"),
    ],
)
async def test_places_that_can_not_come_out_well_are_refused_before_anything_happens(
    tmp_path: Path, tree: bytes, monkeypatch: pytest.MonkeyPatch, root: str, out: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("link").symlink_to("tree")
    Path("alias").symlink_to("tree")
    os.mkfifo("pipe")
    async with open_room(name="main") as room:
        outcome = await (await room.start(hash_tree.main, root, out)).outcome()

    assert outcome.status is RunStatus.FAILED
    assert sentence in str(outcome.error)
    assert os.listdir(tree) == []


async def test_a_link_to_a_folder_is_followed_with_a_slash_as_find_does(tmp_path: Path, tree: bytes, out: Path) -> None:
    write(tree + b"/file")
    link = tmp_path / "link"
    link.symlink_to("tree")
    root = os.fsencode(link) + b"/"
    await hash_into(root, os.fsencode(out))

    assert out.read_bytes() == listing(root)


async def test_an_earlier_result_is_replaced_whole_and_through_its_link(tmp_path: Path, tree: bytes, out: Path) -> None:
    write(tree + b"/file")
    out.write_text("an earlier result\n" * 1000)
    out.chmod(0o640)
    link = tmp_path / "link.txt"
    link.symlink_to("out.txt")
    await hash_into(tree, os.fsencode(link))

    assert link.is_symlink()
    assert out.read_bytes() == listing(tree)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~_umask()
    assert sorted(os.listdir(tmp_path)) == ["link.txt", "out.txt", "tree"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("stage", ["check_places", "list_directory", "hash_files", "write_lines"])
async def test_cancelled_at_any_stage_it_leaves_the_output_whole_or_as_it_was(
    tmp_path: Path, tree: bytes, out: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    write(tree + b"/folder/file")
    out.write_text("before")
    original: Callable[..., Any] = getattr(hash_tree, stage)
    async with open_room(name="main") as room:

        def cancel_first(*args: Any) -> Any:
            trio.from_thread.run_sync(room.cancel_all)
            return original(*args)

        monkeypatch.setattr(hash_tree, stage, cancel_first)
        run: Run[dict[str, Any]] = await room.start(hash_tree.main, os.fsdecode(tree), str(out))
        outcome = await run.outcome()
        statuses = {record.status for record in (await room.list_runs(limit=100)).runs}

    if stage == "write_lines":
        # It was past its last checkpoint: the value was there, so the cancel came too late.
        assert (outcome.status, out.read_bytes()) == (RunStatus.COMPLETED, listing(tree))
    else:
        assert (outcome.status, out.read_text()) == (RunStatus.CANCELLED, "before")
    assert RunStatus.RUNNING not in statuses
    assert sorted(os.listdir(tmp_path)) == ["out.txt", "tree"]


async def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, tree: bytes, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree + b"/file")

    def refuse(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hash_tree, "line_of", refuse)
    async with open_room(name="main") as room:
        outcome = await (await room.start(hash_tree.main, os.fsdecode(tree), str(out))).outcome()

    assert outcome.status is RunStatus.FAILED
    assert sorted(os.listdir(tmp_path)) == ["tree"]


async def test_a_fault_in_one_folder_fails_the_whole_and_writes_nothing(
    tree: bytes, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree + b"/good/file")
    write(tree + b"/bad/file")
    list_directory = hash_tree.list_directory

    def fail(path: bytes) -> Any:
        if path.endswith(b"bad"):
            raise RuntimeError("a bug")
        return list_directory(path)

    monkeypatch.setattr(hash_tree, "list_directory", fail)
    async with open_room(name="main") as room:
        outcome = await (await room.start(hash_tree.main, os.fsdecode(tree), str(out))).outcome()

    assert outcome.status is RunStatus.FAILED
    assert not out.exists()


async def test_a_tree_that_is_not_there_is_named(tmp_path: Path, out: Path) -> None:
    with pytest.raises(RunFailedError) as failed:
        await hash_into(os.fsencode(tmp_path / "absent"), os.fsencode(out))

    assert str(failed.value.__cause__) == f"[Errno 2] No such file or directory: '{tmp_path / 'absent'}'"
