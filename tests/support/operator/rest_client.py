# SPDX-License-Identifier: Apache-2.0
"""Raw requests to a real API server, by somebody who may do everything: what a user, a kubelet or a controller would do."""

import base64
import json
import ssl
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from diffusion_operator.api.names import Kind

MERGE = "application/merge-patch+json"


class RestClient:
    """An async context manager; answers are (status, document)."""

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        self._server = document["clusters"][0]["cluster"]["server"]
        self._ssl = _context(document)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._ssl, limit=32))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, method: str, path: str, body: object = None, *, content_type: str = "application/json") -> tuple[int, Any]:
        """Any request; a body that is bytes is sent as it is."""
        assert self._session is not None
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=30)
        async with self._session.request(method, self._server + path, data=data, headers=headers, timeout=timeout) as answer:
            return answer.status, await answer.json()

    async def create(self, kind: Kind, namespace: str, document: object, *, strict: bool = False) -> tuple[int, Any]:
        """As `kubectl` does where it is strict: a field that is not known is refused."""
        return await self.send("POST", path_of(kind, namespace) + ("?fieldValidation=Strict" if strict else ""), document)

    async def list(self, kind: Kind, namespace: str) -> list[Any]:
        """All of a kind."""
        status, found = await self.send("GET", path_of(kind, namespace))
        assert status == 200, found
        return [one | {"kind": kind.kind} for one in found["items"]]

    async def patch(self, kind: Kind, namespace: str, name: str, changes: dict[str, Any], *, subresource: str = "") -> tuple[int, Any]:
        """A merge patch."""
        return await self.send("PATCH", f"{path_of(kind, namespace)}/{name}{subresource}", changes, content_type=MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, *, at_once: bool = False) -> int:
        """`at_once`: without waiting for a kubelet, as one does that has ended the pod."""
        options = {"gracePeriodSeconds": 0} if at_once else {}
        return (await self.send("DELETE", f"{path_of(kind, namespace)}/{name}", options))[0]

    async def make_namespace(self, name: str) -> None:
        """Of this name; must not be there yet."""
        status, found = await self.send("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        assert status == 201, found


def path_of(kind: Kind, namespace: str) -> str:
    """Of its collection."""
    prefix = "apis" if "/" in kind.api_version else "api"
    return f"/{prefix}/{kind.api_version}/namespaces/{namespace}/{kind.plural}"


def _context(document: Any) -> ssl.SSLContext:
    user = document["users"][0]["user"]
    authority = base64.b64decode(document["clusters"][0]["cluster"]["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    with tempfile.NamedTemporaryFile() as file:
        file.write(base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"]))
        file.flush()
        context.load_cert_chain(file.name)
    return context
