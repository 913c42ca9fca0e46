# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as we use it: twelve verbs over plain dicts. Nothing else knows the client library.

Paths are built from our own table of kinds, so there is no discovery, no cache file of it, and no right needed for it.
"""

import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import quote
from urllib.request import getproxies

import aiohttp
import msgspec
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient, Resource

from diffusion_operator import watch_stream
from diffusion_operator.api.names import FIELD_MANAGER, GROUP, KINDS, VERSION, Kind
from diffusion_operator.errors import ClusterConflict, ClusterError, ClusterRefused, ClusterUnavailable, NamespaceEnds

Manifest = dict[str, Any]
Operation = dict[str, Any]
"""An operation of a JSON patch."""

REQUEST_TIMEOUT_S = 15
RETRY_AFTER_MAX_S = 600.0
POOL_SIZE = 0  # no limit: the queue bounds what runs at once
PAGE = 100
"""Objects in one answer to a list. The memory that six listings of 500 each take stays with the process: 65 MB; of 100 each 15 MB."""
# With the parameter the client library sends our bytes as they are.
APPLY = "application/apply-patch+yaml; charset=utf-8"

# An admission webhook may give a code alone.
_REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 422: "Invalid"}

log = logging.getLogger(__name__)


Answered = Callable[[Kind, Manifest], None]


def _nothing() -> None:
    pass


before_sending: ContextVar[Callable[[], None]] = ContextVar("before_sending", default=_nothing)
"""Called when a request has its connection and is about to be written to it. If it raises, nothing of the request is sent."""


def _ignore(kind: Kind, manifest: Manifest) -> None:
    pass


class Page(msgspec.Struct, frozen=True):
    items: list[Manifest]
    version: str
    """The version of the whole listing; an object missing from the listing did not exist at that version."""


class Cluster(Protocol):
    """Interface to the Kubernetes API. Tests of the reconcile code replace it with an in-memory fake."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None: ...

    async def adapter_versions(self, namespace: str, deployment: str) -> Mapping[str, object]:
        """Return the LoRAAdapters that name a deployment, keyed by name; a changed adapter has another version."""

    async def list(self, kind: Kind, namespace: str, *, labels: Mapping[str, str] | None = None) -> list[Manifest]: ...

    async def look_up(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """Read an object from the API server itself, whole with its managedFields; None if it is missing."""

    async def warnings(self, namespace: str, uid: str) -> Sequence[Manifest]:
        """Read the Events of the type Warning about an object."""

    async def create(self, manifest: Manifest) -> bool:
        """Create an object; return False if the name is taken."""

    async def try_create(self, manifest: Manifest) -> None:
        """Let the API server check by a dry run whether it would create an object, and create nothing.

        Raises its refusal as `create` would, except for a conflict (409): a name that is taken is no refusal.
        """

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply an object server-side, by force, and return it as it is afterwards.

        A UID or resourceVersion in the manifest's metadata binds the write: another object raises ClusterConflict.
        """

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Operation]) -> Manifest:
        """Apply a JSON patch (RFC 6902) to an object and return the result.

        Raises ClusterRefused with status 422 if a `test` operation fails.
        """

    async def apply_status(self, kind: Kind, namespace: str, name: str, *, status: Manifest, version: str) -> None:
        """Write an object's status, if the object still has the version that the status was computed from.

        Another version raises ClusterConflict; do nothing if the object is gone.
        """

    async def set_labels(self, kind: Kind, namespace: str, name: str, *, uid: str, labels: Mapping[str, str | None]) -> None: ...

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None: ...


class _NoDiscovery:
    def __init__(self, _client: DynamicClient, _cache_file: object) -> None:
        pass

    def __await__(self) -> Any:
        return self._itself().__await__()

    async def _itself(self) -> Self:
        return self


class KubernetesCluster:
    """Cluster over the `kubernetes` package; an async context manager that owns the connection pool."""

    def __init__(self, configuration: client.Configuration, answered: Answered = _ignore) -> None:
        """Call `answered` with each object that a write is answered with; dry runs are left out."""
        self._answered = answered
        self._api = client.ApiClient(configuration)
        self._client: DynamicClient = DynamicClient(self._api, discoverer=_NoDiscovery)
        self._resources = {kind: self._resource(kind) for kind in KINDS.values()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._send("get", kind, namespace, name)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def adapter_versions(self, namespace: str, deployment: str) -> Mapping[str, object]:
        found = await self.list(KINDS["LoRAAdapter"], namespace)
        return {
            one["metadata"]["name"]: (one["metadata"]["uid"], one["metadata"]["resourceVersion"])
            for one in found
            if one["spec"]["deploymentRef"]["name"] == deployment
        }

    async def list(self, kind: Kind, namespace: str, *, labels: Mapping[str, str] | None = None) -> list[Manifest]:
        return [manifest async for page in self.pages(kind, namespace, labels=labels) for manifest in page.items]

    async def pages(self, kind: Kind, namespace: str, *, labels: Mapping[str, str] | None = None) -> AsyncIterator[Page]:
        """Yield pages of objects; an empty namespace lists all namespaces. Only one page at a time is in memory."""
        position: str | None = None
        while True:
            page = await self._send("get", kind, namespace, None, label_selector=_selector(labels), limit=PAGE, _continue=position)
            yield Page(items=page["items"], version=page["metadata"]["resourceVersion"])
            position = page["metadata"].get("continue")
            if not position:
                return

    @asynccontextmanager
    async def watch(
        self, kind: Kind, namespace: str, *, since: str, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[watch_stream.Event]]:
        """Open the stream of changes since a version, which the API server ends. An empty namespace stands for all of them.

        Raises a ClusterError if the watch is refused, breaks or brings not even a bookmark.
        With its status 410 the API server no longer knows the version `since`.
        """
        path, request = self._resources[kind].path(namespace=namespace), f"watch {kind.plural} {namespace}/*"
        try:
            response = await self._client.request(
                "get", path, serialize=False, _request_timeout=watch_stream.limits(), watch="true", timeout_seconds=watch_stream.WATCH_S,
                resource_version=since, label_selector=_selector(labels), query_params=[("allowWatchBookmarks", "true")],
            )  # fmt: skip
            try:
                yield watch_stream.read_events(request, response.content)
            finally:
                response.close()
        except ApiException as error:
            raise _translate(request, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            raise ClusterUnavailable(f"{request}: {type(error).__name__}: {error}") from error

    async def published_kinds(self) -> Manifest:
        """Return the OpenAPI document of our kinds, which every account may read.

        It is an empty dict if reading it is forbidden (403), or if there is none (404).
        """
        path = f"/openapi/v3/apis/{GROUP}/{VERSION}"
        request = "read the schema of the operator's kinds"
        try:
            response = await self._client.request("get", path, serialize=False, _request_timeout=REQUEST_TIMEOUT_S)
            content: Manifest = await response.json(loads=msgspec.json.decode)
        except ApiException as error:
            if error.status in (403, 404):
                return {}
            raise _translate(request, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterUnavailable(f"{request}: {type(error).__name__}: {error}") from error
        return content

    async def look_up(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """Find an object by a list with a field selector; None if it is missing.

        There is the right to list and not to get.
        """
        page = await self._send("get", kind, namespace, None, field_selector=f"metadata.name={name}")
        found = next(iter(page["items"]), None)
        return {"apiVersion": kind.api_version, "kind": kind.kind, **found} if found is not None else None

    async def warnings(self, namespace: str, uid: str) -> Sequence[Manifest]:
        selector = f"involvedObject.uid={uid},type=Warning"
        return tuple((await self._send("get", KINDS["Event"], namespace, None, field_selector=selector, limit=PAGE))["items"])

    async def create(self, manifest: Manifest) -> bool:
        kind, namespace, _ = _identity(manifest)
        try:
            await self._send("post", kind, namespace, None, body=manifest, field_manager=FIELD_MANAGER)
        except ClusterConflict as error:
            if error.reason == "AlreadyExists":  # a quota that is counted meanwhile and a webhook answer 409, too
                return False
            raise
        return True

    async def try_create(self, manifest: Manifest) -> None:
        kind, namespace, _ = _identity(manifest)
        try:
            await self._send("post", kind, namespace, None, body=manifest, field_manager=FIELD_MANAGER, dry_run="All")
        except ClusterConflict:
            return  # names are compared last

    async def apply(self, manifest: Manifest) -> Manifest:
        kind, namespace, name = _identity(manifest)
        return await self._apply(kind, namespace, name, manifest)

    async def apply_status(self, kind: Kind, namespace: str, name: str, *, status: Manifest, version: str) -> None:
        """Write a status for one version, or do nothing if the object is gone.

        The status endpoint ignores a UID, but a recreated object has another version.
        """
        metadata = {"name": name, "namespace": namespace, "resourceVersion": version}
        body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "status": status}
        try:
            await self._apply(kind, namespace, name, body, subresource="/status")
        except ClusterError as error:
            if error.status != 404:  # gone meanwhile
                raise

    async def set_labels(self, kind: Kind, namespace: str, name: str, *, uid: str, labels: Mapping[str, str | None]) -> None:
        """Set labels of an object, and remove those whose value is None.

        Do nothing if the object is gone or has another UID.
        """
        try:
            await self._merge(kind, namespace, name, {"metadata": {"uid": uid, "labels": dict(labels)}})
        except ClusterError as error:
            if error.status not in (404, 409):
                raise

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Ask for the deletion of the object with this UID. Do nothing if it is gone, or if another object has its name by now."""
        try:
            await self._send("delete", kind, namespace, name, body={"preconditions": {"uid": uid}})
        except ClusterError as error:
            if error.status not in (404, 409):
                raise

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Operation]) -> Manifest:
        body, content_type = list(operations), "application/json-patch+json"
        return await self._send("patch", kind, namespace, name, body=body, content_type=content_type, field_manager=FIELD_MANAGER)

    async def merge(self, manifest: Manifest) -> Manifest:
        """Send a merge patch and return the object after it.

        A UID or resourceVersion in the manifest's metadata binds the write: another object raises ClusterConflict.
        """
        kind, namespace, name = _identity(manifest)
        return await self._merge(kind, namespace, name, manifest)

    async def _merge(self, kind: Kind, namespace: str, name: str, body: Manifest) -> Manifest:
        content_type = "application/merge-patch+json"
        return await self._send("patch", kind, namespace, name, body=body, content_type=content_type, field_manager=FIELD_MANAGER)

    async def _apply(self, kind: Kind, namespace: str, name: str, body: Manifest, *, subresource: str = "") -> Manifest:
        return await self._send(
            "patch", kind, namespace, name, subresource=subresource, body=_yaml(body), content_type=APPLY,
            field_manager=FIELD_MANAGER, force_conflicts=True,
        )  # fmt: skip

    async def _send(
        self, method: str, kind: Kind, namespace: str, name: str | None, *, subresource: str = "", **parameters: Any
    ) -> Manifest:
        # Quoted: the name may come from another object's spec, and must not lead to another path.
        path = self._resources[kind].path(name=quote(name, safe="") if name is not None else None, namespace=namespace) + subresource
        request = f"{method} {kind.plural} {namespace}/{name or '*'}"
        try:
            response = await self._client.request(method, path, serialize=False, _request_timeout=REQUEST_TIMEOUT_S, **parameters)
            content: Manifest = await response.json(loads=msgspec.json.decode)
        except ApiException as error:
            raise _translate(request, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterUnavailable(f"{request}: {type(error).__name__}: {error}") from error
        # A deletion that is done at once is answered with a Status; what a dry run is answered with is not there.
        if method != "get" and content.get("kind") == kind.kind and "dry_run" not in parameters:
            self._answered(kind, content)
        return content

    def _resource(self, kind: Kind) -> Resource:
        group, version = kind.group_and_version
        prefix = "apis" if group else "api"
        return Resource(
            prefix=prefix, group=group, api_version=version, kind=kind.kind, namespaced=True, name=kind.plural, client=self._client
        )


async def connect(answered: Answered = _ignore) -> KubernetesCluster:
    """Return a client that uses the pod's service account, or outside a pod the kubeconfig; it sends nothing yet.

    `answered` is given every object as a write left it.
    """
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        # The library reads KUBECONFIG when it is imported; we read it when it counts.
        await config.load_kube_config(config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration)
    configuration.connection_pool_maxsize = POOL_SIZE
    # To ask the environment for a proxy again costs two hops to a thread, for every request.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies()), "trace_configs": [_trace()]}
    return KubernetesCluster(configuration, answered)


def _trace() -> aiohttp.TraceConfig:
    """Return a trace that calls `before_sending` when a request has its connection, a new one or one used before.

    Between that and the first byte of the request, aiohttp waits for nothing.
    """
    trace = aiohttp.TraceConfig()

    async def ask(*_: object) -> None:
        before_sending.get()()

    trace.on_connection_reuseconn.append(ask)
    trace.on_connection_create_end.append(ask)
    return trace


def _selector(labels: Mapping[str, str] | None) -> str | None:
    return ",".join(f"{key}={value}" for key, value in labels.items()) if labels else None


def _yaml(body: Manifest) -> bytes:
    r"""Encode as JSON that is also YAML, where surrogate pairs are unknown.

    So characters beyond ASCII are escaped up to `\uffff`, and higher ones stay as they are.
    """
    text = json.dumps(body, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _identity(manifest: Manifest) -> tuple[Kind, str, str]:
    metadata = manifest["metadata"]
    return KINDS[manifest["kind"]], metadata["namespace"], metadata["name"]


def _translate(request: str, error: ApiException) -> ClusterError:
    (reason, said), status = _answer(error), error.status
    message = f"{request}: {error.status} {said}"
    kind: type[ClusterError] = ClusterConflict if error.status == 409 else ClusterRefused
    if error.status == 429 or error.status >= 500:
        kind = ClusterUnavailable
    elif error.status == 403 and '"NamespaceTerminating"' in str(error.body):
        kind = NamespaceEnds
    elif error.status == 422 and "metadata.uid: Invalid value" in said:  # a write that was bound to another object of the name
        kind, status, reason = ClusterConflict, 409, "Conflict"
    return kind(message, status=status, reason=reason, said=said, retry_after_s=_retry_after_s(error))


def _retry_after_s(error: ApiException) -> float:
    """Return the seconds of the Retry-After header, at most 600; 0 without the header, or if it has a date."""
    text = (error.headers or {}).get("Retry-After", "")
    return min(float(text), RETRY_AFTER_MAX_S) if text.isdigit() else 0.0


def _answer(error: ApiException) -> tuple[str, str]:
    """Return the reason and message of the API server's answer.

    If the body is no Status, the reason is empty and the message is the body, or else the HTTP reason.
    """
    try:
        status = json.loads(error.body)
        return str(status.get("reason") or _REASONS.get(error.status, "")), str(status["message"])
    except (AttributeError, TypeError, ValueError, KeyError):
        return "", str(error.body or error.reason)
