# SPDX-License-Identifier: Apache-2.0
"""A real API server with an audit log, the accounts and roles of the chart, and the operator's program under one of these accounts.

Namespaces enforce the restricted profile of Pod Security. Owner references are checked as OpenShift does it.

Real: the API server, its audit log, the accounts and the program. Not real: there is no kubelet, so no pod runs.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kubernetes import client, config

from diffusion_operator.api.names import GROUP
from support.apiserver.real_apiserver import kubectl, own_apiserver
from support.cluster.audit import Usage, usage
from support.operator.chart_rendering import NAMESPACE, Chart, Document, the_only
from support.operator.sole_operator import running
from support.soak.operator_process import OperatorProcess

RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
IDENTITY = "$(POD_NAME)_$(POD_UID)"  # the kubelet would fill it in
GRANTED_WITHIN_S = 30
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class AuditedApiserver:
    """An API server with an audit log, and its administrator's access."""

    def __init__(self, kubeconfig: Path, chart: Chart) -> None:
        self.kubeconfig = kubeconfig
        self._chart = chart

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return kubectl(self.kubeconfig, *words, stdin=stdin)

    def apply(self, *documents: Document) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)}))

    def namespace(self, name: str) -> None:
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})

    def rendered(self, **overrides: object) -> list[Document]:
        return self._chart.documents(overrides=overrides)

    def give_rights(self, documents: Sequence[Document]) -> None:
        """Apply those documents that are accounts, roles or bindings, and wait until the server grants the rights.

        The last rule of each bound role is tried, for its first account. AssertionError if a rule is not granted within 30 s.
        """
        self.apply(*(document for document in documents if document["kind"] in RIGHTS))
        roles = {_key(document): document for document in documents if document["kind"].endswith("Role")}
        for binding in (document for document in documents if document["kind"].endswith("Binding")):
            namespace = binding["metadata"].get("namespace", "")
            role = roles[(binding["roleRef"]["kind"], binding["roleRef"]["name"], namespace)]
            self._await_right(binding["subjects"][0], role["rules"][-1], namespace)

    def _await_right(self, account: Document, rule: Document, namespace: str) -> None:
        user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
        asked = {"group": rule["apiGroups"][0], "name": (rule.get("resourceNames") or [""])[0], "namespace": namespace}
        deadline = time.monotonic() + GRANTED_WITHIN_S
        while not self.may(user, rule["verbs"][0], rule["resources"][0], **asked):
            assert time.monotonic() < deadline, f"{user} was not granted {rule} in {namespace!r} within {GRANTED_WITHIN_S} s"
            time.sleep(0.05)

    def kubeconfig_of(self, account: str) -> Path:
        token = self.kubectl("create", "token", account, "--namespace", NAMESPACE).strip()
        content = json.loads(self.kubeconfig.read_text())
        content["users"][0]["user"] = {"token": token}
        path = self.kubeconfig.with_name(f"{account}-kubeconfig")
        path.write_text(json.dumps(content))
        return path

    @contextmanager
    def operator(self, documents: Sequence[Document], keys: Sequence[str]) -> Iterator[OperatorProcess]:
        """Run the operator's program while the block lasts, with the account and arguments of the Deployment among `documents`.

        `keys` are the lines of its key file. The block begins when the program is ready, and the program ends with the block.
        """
        spec = the_only(list(documents), "Deployment")["spec"]["template"]["spec"]
        arguments, kubeconfig = (
            [one.replace(IDENTITY, "demo-0_uid-of-demo-0") for one in spec["containers"][0]["args"][1:]],
            self.kubeconfig_of(spec["serviceAccountName"]),
        )
        options = {"program": "diffusion_operator", "arguments": arguments, "key": "\n".join(keys)}
        with tempfile.TemporaryDirectory(prefix="operator-") as folder, running(Path(folder), kubeconfig, **options) as operator:
            yield operator

    def try_pod(self, pod: Document) -> None:
        """Ask admission for a pod without creating it.

        Raises:
            AssertionError: the pod is refused; the message is the refusal.
        """
        self.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))

    def may(self, user: str, verb: str, resource: str, *, namespace: str, group: str = GROUP, name: str = "") -> bool:
        """Return whether `user` may do `verb` on a resource, asked as `kubectl auth can-i --as` asks.

        `resource` is a plural, and may have a subresource after a slash.
        """
        resource, _, subresource = resource.partition("/")
        about = {"group": group, "resource": resource, "name": name, "subresource": subresource, "verb": verb, "namespace": namespace}
        review = {"spec": {"user": user, "resourceAttributes": about}}
        with config.new_client_from_config(config_file=str(self.kubeconfig)) as connection:
            return bool(client.AuthorizationV1Api(connection).create_subject_access_review(review).status.allowed)

    def usage(self, account: str) -> Usage:
        """Return the rights that an account has used until now, with their counts, and its refusals, as the audit log shows them."""
        return usage(map(json.loads, (self.kubeconfig.parent / "audit.log").read_text().splitlines()), account)


def _key(document: Document) -> tuple[str, str, str]:
    return document["kind"], document["metadata"]["name"], document["metadata"].get("namespace", "")


@contextmanager
def audited_apiserver(chart: Chart) -> Iterator[AuditedApiserver]:
    with own_apiserver(audited=True, admission=["OwnerReferencesPermissionEnforcement"]) as kubeconfig:
        yield AuditedApiserver(kubeconfig, chart)
