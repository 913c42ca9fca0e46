# SPDX-License-Identifier: Apache-2.0
"""`GET /v1/state` with `limit`, `continue` and `after`: its pages, and answers with changes only (fault 49)."""

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diffusion_worker.engine.adapters import state_pages
from diffusion_worker.engine.state import adapter_changes
from support.worker.server_edge import Edge, serving_edge

Adapters = dict[str, list[dict[str, Any]]]
AGES = ("lastRequestAgeSeconds", "loadSeconds")


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(max_loras=2, max_cached_loras=3) as edge:
        yield edge


async def ask(edge: Edge, **query: Any) -> dict[str, Any]:
    answer = await edge.control.get("/v1/state", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def put(edge: Edge, *names: str, **body: Any) -> None:
    for name in names:
        assert (await edge.put_adapter(name, f"/{name}", **body)).status_code == 200


def by_name(page: dict[str, Any]) -> Adapters:
    found: Adapters = {}
    for one in page["adapters"]:
        found.setdefault(one["name"], []).append({field: value for field, value in one.items() if field not in AGES})
    return found


async def test_a_client_that_asks_for_no_pages_is_told_everything(edge: Edge) -> None:
    """Ask for the state without a limit, and get all adapters at once."""
    await put(edge, "a", "b", "c")
    whole = await ask(edge)
    assert sorted(by_name(whole)) == ["a", "b", "c"]
    assert (whole["adaptersSince"], whole["adaptersRemoved"], whole["adaptersContinue"]) == (None, [], None)


async def test_adapters_come_in_pages_of_so_many_names(edge: Edge) -> None:
    await put(edge, "a", "b", "c", "d", "e")
    first = await ask(edge, limit=2)
    second = await ask(edge, limit=2, **{"continue": first["adaptersContinue"]})
    third = await ask(edge, limit=2, **{"continue": second["adaptersContinue"]})
    assert [len(page["adapters"]) for page in (first, second, third)] == [2, 2, 1]
    assert third["adaptersContinue"] is None
    assert by_name(first) | by_name(second) | by_name(third) == by_name(await ask(edge))


async def test_a_page_ends_before_it_is_too_large(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(edge, "a", "b", "c")
    monkeypatch.setattr(state_pages, "PAGE_BYTES", 10)
    page = await ask(edge, limit=100)
    assert len(page["adapters"]) == 1
    assert page["adaptersContinue"] is not None


async def test_an_answer_after_a_revision_has_what_changed_since_then_and_what_is_gone(edge: Edge) -> None:
    await put(edge, "a", "b", "c", residency="OnDemand")
    then = (await ask(edge))["revision"]
    await put(edge, "b", residency="OnDemand", priority=3)
    await put(edge, "d", residency="OnDemand")
    await edge.delete_adapter("c")
    changes = await ask(edge, after=then)
    assert changes["adaptersSince"] == then
    assert sorted(by_name(changes)) == ["b", "d"]
    assert changes["adaptersRemoved"] == ["c"]
    nothing = await ask(edge, after=changes["revision"])
    assert (nothing["adapters"], nothing["adaptersRemoved"], nothing["revision"]) == ([], [], changes["revision"])


async def test_what_came_back_is_no_more_gone(edge: Edge) -> None:
    await put(edge, "a", residency="OnDemand")
    then = (await ask(edge))["revision"]
    await edge.delete_adapter("a")
    await ask(edge)
    await put(edge, "a", residency="OnDemand")
    changes = await ask(edge, after=then)
    assert (list(by_name(changes)), changes["adaptersRemoved"]) == (["a"], [])


async def test_after_a_revision_of_another_life_or_one_that_is_to_come_everything_is_told(edge: Edge) -> None:
    await put(edge, "a")
    for other in ("boot-0.1", "boot-1.999"):
        answer = await ask(edge, after=other)
        assert (list(by_name(answer)), answer["adaptersSince"]) == (["a"], None)


async def test_a_client_that_missed_too_many_names_that_went_is_told_everything(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_changes, "MOST_GONE", 2)
    await put(edge, "a", "kept", residency="OnDemand")
    then = (await ask(edge))["revision"]
    for name in ("x", "y", "z"):
        await put(edge, name, residency="OnDemand")
        await ask(edge)
        await edge.delete_adapter(name)
        await ask(edge)
    answer = await ask(edge, after=then)
    assert (sorted(by_name(answer)), answer["adaptersSince"]) == (["a", "kept"], None)


async def test_a_token_of_another_life_and_a_page_of_two_kinds_are_refused(edge: Edge) -> None:
    refused = await edge.control.get("/v1/state", params={"continue": "boot-0.1"})
    assert (refused.status_code, refused.json()["code"]) == (409, "WrongBoot")
    both = await edge.control.get("/v1/state", params={"continue": "boot-1.1", "after": "boot-1.1"})
    assert (both.status_code, both.json()["code"]) == (400, "InvalidRequest")


class Follower:
    """A client that follows the state's adapters by pages of changes, as the operator does; `adapters` is what it knows."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self.revision = ""
        self.adapters: Adapters = {}

    async def look(self, between: Any) -> None:
        """Take all changes since the last look, page by page, into `adapters`; await `between()` before each page but the first."""
        query: dict[str, Any] = {"after": self.revision} if self.revision else {}
        first = page = await ask(self._edge, limit=2, **query)
        if first["adaptersSince"] is None:
            self.adapters = {}
        for name in first["adaptersRemoved"]:
            self.adapters.pop(name, None)
        self.adapters |= by_name(page)
        while page["adaptersContinue"]:
            await between()
            page = await ask(self._edge, limit=2, **{"continue": page["adaptersContinue"]})
            self.adapters |= by_name(page)
        self.revision = first["revision"]


@pytest.mark.parametrize("seed", range(20))
async def test_a_client_that_follows_changes_ends_with_what_there_is(edge: Edge, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(8)]
    follower = Follower(edge)

    async def happen() -> None:
        name = rng.choice(names)
        if rng.random() < 0.4:
            await edge.delete_adapter(name)
        else:
            body = {"priority": rng.randrange(3), "residency": rng.choice(["OnDemand", "Cached"])}
            await edge.put_adapter(name, f"/{name}-{rng.randrange(2)}", **body)

    for _ in range(15):
        for _ in range(rng.randrange(4)):
            await happen()
        await follower.look(happen)

    async def nothing() -> None:
        pass

    async def settled() -> bool:
        return not any(one["state"] == "Draining" for one in (await ask(edge))["adapters"])

    await edge.wait_for(settled)
    await follower.look(nothing)
    assert follower.adapters == by_name(await ask(edge))
