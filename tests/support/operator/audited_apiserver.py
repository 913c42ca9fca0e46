# SPDX-License-Identifier: Apache-2.0
"""A real API server that notes what accounts ask for, with the chart's accounts and roles, and the operator's program under one of them.

Namespaces enforce the restricted profile of Pod Security. Owner references are checked as OpenShift does it.

Real: the API server, its audit log, the accounts and the program. Not real: there is no kubelet, so no pod runs.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kubernetes import client, config

from diffusion_operator.api.names import GROUP
from support.cluster.audit import Usage, usage
from support.operator.chart_rendering import NAMESPACE, Chart, Document, the_only
from support.operator.real_apiserver import kubectl, own_apiserver
from support.operator.sole_operator import running
from support.soak.operator_process import OperatorProcess

RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class AuditedApiserver:
    """Written to as its administrator."""

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
        """What the chart says about accounts, and nothing else of it."""
        self.apply(*(document for document in documents if document["kind"] in RIGHTS))

    def kubeconfig_of(self, account: str) -> Path:
        token = self.kubectl("create", "token", account, "--namespace", NAMESPACE).strip()
        content = json.loads(self.kubeconfig.read_text())
        content["users"][0]["user"] = {"token": token}
        path = self.kubeconfig.with_name(f"{account}-kubeconfig")
        path.write_text(json.dumps(content))
        return path

    @contextmanager
    def operator(self, documents: Sequence[Document], keys: Sequence[str]) -> Iterator[OperatorProcess]:
        """The program as the chart starts it, with these keys."""
        spec = the_only(list(documents), "Deployment")["spec"]["template"]["spec"]
        arguments, kubeconfig = spec["containers"][0]["args"][1:], self.kubeconfig_of(spec["serviceAccountName"])
        options = {"program": "diffusion_operator", "arguments": arguments, "key": "\n".join(keys)}
        with tempfile.TemporaryDirectory(prefix="operator-") as folder, running(Path(folder), kubeconfig, **options) as operator:
            yield operator

    def try_pod(self, pod: Document) -> None:
        """Whether admission lets it in; nothing is made. Raises with the refusal."""
        self.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))

    def may(self, user: str, verb: str, resource: str, *, namespace: str) -> bool:
        """What `kubectl auth can-i --as` asks; of our group."""
        resource, _, subresource = resource.partition("/")
        about = {"group": GROUP, "resource": resource, "subresource": subresource, "verb": verb, "namespace": namespace}
        review = {"spec": {"user": user, "resourceAttributes": about}}
        with config.new_client_from_config(config_file=str(self.kubeconfig)) as connection:
            return bool(client.AuthorizationV1Api(connection).create_subject_access_review(review).status.allowed)

    def usage(self, account: str) -> Usage:
        """Read what the account asked for until now."""
        return usage(map(json.loads, (self.kubeconfig.parent / "audit.log").read_text().splitlines()), account)


@contextmanager
def audited_apiserver(chart: Chart) -> Iterator[AuditedApiserver]:
    with own_apiserver(audited=True, admission=["OwnerReferencesPermissionEnforcement"]) as kubeconfig:
        yield AuditedApiserver(kubeconfig, chart)
