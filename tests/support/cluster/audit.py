# SPDX-License-Identifier: Apache-2.0
"""Reads the requests of operators from the audit log of the node's API server: each right that they used, and each refusal.

Real: the log of a real cluster. A refusal counts only while an account has its rights. An uninstall, or the end of a namespace, takes the
rights away before the process ends, and a namespace that ends refuses new objects too.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.demo.installation import RELEASE
from tools.demo.kubectl import Document, Kubectl
from tools.devcluster import cluster
from tools.devcluster.errors import NotOfThisMachine

SECURITY_PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"
OUTPUT = Path("bench-output") / "rights-used.txt"


class Right(NamedTuple):
    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


# Never a request by itself; see tests/operator/apiserver/test_rights_by_audit.py.
BY_ADMISSION = Right("diffusion-operator.dev", "diffusiondeployments/finalizers", "update")


class Usage(NamedTuple):
    used: Counter[Right]
    refused: list[str]

    def table(self, rights: set[Right]) -> str:
        lines = [f"{self.used[right]:8} {right}" for right in sorted(rights | set(self.used))]
        return "\n".join(["requests right", *lines, f"refused: {self.refused or 'none'}", ""])


def usage(entries: Iterable[Document], account: str = RELEASE) -> Usage:
    """Count the rights that an account of this name used, and list its refusals, over all namespaces.

    A request counts once, although a watch has two entries. Refusals are left out in a namespace that ends or has lost the role binding.
    """
    found, taken = Usage(Counter(), []), set[str]()
    each = {entry["auditID"]: entry for entry in entries if "objectRef" in entry}
    for entry in sorted(each.values(), key=lambda entry: str(entry["requestReceivedTimestamp"])):
        about = entry["objectRef"]
        if about["resource"] == "rolebindings" and about.get("name", RELEASE).startswith(RELEASE):
            (taken.discard if entry["verb"] == "create" else taken.add)(about["namespace"])
        if not entry["user"]["username"].endswith(f":{account}"):
            continue
        if entry.get("responseStatus", {}).get("code") not in (401, 403):
            found.used.update(right_of(entry))
        elif about.get("namespace") not in taken and "NamespaceTerminating" not in str(entry["responseStatus"].get("details")):
            found.refused.append(f"{entry['verb']} {about}: {entry['responseStatus'].get('message')}")
    return found


def right_of(entry: Document) -> Iterator[Right]:
    """Yield the rights that a request needs; an apply that creates an object needs the right to create as well."""
    about = entry["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    yield Right(about.get("apiGroup", ""), resource, entry["verb"])
    if entry["verb"] == "patch" and entry.get("responseStatus", {}).get("code") == 201:
        yield Right(about.get("apiGroup", ""), resource, "create")


def documented(page: Path = SECURITY_PAGE) -> set[Right]:
    """Return the rights in the table of docs/security.md."""
    table = page.read_text().partition("## The operator's rights")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| (core|`)", line)]
    return {
        Right("" if group == "core" else group.strip("`"), resource.strip("`"), verb)
        for group, resources, verbs, _ in cells
        for resource in resources.split(", ")
        for verb in verbs.split(", ")
    }


def granted(role: Document) -> set[Right]:
    rules = [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in role["rules"]]
    return {Right(*one) for rule in rules for one in itertools.product(*rule)}


def read_log(lines: Iterable[str], since: datetime) -> Iterator[Document]:
    """Read the log's entries since a time."""
    yield from (entry for line in lines if datetime.fromisoformat((entry := json.loads(line))["requestReceivedTimestamp"]) >= since)


def check_rights(kubectl: Kubectl, *, since: datetime, whole: bool) -> None:
    """Check that the operator was refused nothing since a time, and write the table of its rights to bench-output.

    With `whole` also check that all granted rights were used, and that docs/security.md lists the same ones.
    Without nodes on this machine, whose audit log it reads, it does nothing.
    """
    try:
        log = cluster.provider().own_nodes().audit_log()
    except NotOfThisMachine:
        return
    roles = kubectl.get("roles", "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
    rights, found = set[Right]().union(*map(granted, roles)), usage(read_log(log, since))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(found.table(rights))
    assert found.refused == [], "the operator's account was refused what it asked for"
    if whole:
        assert {*found.used, BY_ADMISSION} == rights == documented(), f"unused, not the role's, or not documented; see {OUTPUT}"


def all_selected(session: pytest.Session, folder: Path) -> bool:
    """Return whether all test functions of a folder are selected, and none has failed so far."""
    chosen = {(item.path, getattr(item, "originalname", "")) for item in session.items}
    functions = {(file, name) for file in folder.glob("test_*.py") for name in re.findall(r"(?m)^def (test_\w+)", file.read_text())}
    return session.testsfailed == 0 and functions <= chosen
