"""The public names as a user's type checker sees them. Never run: mypy and pyright read it, strictly."""

from __future__ import annotations

from typing import Any, assert_type

from spindel.errors import AdmissionError
from spindel.runs import Child, Outcome, Room, Run, current_run, open_reader, open_room
from spindel.store import RunPage, RunRecord, RunStatus


async def weigh(run: Run[int], text: str, factor: float) -> int:
    return int(len(text) * factor)


async def nothing(run: Run[None]) -> None:
    return None


async def plain(text: str) -> object:
    return text


def hashed(data: bytes) -> str:
    return data.hex()


async def a_start_keeps_the_type_of_the_value(room: Room) -> None:
    run = await room.start(weigh, "seven", 1.5, kind="weigh", actor="me")

    assert_type(run, Run[int])
    assert_type(await run.result(), int)
    assert_type(await run.outcome(), Outcome[int])
    assert_type((await run.outcome()).value, int | None)
    assert_type((await run.outcome()).unwrap(), int)
    assert_type(run.status, RunStatus)


async def a_child_keeps_it_too(run: Run[Any]) -> None:
    child = await run.start_child(weigh, "seven", 1.5, on_child_failure="cancel")
    several = await run.start_children([Child(weigh, ("seven", 1.5)), Child(weigh, ("three", 2.0))])

    assert_type(child, Run[int])
    assert_type(several, list[Run[int] | AdmissionError])
    assert_type(await run.run_native(hashed, b"seven"), str)
    run.start_soon(plain, "seven", name="plain")


async def wrong_arguments_are_seen(room: Room, run: Run[Any]) -> None:
    await room.start(weigh, "seven")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await run.start_child(weigh, 7, 1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await room.start(nothing, colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    run.start_soon(plain)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def a_room_and_a_reader_give_records() -> None:
    async with open_room("runs.db", name="main") as room:
        assert_type(room, Room)
        assert_type(await room.list_runs(status=RunStatus.FAILED), RunPage)
    async with open_reader("runs.db", name="main") as reader:
        for record in (await reader.list_runs(limit=5)).runs:
            assert_type(record, RunRecord)
    assert_type(current_run(), Run[Any] | None)
