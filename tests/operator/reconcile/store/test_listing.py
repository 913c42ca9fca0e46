# SPDX-License-Identifier: Apache-2.0
"""A listing finds changes that the watch did not bring, and counts the watch as stalled then."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from diffusion_operator.api.names import POD, Kind
from diffusion_operator.cluster import Page
from diffusion_operator.errors import ClusterUnavailable
from diffusion_operator.reconcile.store import listing
from diffusion_operator.reconcile.store.listing import Listing, Scope
from diffusion_operator.reconcile.store.object_store import ObjectStore

EVERY_S = 0.01


class Pages:
    """A stand-in for the cluster with `pages`, the only call that a listing needs."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.down = False
        self.asked = 0
        self.meanwhile: Callable[[], None] = lambda: None

    async def pages(self, *_: object, **__: object) -> AsyncIterator[Page]:
        self.asked += 1
        if self.down:
            raise ClusterUnavailable("list pods: down")
        yield Page(items=self.items, version="90")
        self.meanwhile()


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.changes: list[str] = []
        self.cluster = Pages()
        self.store = ObjectStore(self._changed)
        self.listing = Listing(self.cluster, self.store, Scope(kind=POD, namespace="n"), clock=lambda: self.now)  # type: ignore[arg-type]

    def _changed(self, kind: Kind, manifest: dict[str, Any]) -> None:
        self.changes.append(manifest["metadata"]["name"])

    async def run(self) -> None:
        """Run the listing until it has listed twice more."""
        task, until = asyncio.create_task(self.listing.run(EVERY_S)), self.cluster.asked + 2
        try:
            async with asyncio.timeout(30):
                while self.cluster.asked < until:  # noqa: ASYNC110
                    await asyncio.sleep(EVERY_S)
        finally:
            task.cancel()


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"namespace": "n", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}}


async def test_a_watch_that_tells_everything_is_not_taken_for_stalled() -> None:
    rig = Rig()
    rig.store.put(POD, pod("a", 3))
    rig.cluster.items = [pod("a", 3)]
    await rig.run()
    rig.now = 100.0
    assert (rig.changes, rig.listing.stalled_s) == (["a"], 0.0)


async def test_what_changed_or_went_unheard_is_found_and_the_watch_is_stalled_until_it_tells_something() -> None:
    """Check that a listing finds changes that the watch did not report, and that the watch then counts as stalled until an event."""
    rig = Rig()
    await rig.run()
    rig.store.put(POD, pod("a", 3))
    rig.store.put(POD, pod("gone", 4))
    rig.cluster.items = [pod("a", 5)]
    await rig.run()
    assert rig.changes[2:] == ["a", "gone"]
    assert rig.store.get(POD, "n", "gone") is None
    rig.now = 100.0
    assert rig.listing.stalled_s == 100.0
    rig.listing.record_event()
    assert rig.listing.stalled_s == 0.0


async def test_what_went_before_the_watch_was_open_is_found_soon_and_says_nothing_about_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an early listing finds an object that went before the watch was open. It is no proof of a stalled watch."""
    monkeypatch.setattr(listing, "CATCH_UP_S", EVERY_S)
    rig = Rig()
    rig.store.put(POD, pod("gone", 4))
    task = asyncio.create_task(rig.listing.run(600.0))
    await asyncio.sleep(20 * EVERY_S)
    task.cancel()
    rig.now = 100.0
    assert (rig.changes, rig.cluster.asked, rig.listing.stalled_s) == (["gone", "gone"], 1, 0.0)


async def test_a_watch_that_tells_a_change_while_the_listing_still_runs_is_not_stalled() -> None:
    """Check that a watch that reports an event while the listing runs is not stalled."""
    rig = Rig()
    await rig.run()
    rig.cluster.items, rig.cluster.meanwhile = [pod("a", 5)], rig.listing.record_event
    await rig.run()
    rig.now = 100.0
    assert (rig.changes, rig.listing.stalled_s) == (["a"], 0.0)


async def test_an_api_server_that_is_down_is_no_reason_to_stop_listing() -> None:
    rig = Rig()
    rig.cluster.down = True
    await rig.run()
    rig.cluster.down, rig.cluster.items = False, [pod("a", 3)]
    await rig.run()
    assert rig.changes == ["a"]


async def test_a_scope_that_is_refused_is_set_aside_and_taken_up_when_it_can_be_listed() -> None:
    rig = Rig()
    rig.cluster.down = True
    await rig.run()
    assert rig.listing.refusal == "list pods: down"
    rig.cluster.down, rig.cluster.items = False, [pod("a", 3)]
    await rig.run()
    assert (rig.listing.refusal, rig.changes) == ("", ["a"])


async def test_after_the_api_servers_store_was_restored_from_a_backup_older_versions_are_taken_again() -> None:
    rig = Rig()
    for manifest in (pod("a", 100), pod("b", 200), pod("gone", 300)):
        rig.store.put(POD, manifest)
    rig.store.remove(POD, pod("b", 250))
    rig.cluster.items = [pod("a", 7), pod("b", 8)]
    del rig.changes[:]
    await rig.run()
    assert rig.changes == ["a", "b", "gone"]
    assert [manifest["metadata"]["resourceVersion"] for manifest in rig.store.manifests(POD, "n")] == ["7", "8"]
    rig.store.put(POD, pod("a", 9))
    assert rig.changes[3:] == ["a"], "what the watch tells then is news"


async def test_a_listing_as_new_as_what_is_known_takes_no_older_version() -> None:
    rig = Rig()
    rig.store.put(POD, pod("a", 90))
    rig.cluster.items = [pod("a", 7)]
    await rig.run()
    assert rig.changes == ["a"]
