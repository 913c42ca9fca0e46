# SPDX-License-Identifier: Apache-2.0
"""What is written to an API server, seen as another client sees it: each event of a watch is one change that etcd keeps.

A request that changes nothing makes no event; the API server's own metrics count it as a request all the same. Both are given.
What the API server writes by itself is no client's: now and then its controller of addresses tells a Service that it repairs one.
"""

import asyncio
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from kubernetes.aio import client, config

from diffusion_operator.api.names import KINDS, Kind

METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
WRITES = re.compile(r'^apiserver_request_total\{.*?resource="(\w+)".*?verb="(POST|PUT|PATCH|APPLY|DELETE|DELETECOLLECTION)".*\} (\S+)$')


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
    """Counts changes of our kinds in one namespace, by kind and type; an async context manager."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.last_at = time.monotonic()

    async def __aenter__(self) -> Self:
        configuration = client.Configuration()
        await config.load_kube_config(config_file=str(self._kubeconfig), client_configuration=configuration)
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._session = aiohttp.ClientSession(
            configuration.host, connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        for kind in KINDS.values():
            since = (await self._json(self._path(kind) + "?limit=1"))["metadata"]["resourceVersion"]
            self._tasks.append(asyncio.create_task(self._watch(kind, since)))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def added(self, kind: Kind) -> int:
        """Objects of a kind that were made."""
        return self.counts[kind.kind, "ADDED"]

    def changed(self, kind: Kind) -> int:
        """Changes to objects of a kind after they were made."""
        return self.counts[kind.kind, "MODIFIED"]

    @property
    def total(self) -> int:
        """Every change so far."""
        return sum(self.counts.values())

    async def until(self, done: Callable[[Self], bool], *, stalled_s: float) -> None:
        """Waits for it, as long as something changes now and then."""
        self.last_at = time.monotonic()
        while not done(self):
            for task in self._tasks:
                if task.done():
                    raise RuntimeError(f"a watch of the measurement ended: {task.exception()}")
            if time.monotonic() - self.last_at > stalled_s:
                raise RuntimeError(f"nothing changed for {stalled_s:g} s, so far: {dict(self.counts)}")
            await asyncio.sleep(0.02)

    async def requests(self) -> Counter[str]:
        """Requests to write so far, by resource, of every client and every namespace."""
        async with self._session.get("/metrics") as answer:
            text = await answer.text()
        counted: Counter[str] = Counter()
        for line in text.splitlines():
            if (found := WRITES.match(line)) is not None:
                counted[found[1]] += int(float(found[3]))
        ours = {kind.plural for kind in KINDS.values()}
        return Counter({resource: number for resource, number in counted.items() if resource in ours})

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
