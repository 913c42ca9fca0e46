# SPDX-License-Identifier: Apache-2.0
"""Raw requests to a real API server as an administrator: the actions of a user, a kubelet or a controller.

Real: the server, its admission and its answers. Not real: the user.
"""

import json
from pathlib import Path
from typing import Any, Self

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.rest import RESTClientObject

from diffusion_operator.api.names import Kind

MERGE = "application/merge-patch+json"
TIMEOUT = aiohttp.ClientTimeout(total=30)


class RestClient:
    """A client of the API server in a kubeconfig, with its user's rights; an async context manager.

    Most answers are (status, document), and a refusal raises nothing.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        found = client.Configuration()
        await config.load_kube_config(config_file=str(self._kubeconfig), client_configuration=found)
        connector = aiohttp.TCPConnector(ssl=RESTClientObject(found).ssl_context, limit=32)
        self._session = aiohttp.ClientSession(found.host, connector=connector, timeout=TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, method: str, path: str, body: object = None, *, content_type: str = "application/json") -> tuple[int, Any]:
        """Send any request, and return status and document of the answer, also of an error.

        A body of bytes is sent as it is, any other as JSON.
        """
        assert self._session is not None
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self._session.request(method, path, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def create(self, kind: Kind, namespace: str, document: Any, *, strict: bool = False) -> tuple[int, Any]:
        """Create an object in `namespace`, and return status and document of the answer.

        `strict` refuses unknown fields, as `kubectl` does.
        """
        placed = document | {"metadata": document["metadata"] | {"namespace": namespace}}
        return await self.send("POST", path_of(kind, namespace) + ("?fieldValidation=Strict" if strict else ""), placed)

    async def list(self, kind: Kind, namespace: str) -> list[Any]:
        """Return all objects of a kind in a namespace, each with its `kind`; AssertionError if the server answers with an error."""
        status, found = await self.send("GET", path_of(kind, namespace))
        assert status == 200, found
        return [one | {"kind": kind.kind} for one in found["items"]]

    async def patch(self, kind: Kind, namespace: str, name: str, changes: dict[str, Any], *, subresource: str = "") -> tuple[int, Any]:
        """Send a merge patch, and return status and document of the answer; `subresource` ends the path, such as `/status`."""
        return await self.send("PATCH", f"{path_of(kind, namespace)}/{name}{subresource}", changes, content_type=MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, *, at_once: bool = False, uid: str = "") -> int:
        """Delete an object, and return the status of the answer, also that of an error.

        `at_once` sets no grace period, as a kubelet does that has ended the pod; `uid` deletes only the object that has it.
        """
        options = ({"gracePeriodSeconds": 0} if at_once else {}) | ({"preconditions": {"uid": uid}} if uid else {})
        return (await self.send("DELETE", f"{path_of(kind, namespace)}/{name}", options))[0]

    async def make_namespace(self, name: str) -> None:
        """Create a namespace; it must not exist yet."""
        await self.make("/api/v1/namespaces", {"metadata": {"name": name}})

    async def make(self, path: str, document: object) -> None:
        """Create any object at the path of its collection; AssertionError if the server does not answer with 201."""
        status, found = await self.send("POST", path, document)
        assert status == 201, found


def path_of(kind: Kind, namespace: str | None = None) -> str:
    """Return the path of a kind's collection, in all namespaces where none is named."""
    prefix = "apis" if "/" in kind.api_version else "api"
    return f"/{prefix}/{kind.api_version}{f'/namespaces/{namespace}' if namespace else ''}/{kind.plural}"
