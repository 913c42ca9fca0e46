# SPDX-License-Identifier: Apache-2.0
"""A watch of children fills the store, continues where it ended, and lists again when the API server has forgotten its place.

Real: the watch, the listing and the store. Not real: the API server, which is a script of streams.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diffusion_operator.api.names import POD, Kind
from diffusion_operator.cluster import Page
from diffusion_operator.errors import ClusterError, ClusterRefused, ClusterUnavailable
from diffusion_operator.reconcile.store import child_watch
from diffusion_operator.reconcile.store.child_watch import ChildWatch
from diffusion_operator.reconcile.store.listing import Listing, Scope
from diffusion_operator.reconcile.store.object_store import ObjectStore
from diffusion_operator.watch_stream import Event

Stream = list[Event | ClusterError]
LOST = ClusterUnavailable("watch pods n/*: ServerDisconnectedError")
GONE = ClusterUnavailable("watch pods n/*: 410 too old resource version", status=410)
REFUSED = ClusterRefused("watch pods n/*: 403 forbidden", status=403)


class Server:
    """A stand-in for the cluster. Each watch gets the next of the scripted streams or errors; a watch after the last of them stays open."""

    def __init__(self, *streams: Stream | ClusterError) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = "90"
        self.streams = list(streams)
        self.opened: list[str] = []
        self.listed = 0
        self.done = asyncio.Event()
        self.lives_s: list[float] = []
        """Seconds that pass before a watch breaks or ends, in the order in which they are opened."""
        self.rig: Rig | None = None

    async def pages(self, *_: object, **__: object) -> AsyncIterator[Page]:
        self.listed += 1
        yield Page(items=self.items, version=self.version)

    @asynccontextmanager
    async def watch(self, *_: object, since: str, labels: dict[str, str]) -> AsyncIterator[AsyncIterator[Event]]:
        self.opened.append(since)
        found = self.streams.pop(0) if self.streams else None
        if isinstance(found, ClusterError):
            raise found
        yield self._events(found)

    async def _events(self, stream: Stream | None) -> AsyncIterator[Event]:
        if stream is None:
            self.done.set()
            await asyncio.Event().wait()
        if self.lives_s and self.rig is not None:
            self.rig.now += self.lives_s.pop(0)
        for one in stream or ():
            if isinstance(one, ClusterError):
                raise one
            yield one


class Rig:
    def __init__(self, server: Server) -> None:
        self.changes: list[str] = []
        self.now = 0.0
        self.server = server
        self.store = ObjectStore(self._changed)
        scope = Scope(kind=POD, namespace="n")
        self.listing = Listing(server, self.store, scope, clock=lambda: self.now)  # type: ignore[arg-type]
        self.watch = ChildWatch(server, self.store, self.listing, random=lambda: 0.5, monotonic=lambda: self.now)  # type: ignore[arg-type]
        server.rig = self

    def _changed(self, kind: Kind, manifest: dict[str, Any]) -> None:
        self.changes.append(f"{manifest['metadata']['name']}@{manifest['metadata']['resourceVersion']}")

    async def run(self) -> None:
        """Run the watch until it has opened all scripted streams, so that nothing more is read. TimeoutError after 5 s."""
        task = asyncio.create_task(self.watch.run())
        try:
            async with asyncio.timeout(30):
                await self.server.done.wait()
        finally:
            task.cancel()


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Provide the growing list of seconds that the watch waited before it was opened again; none of them passes."""
    waited: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(child_watch.asyncio, "sleep", note)
    return waited


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"namespace": "n", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}}


def event(type_: str, name: str, version: int) -> Event:
    return Event(type=type_, object=pod(name, version))


async def test_it_goes_on_from_the_listing_and_takes_what_came_changed_and_went() -> None:
    rig = Rig(Server([event("ADDED", "a", 91), event("MODIFIED", "a", 92), event("ADDED", "b", 93), event("DELETED", "a", 94)]))
    await rig.listing.list()
    await rig.run()
    assert rig.changes == ["a@91", "a@92", "b@93", "a@92"]
    assert [one["metadata"]["name"] for one in rig.store.manifests(POD, "n")] == ["b"]
    assert (rig.server.opened, rig.server.listed) == (["90", "94"], 1), "an end by the API server costs no listing"


async def test_an_object_that_is_not_understood_is_logged_and_the_next_one_taken(caplog: pytest.LogCaptureFixture) -> None:
    strange = Event(type="ADDED", object={"metadata": {"name": "strange", "resourceVersion": "91"}})
    rig = Rig(Server([strange, event("ADDED", "a", 92)]))
    await rig.listing.list()
    await rig.run()
    assert rig.changes == ["a@92"]
    assert "left out kind=pods in namespace n object=strange" in caplog.text


async def test_a_bookmark_moves_the_place_alone() -> None:
    rig = Rig(Server([Event(type="BOOKMARK", object={"metadata": {"resourceVersion": "120"}})]))
    await rig.listing.list()
    await rig.run()
    assert (rig.changes, rig.server.opened) == ([], ["90", "120"])


async def test_a_lost_connection_is_opened_again_where_it_ended() -> None:
    rig = Rig(Server([event("ADDED", "a", 91), LOST], [event("ADDED", "b", 92)]))
    await rig.listing.list()
    await rig.run()
    assert (rig.server.opened, rig.server.listed) == (["90", "91", "92"], 1)


async def test_where_the_api_server_forgot_the_place_a_deletion_meanwhile_is_found_by_a_listing() -> None:
    rig = Rig(Server([event("ADDED", "a", 91), event("ADDED", "b", 92), GONE]))
    await rig.listing.list()
    rig.server.items, rig.server.version = [pod("a", 91)], "500"
    await rig.run()
    assert (rig.changes[2:], rig.server.opened) == (["b@92"], ["90", "500"])


async def test_an_api_server_that_was_away_and_went_back_is_followed_from_its_older_version() -> None:
    rig = Rig(Server([event("ADDED", "a", 300), LOST], LOST, [event("MODIFIED", "a", 8)]))
    await rig.listing.list()
    rig.server.items, rig.server.version = [pod("a", 7)], "7"
    await rig.run()
    assert (rig.changes, rig.server.opened) == (["a@300", "a@7", "a@8"], ["90", "300", "7", "8"])


async def test_a_watch_that_is_refused_is_tried_for_ever_and_others_are_not_concerned() -> None:
    rig = Rig(Server(*[REFUSED] * 9, [event("ADDED", "a", 91)]))
    await rig.run()
    assert (rig.changes, rig.server.listed) == (["a@91"], 10)


async def test_a_listing_that_found_more_than_the_watch_says_so_until_the_watch_brings_an_event() -> None:
    """Check that a watch counts as stalled until it brings an event, which shows that it is alive again."""
    rig = Rig(Server([event("ADDED", "a", 91)]))
    await rig.listing.list()
    rig.listing._stalled_since = 0.0
    rig.now = 50.0
    assert rig.listing.stalled_s == 50.0
    await rig.run()
    assert rig.listing.stalled_s == 0.0


async def test_a_watch_that_was_opened_after_a_listing_of_its_own_is_not_stalled() -> None:
    """Check that a watch that begins at its own listing is not stalled, since it has missed nothing."""
    rig = Rig(Server([GONE]))
    await rig.listing.list()
    rig.listing._stalled_since = 0.0
    rig.now = 50.0
    await rig.run()
    assert rig.listing.stalled_s == 0.0


@pytest.mark.parametrize("end", [[LOST], []], ids=["broken", "ended"])
async def test_a_watch_that_opens_and_ends_at_once_is_opened_less_and_less_often_and_is_not_listed_again(
    end: Stream, pauses: list[float]
) -> None:
    rig = Rig(Server(*[end] * 7))
    await rig.listing.list()
    await rig.run()
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert rig.server.listed == 1


async def test_a_watch_that_has_lived_a_while_is_opened_again_at_once_whatever_failed_before(pauses: list[float]) -> None:
    rig = Rig(Server([LOST], LOST, [], [], [LOST]))
    rig.server.lives_s = [0.0, 1.0, child_watch.LIVED_S, 600.0]
    await rig.listing.list()
    await rig.run()
    assert pauses == [1, 2, 4, child_watch.REOPEN_S, child_watch.REOPEN_S]


async def test_many_watches_that_break_at_once_come_back_at_different_times(pauses: list[float]) -> None:
    rig, numbers = Rig(Server([LOST], [LOST])), iter([0.0, 0.9])
    rig.watch._random = lambda: next(numbers)
    await rig.listing.list()
    await rig.run()
    assert pauses == pytest.approx([0.7, 2.48])
