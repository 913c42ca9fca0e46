# SPDX-License-Identifier: Apache-2.0
"""Obstacles for objects of one kind in one namespace of a real API server: a quota, an admission policy, an admission webhook.

Real: the admission of the API server. Not real: the webhook's program, which is a server in the test, and the status of a quota.
"""

import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from diffusion_operator.api.names import Kind
from support.apiserver.rest_client import MERGE, RestClient, path_of
from tools.devcluster.certs import Authority

RESOURCES = ["services", "secrets", "configmaps", "pods", "networkpolicies", "poddisruptionbudgets"]
RULES = [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": RESOURCES}]
LABEL = "refuse"
QUOTA = Kind("v1", "ResourceQuota", "resourcequotas")
REGISTRATION = "/apis/admissionregistration.k8s.io/v1"
POLICY_SAYS, WEBHOOK_SAYS, QUOTA_SAYS = "the policy wants none of these", "the webhook wants none of these", "exceeded quota"


@asynccontextmanager
async def refusing_policy(client: RestClient) -> AsyncIterator[None]:
    """Install an admission policy on the server while the block runs, and delete it afterwards.

    In each namespace it refuses new objects of the kind that the namespace's label `refuse` names. Only kinds in RESOURCES are covered.
    """
    free = f"!('{LABEL}' in namespaceObject.metadata.labels) || namespaceObject.metadata.labels['{LABEL}'] != request.kind.kind"
    validations = [{"expression": free, "message": POLICY_SAYS}]
    policy = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": RULES}, "validations": validations}
    binding = {"policyName": "refuse", "validationActions": ["Deny"]}
    parts = {"validatingadmissionpolicies": policy, "validatingadmissionpolicybindings": binding}
    for plural, spec in parts.items():
        await client.make(f"{REGISTRATION}/{plural}", {"metadata": {"name": "refuse"}, "spec": spec})
    try:
        yield
    finally:
        for plural in reversed(parts):
            await client.send("DELETE", f"{REGISTRATION}/{plural}/refuse")


async def refuse_by_policy(client: RestClient, namespace: str, kind: Kind | None) -> None:
    """Label a namespace so that the policy of `refusing_policy` refuses new objects of a kind there, and of no other kind.

    None removes the label, so that the policy refuses nothing there.
    """
    change = {"metadata": {"labels": {LABEL: kind.kind if kind is not None else None}}}
    status, found = await client.send("PATCH", f"/api/v1/namespaces/{namespace}", change, content_type=MERGE)
    assert status == 200, found


async def refuse_by_quota(client: RestClient, namespace: str, kind: Kind | None) -> None:
    """Forbid new objects of a kind in a namespace by a quota of zero called `none`, which must not exist yet.

    The status of the quota is written too, since no controller computes it here. None as `kind` deletes the quota.
    """
    if kind is None:
        await client.delete(QUOTA, namespace, "none")
        return
    group = kind.group_and_version[0]
    hard = {f"count/{kind.plural}" + (f".{group}" if group else ""): "0"}
    await client.make(path_of(QUOTA, namespace), {"metadata": {"name": "none"}, "spec": {"hard": hard}})
    status, found = await client.patch(QUOTA, namespace, "none", {"status": {"hard": hard, "used": hard}}, subresource="/status")
    assert status == 200, found


class Webhook:
    """An admission webhook that refuses new objects of the kind that `refused` has for their namespace; an async context manager.

    It is registered while the block runs, and only for namespaces with the label `webhook: yes`.
    """

    def __init__(self, client: RestClient, folder: Path) -> None:
        self._client = client
        self._folder = folder
        app = web.Application()
        app.router.add_post("/", self._review)
        self._server = TestServer(app)
        self.refused: dict[str, str] = {}
        """Refused kinds by namespace."""
        self.broken: set[str] = set()
        """Namespaces for which the webhook itself fails with an error."""

    async def __aenter__(self) -> "Webhook":
        authority = Authority(self._folder / "certs")
        authority.issue("webhook", user="webhook", group="webhooks", addresses=("IP:127.0.0.1",))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(authority.file("webhook.crt"), authority.file("webhook.key"))
        await self._server.start_server(ssl=context)
        await self._register(f"https://127.0.0.1:{self._server.port}/", authority.file("ca.crt").read_bytes())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.send("DELETE", f"{REGISTRATION}/validatingwebhookconfigurations/refuse")
        await self._server.close()

    async def _register(self, url: str, authority: bytes) -> None:
        webhook = {
            "name": "refuse.example.com",
            "clientConfig": {"url": url, "caBundle": base64.b64encode(authority).decode()},
            "rules": RULES,
            "namespaceSelector": {"matchLabels": {"webhook": "yes"}},
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        body = {"metadata": {"name": "refuse"}, "webhooks": [webhook]}
        await self._client.make(f"{REGISTRATION}/validatingwebhookconfigurations", body)

    async def _review(self, request: web.Request) -> web.Response:
        asked = (await request.json())["request"]
        if asked["namespace"] in self.broken:
            raise web.HTTPInternalServerError
        refused = self.refused.get(asked["namespace"]) == asked["kind"]["kind"]
        said = {"status": {"message": WEBHOOK_SAYS, "code": 403}} if refused else {}
        answer = {"uid": asked["uid"], "allowed": not refused, **said}
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer})
