# SPDX-License-Identifier: Apache-2.0
"""An API server's Leases in memory: versions, conflicts, and calls that fail, hang, or are done without an answer.

Real: nothing. The rules are those that the election relies on.
"""

import asyncio
import copy
import itertools
from typing import Any

from diffusion_operator.api.names import Kind
from diffusion_operator.errors import ClusterConflict, ClusterRefused, ClusterUnavailable

Manifest = dict[str, Any]


class FakeLeases:
    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self._numbers = itertools.count(1)
        self.writes: list[str] = []
        """The holders that were written, in order."""

    def client(self) -> "FakeClient":
        """Return a new connection to these Leases."""
        return FakeClient(self)

    def write(self, manifest: Manifest) -> Manifest:
        number = str(next(self._numbers))
        uid = self.manifest["metadata"]["uid"] if self.manifest is not None else f"uid-{number}"
        self.manifest = copy.deepcopy(manifest) | {"metadata": manifest["metadata"] | {"resourceVersion": number, "uid": uid}}
        self.writes.append(manifest["spec"]["holderIdentity"] or "")
        return copy.deepcopy(self.manifest)


class FakeClient:
    """A connection that implements `Leases`; its flags make calls hang or fail, or be done without an answer."""

    def __init__(self, server: FakeLeases) -> None:
        self._server = server
        self.hangs = False
        self.fails = False
        self.loses_answers = False

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        await self._travel()
        return copy.deepcopy(self._server.manifest)

    async def create(self, manifest: Manifest) -> bool:
        await self._travel()
        if self._server.manifest is not None:
            return False
        self._server.write(manifest)
        await self._answer()
        return True

    async def merge(self, manifest: Manifest) -> Manifest:
        await self._travel()
        if self._server.manifest is None:
            raise ClusterRefused("not found", status=404, reason="NotFound")
        if self._server.manifest["metadata"]["resourceVersion"] != manifest["metadata"]["resourceVersion"]:
            raise ClusterConflict("the object has been modified", status=409, reason="Conflict")
        answer = self._server.write(manifest)
        await self._answer()
        return answer

    async def _travel(self) -> None:
        await asyncio.sleep(0.01)
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise ClusterUnavailable("connection refused")

    async def _answer(self) -> None:
        if self.loses_answers:
            await asyncio.Event().wait()
