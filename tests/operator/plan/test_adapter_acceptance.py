# SPDX-License-Identifier: Apache-2.0
"""Acceptance of adapters by a deployment, by tables over the pure decision: the request on the left, the reason on the right."""

from typing import Any

import msgspec
import pytest

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError, WorkerPhase
from diffusion_operator.plan.adapters.acceptance import Decision, overruled
from diffusion_operator.plan.adapters.error_codes import FINAL, SOURCE_REASONS
from diffusion_operator.plan.deployment import plan_deployment
from diffusion_operator.plan.observed.observed import Observed, Poll
from diffusion_worker.errors import ErrorCode
from support.operator.plan_builders import NOW, pod, says

HUB = {"huggingFace": {"repo": "org/style", "tokenSecretRef": {"name": "hub"}}}
BUCKET = {"s3": {"uri": "s3://bucket/a/", "credentialsSecretRef": {"name": "bucket"}}}
CLAIM = {"pvc": {"claimName": "styles", "path": "a"}}
PINNED = {"deploymentUID": "u", "resolved": {"source": "/loras/x", "digest": "sha256:a", "rank": 128}}
WAS_ACCEPTED = {
    "deploymentUID": "u",
    "conditions": [
        {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ],
}


def deployed(**lora: Any) -> DiffusionDeployment:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {"model": {"source": {"path": "/m"}}, "servedNames": ["gpt-image-1"], "lora": lora}
    return msgspec.convert({"metadata": metadata, "spec": spec}, DiffusionDeployment)


def made(name: str = "x", *, age: int = 0, status: dict[str, Any] | None = None, **spec: Any) -> LoRAAdapter:
    """Return an adapter; `age` is the second of its creation."""
    metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", "creationTimestamp": f"2026-01-01T00:00:{age:02}Z"}
    base = {"deploymentRef": {"name": "d"}, "source": {"path": "/loras/x"}}
    return msgspec.convert({"metadata": metadata, "spec": base | spec, "status": status or {}}, LoRAAdapter)


def held(path: str, state: RecordState = RecordState.LOADED) -> AdapterRecord:
    return msgspec.convert({"name": "x", "state": state.value, "source": {"path": path}}, AdapterRecord)


def decided(adapter: LoRAAdapter, *others: LoRAAdapter, records: tuple[AdapterRecord, ...] = (), **lora: Any) -> Decision:
    """Return the decision of a plan where one replica is awake."""
    polls = {pod().uid: Poll(state=says(WorkerPhase.READY, adapters=records))}
    adapters = (adapter, *others)
    observed = Observed(deployment=deployed(**lora), default_image="worker:1", pods=(pod(),), polls=polls, adapters=adapters)
    return plan_deployment(observed, NOW).adapters.rows[adapter.metadata.uid].decision


REFUSALS: list[tuple[str, LoRAAdapter, tuple[LoRAAdapter, ...], dict[str, Any], str, list[str]]] = [
    ("LoRA is off", made(), (), {"enabled": False}, "LoRADisabled", ["spec.lora.enabled", "DiffusionDeployment d"]),
    ("the served name", made(adapterName="d"), (), {}, "NameReserved", ["'d'"]),
    ("one of the served names", made(adapterName="gpt-image-1"), (), {}, "NameReserved", ["'gpt-image-1'"]),
    ("a younger one of the name", made(age=2), (made("y", age=1, adapterName="x"),), {}, "NameConflict", ["LoRAAdapter y"]),
    ("a Secret that is not mounted", made(source=HUB), (), {}, "SecretNotMounted", ["Secret hub", "spec.lora.secrets"]),
    ("another Secret is", made(source=BUCKET), (), {"secrets": ["hub"]}, "SecretNotMounted", ["Secret bucket"]),
    ("a claim that is not mounted", made(source=CLAIM), (), {}, "ClaimNotMounted", ["Claim styles", "spec.lora.claims"]),
    ("an expected rank", made(expectedRank=48), (), {"maxRank": 32}, "RankTooLarge", ["expectedRank is 48", "is 32", "maxRank to 64"]),
    ("a reported rank", made(status=PINNED), (), {}, "RankTooLarge", ["adapter has rank 128", "is 64", "maxRank to 128"]),
    ("no slots at all", made(), (), {"maxLoaded": 0}, "CapacityExceeded", ["maxLoaded", "is 0"]),
    (
        "one Resident too many",
        made(age=2, residency="Resident"),
        (made("y", age=1, residency="Resident"),),
        {"maxLoaded": 1},
        "CapacityExceeded",
        ["is 1, and it has as many older adapters with the residency Resident"],
    ),
]


@pytest.mark.parametrize(("adapter", "others", "lora", "reason", "words"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refused_is(adapter: LoRAAdapter, others: tuple[LoRAAdapter, ...], lora: dict[str, Any], reason: str, words: list[str]) -> None:
    decision = decided(adapter, *others, **lora)
    assert (decision.accepted, decision.reason, decision.desired) == (False, reason, None)
    assert [word for word in words if word not in decision.message] == []


TAKEN: list[tuple[str, LoRAAdapter, tuple[LoRAAdapter, ...], dict[str, Any]]] = [
    ("a Secret that is mounted", made(source=HUB), (), {"secrets": ["hub"]}),
    ("a repository without a Secret", made(source={"huggingFace": {"repo": "a/b"}}), (), {}),
    ("a claim that is mounted", made(source=CLAIM), (), {"claims": ["styles"]}),
    ("a rank that just fits", made(expectedRank=64), (), {}),
    ("any number of Cached ones", made(age=2), (made("y", age=1, residency="Resident"),), {"maxLoaded": 1}),
    ("OnDemand ones beside", made(age=2, residency="OnDemand"), (made("y", age=1, residency="Resident"),), {"maxLoaded": 1}),
    ("one beside a suspended one", made(age=2, residency="Resident"), (made("y", residency="Resident", suspend=True),), {"maxLoaded": 1}),
    ("a rank of another deployment's time", made(status=PINNED | {"deploymentUID": "older"}), (), {}),
]  # fmt: skip


@pytest.mark.parametrize(("adapter", "others", "lora"), [row[1:] for row in TAKEN], ids=[row[0] for row in TAKEN])
def test_taken_is(adapter: LoRAAdapter, others: tuple[LoRAAdapter, ...], lora: dict[str, Any]) -> None:
    decision = decided(adapter, *others, **lora)
    assert (decision.accepted, decision.message) == (True, "accepted by DiffusionDeployment d")
    assert decision.desired is not None


HELD = [
    ("what is somebody else's", {}, held("/loras/other"), False),
    ("what drains, though of the same source", {}, held("/loras/x", RecordState.DRAINING), False),
    ("what the mounted file had already", {}, held("/loras/x"), True),
    ("its own earlier source", WAS_ACCEPTED, held("/loras/other"), True),
    ("its own from an earlier deployment", WAS_ACCEPTED | {"deploymentUID": "older"}, held("/loras/other"), False),
]


@pytest.mark.parametrize(("status", "record", "accepted"), [row[1:] for row in HELD], ids=[row[0] for row in HELD])
def test_a_name_that_a_replica_still_has_under(status: dict[str, Any], record: AdapterRecord, accepted: bool) -> None:
    decision = decided(made(status=status), records=(record,))
    assert (decision.accepted, decision.reason) == (accepted, "Accepted" if accepted else "NameConflict")


def test_a_branch_is_asked_for_at_the_commit_it_was_found_to_be() -> None:
    resolved = {"source": "hf://org/style@main", "digest": "sha256:a", "revision": "c0ffee"}
    adapter = made(source={"huggingFace": {"repo": "org/style"}}, status={"deploymentUID": "u", "resolved": resolved})
    desired = decided(adapter).desired
    assert desired is not None
    assert desired.load.source.hugging_face is not None
    assert (desired.load.source.hugging_face.revision, desired.load.digest) == ("c0ffee", "sha256:a")


def test_a_file_at_an_address_is_asked_for_by_the_digest_it_is_demanded_with() -> None:
    desired = decided(made(source={"http": {"url": "https://h/a.safetensors", "sha256": "ab"}})).desired
    assert desired is not None
    assert desired.load.digest == "sha256:ab"


CHANGES = [
    ("nothing", {}, False),
    ("the source", {"source": {"path": "/loras/y"}}, True),
    ("the components", {"components": ["Transformer"]}, True),
    ("the format", {"format": "Kohya"}, True),
    ("the expected rank", {"expectedRank": 16}, True),
    ("the scale", {"defaultScale": "0.5"}, False),
    ("the residency", {"residency": "Resident"}, False),
    ("the priority", {"priority": 3}, False),
]


@pytest.mark.parametrize(("spec", "voids"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_what_is_pinned_is_void_when_there_changes(spec: dict[str, Any], voids: bool) -> None:
    status = {"deploymentUID": "u", "resolved": {"source": "/loras/x", "digest": "sha256:a", "rank": 8}}
    desired = decided(made(status=status, **spec)).desired
    assert desired is not None
    assert (desired.load.digest, desired.changed) == ((None, True) if voids else ("sha256:a", False))


def test_what_only_a_replica_finds_out_overrules_and_the_adapter_stays_declared() -> None:
    """Check that a replica's final error overrules an acceptance, and that `desired` stays.

    If workers lost the adapter for the error, the error would vanish and the adapter be accepted once more.
    """
    decision = decided(made())
    found = overruled(decision, [WireError(code="NetworkError"), WireError(code="RankTooLarge", message="rank 128, at most 64")])
    assert (found.accepted, found.reason, found.message) == (False, "RankTooLarge", "rank 128, at most 64")
    assert found.desired == decision.desired


def test_every_code_the_plan_knows_is_one_that_a_worker_has() -> None:
    assert (FINAL | set(SOURCE_REASONS)) - set(ErrorCode) == {"ReloadLoop"}
