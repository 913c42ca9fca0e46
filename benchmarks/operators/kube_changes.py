# SPDX-License-Identifier: Apache-2.0
"""Writes to an API server, as another client sees them: each event of a watch is a change that etcd keeps.

The API server's own writes are not counted: its controller of addresses now and then reports a repair to a Service.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.operators.kube_session import session_of
from diffusion_operator.api.names import KINDS, LEASE, Kind

# Every component of a cluster renews a Lease.
COUNTED = tuple(kind for kind in KINDS.values() if kind != LEASE)
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class _ManagedField(msgspec.Struct, frozen=True):
    manager: str = ""


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resourceVersion: str = ""
    managedFields: tuple[_ManagedField, ...] = ()


_ITSELF = _ManagedField("kube-apiserver")


class _Object(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class _Event(msgspec.Struct):
    type: str
    object: _Object


class KubeChanges:
    """Counts changes to objects of our kinds and their children in one namespace, by kind and type, while its block runs.

    Leases are left out, and changes that the API server made itself.
    """

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.last_at = time.monotonic()

    async def __aenter__(self) -> Self:
        self._session = await session_of(self._kubeconfig)
        for kind in COUNTED:
            since = (await self._json(self._path(kind) + "?limit=1"))["metadata"]["resourceVersion"]
            self._tasks.append(asyncio.create_task(self._watch(kind, since)))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def added(self, kind: Kind) -> int:
        """Return the number of objects of a kind that were created since the block began."""
        return self.counts[kind.kind, "ADDED"]

    def changed(self, kind: Kind) -> int:
        """Return the number of changes to objects of a kind since the block began, creations and deletions left out."""
        return self.counts[kind.kind, "MODIFIED"]

    async def until(self, done: Callable[[Self], bool], *, stalled_s: float) -> None:
        """Wait until `done` returns true for this counter.

        Raises:
            RuntimeError: nothing changed for `stalled_s`, or a watch ended.
        """
        self.last_at = time.monotonic()
        while not done(self):
            for task in self._tasks:
                if task.done():
                    raise RuntimeError(f"a watch of the measurement ended: {task.exception()}")
            if time.monotonic() - self.last_at > stalled_s:
                raise RuntimeError(f"nothing changed for {stalled_s:g} s, so far: {dict(self.counts)}")
            await asyncio.sleep(0.02)

    async def _json(self, path: str) -> dict[str, dict[str, str]]:
        async with self._session.get(
            path, headers={"Accept": METADATA_ONLY.replace("PartialObjectMetadata", "PartialObjectMetadataList")}
        ) as answer:
            found: dict[str, dict[str, str]] = await answer.json()
        return found

    async def _watch(self, kind: Kind, since: str) -> None:
        decoder = msgspec.json.Decoder(_Event)
        while True:
            path = f"{self._path(kind)}?watch=1&allowWatchBookmarks=true&resourceVersion={since}"
            async with self._session.get(path, headers={"Accept": METADATA_ONLY}, read_bufsize=2**20) as answer:
                async for line in answer.content:
                    if not line.endswith(b"\n"):
                        break  # the connection ended within an event, which the next watch brings again
                    event = decoder.decode(line)
                    if event.type == "ERROR":
                        raise RuntimeError(f"watch of {kind.plural}: {line!r}")
                    since = event.object.metadata.resourceVersion
                    if event.type != "BOOKMARK" and _ITSELF not in event.object.metadata.managedFields:
                        self.counts[kind.kind, event.type] += 1
                        self.last_at = time.monotonic()

    def _path(self, kind: Kind) -> str:
        prefix = "apis" if "/" in kind.api_version else "api"
        return f"/{prefix}/{kind.api_version}/namespaces/{self._namespace}/{kind.plural}"
