"""What a start may say about its Run: checked before anything happens, and the error names the key."""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
import trio

from spindel.errors import InvalidRecordError
from spindel.runs import Child, Run, open_room
from spindel.store import AdmitRun
from spindel.testing.faults import FaultyStore

if TYPE_CHECKING:
    from spindel.codec import JsonValue
    from spindel.store import Store


async def give(_: Run[int], value: int) -> int:
    return value


async def park(_: Run[None]) -> None:
    await trio.sleep_forever()


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"unknown": 1}, "unknown"),
    ({"Kind": "run"}, "Kind"),
    ({"kind": ""}, "kind"),
    ({"kind": "x" * 201}, "kind"),
    ({"kind": "a\0b"}, "kind"),
    ({"kind": "\ud800"}, "kind"),
    ({"kind": None}, "kind"),
    ({"actor": 5}, "actor"),
    ({"actor": ""}, "actor"),
    ({"trigger_id": "no"}, "trigger_id"),
    ({"on_child_failure": "ignore"}, "on_child_failure"),
    ({"prepare": give}, "prepare"),
    ({"publish": 5}, "publish"),
    ({"context": {}}, "context"),
    ({"finisher": give}, "finisher"),
    ({"provenance": 5}, "provenance"),
    ({"provenance": ["a"]}, "provenance"),
    ({"provenance": {"fn": give}}, "provenance.fn"),
    ({"provenance": {"a": {"b": [1, {"c": float("nan")}]}}}, "provenance.a.b[1].c"),
    ({"provenance": {"a": float("inf")}}, "provenance.a"),
    ({"provenance": {"a": 2**64}}, "provenance.a"),
    ({"provenance": {"a": b"bytes"}}, "provenance.a"),
    ({"provenance": {"a": {1, 2}}}, "provenance.a"),
    ({"provenance": {"a": ValueError("x")}}, "provenance.a"),
    ({"provenance": {"a": "\ud800"}}, "provenance.a"),
    ({"provenance": {1: "a"}}, "provenance"),
    ({"provenance": nested(100)}, "provenance" + ".a" * 64),
]


@pytest.mark.parametrize(("options", "key"), WRONG, ids=[f"{number}-{key}" for number, (_, key) in enumerate(WRONG)])
@pytest.mark.parametrize("who", ["root", "child", "children", "token"])
async def test_a_wrong_option_is_named_and_nothing_happens(
    options: dict[str, Any], key: str, who: str, memory_store: Store
) -> None:
    """R-08: an unknown key, and a function, task, error, NaN or the like anywhere inside, is refused by its name."""
    store = FaultyStore(memory_store)

    async def parent(run: Run[InvalidRecordError]) -> InvalidRecordError:
        with pytest.raises(InvalidRecordError) as caught:
            if who == "child":
                await run.start_child(give, 1, **options)
            elif who == "token":
                with run.reserve() as token:
                    await run.admit(token, give, 1, **options)
            else:
                await run.start_children([Child.of(give, 1), Child(give, (2,), options)])  # type: ignore[arg-type]
        return caught.value

    async with open_room(store, name="r") as room:
        if who == "root":
            with pytest.raises(InvalidRecordError) as caught:
                await room.start(give, 1, **options)
            error = caught.value
        else:
            error = await (await room.start(parent)).result()
        live = room.live()

    assert error.key == key
    assert str(error).startswith(key)
    assert live == ()
    assert len(store.written(AdmitRun)) == (0 if who == "root" else 1)


@pytest.mark.parametrize("run_id", ["no", 5, True])
async def test_an_id_that_is_none_is_named_and_nothing_happens(run_id: Any, memory_store: Store) -> None:
    """R-08: an id is a UUID, for a token's as well, and a token's own start takes no other."""
    store = FaultyStore(memory_store)

    async def parent(run: Run[None]) -> None:
        with pytest.raises(InvalidRecordError, match="run_id"):
            await run.start_child(give, 1, run_id=run_id)
        with pytest.raises(InvalidRecordError, match="run_id"):
            await run.start_children([Child.of(give, 1), Child.of(give, 1, run_id=run_id)])
        with pytest.raises(InvalidRecordError, match="run_id"), run.reserve(run_id=run_id):
            raise AssertionError("nothing was reserved")
        with run.reserve() as token, pytest.raises(InvalidRecordError, match="run_id"):
            await run.admit(token, give, 1, run_id=token.run_id)

    async with open_room(store, name="r") as room:
        with pytest.raises(InvalidRecordError, match="run_id"):
            await room.start(give, 1, run_id=run_id)
        await (await room.start(parent)).result()
        live = room.live()

    assert live == ()
    assert len(store.written(AdmitRun)) == 1


async def test_what_is_said_stands_in_the_row(store: Store) -> None:
    class Kind(StrEnum):
        PAGE = "page"

    trigger = UUID(int=9)
    provenance: dict[str, JsonValue] = {"b": [1, 2.5, None, True], "a": {"text": "ä"}, "t": (1, 2)}

    async with open_room(store, name="r") as room:
        run = await room.start(give, 1, kind=Kind.PAGE, actor="me", trigger_id=trigger, provenance=provenance)
        plain = await room.start(give, 1)
        row, other = await room.load(run.id), await room.load(plain.id)

    assert row is not None
    assert other is not None
    assert (row.kind, row.actor, row.trigger_id) == ("page", "me", trigger)
    assert row.provenance == {"a": {"text": "ä"}, "b": [1, 2.5, None, True], "t": [1, 2]}
    assert (run.kind, run.actor) == ("page", "me")
    assert type(run.kind) is str
    assert (other.kind, other.trigger_id, other.provenance) == ("run", None, {})
    assert other.family_version == 1


async def test_the_actor_is_the_parents_unless_said(store: Store) -> None:
    async def parent(run: Run[list[str]]) -> list[str]:
        inherited = await run.start_child(park)
        own = await run.start_child(park, actor="child")
        (together,) = await run.start_children([Child.of(park)])
        assert isinstance(together, Run)
        actors = [child.actor for child in (inherited, own, together)]
        for child in (inherited, own, together):
            child.cancel()
        return actors

    async with open_room(store, name="r") as room:
        actors = await (await room.start(parent, actor="somebody")).result()
        nobody = (await room.start(give, 1)).actor

    assert actors == ["somebody", "child", "somebody"]
    assert nobody == "local"


async def test_a_child_of_a_group_is_written_like_a_start(store: Store) -> None:
    async def parent(run: Run[list[int]]) -> list[int]:
        children = await run.start_children(
            [Child.of(give, 1, kind="page"), Child(give, (2,)), Child.of(functools.partial(give), 3)]
        )
        assert [child.kind for child in children if isinstance(child, Run)] == ["page", "run", "run"]
        return [await child.result() for child in children if isinstance(child, Run)]

    async with open_room(store, name="r") as room:
        values = await (await room.start(parent)).result()

    assert values == [1, 2, 3]
