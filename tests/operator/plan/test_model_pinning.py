# SPDX-License-Identifier: Apache-2.0
"""The model version that replicas must serve, by tables and lives: pinned once, passed to the next, and the reason if there is none."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.deployment_status import ModelStatus
from diffusion_operator.api.meta import ConditionStatus
from diffusion_operator.api.names import ANNOTATION_RESTARTED_AT, CONFIG_MAP, DEPLOYMENT, POD
from diffusion_operator.api.worker_state import LoadReport, ModelReport, WireError, WorkerPhase
from diffusion_operator.plan.observed.observed import Poll
from diffusion_operator.plan.observed.pods import Container, Exit
from diffusion_operator.plan.observed.replica_state import read_group
from diffusion_operator.plan.observed.worker_exit_codes import code_in
from diffusion_operator.plan.replicas.model_pinning import Resolution, model_resolved, resolve_model, unpinned
from diffusion_operator.plan.replicas.revision import template_of
from support.operator.fake_cluster import EPOCH
from support.operator.plan_builders import NOW, made, pod, says
from support.operator.rig import Rig, deployment

HUB = {"huggingFace": {"repo": "org/x"}}
FOLDER = {"path": "/m"}
NOT_FOUND = "SourceNotFound: model: hub org/x@main: the hub has no such repository or revision"
RAN_BEFORE = {"ready": False, "container": Container(waiting_reason="CrashLoopBackOff", restarts=1, last_exit=Exit(1, message=NOT_FOUND))}
LATER = NOW + timedelta(hours=1)


def ready(revision: str | None = None, digest: str | None = None) -> Any:
    return says(WorkerPhase.READY, model=ModelReport(revision=revision, digest=digest, pipeline="P", size_bytes=5))


def missing(code: str) -> Any:
    return says(WorkerPhase.STARTING, failure=WireError(code=code, message="model: what the source says", retryable=True))


def resolved(
    *reports: Any, source: dict[str, Any] = HUB, pinned: ModelStatus | None = None, image: str = "worker:1", **facts: Any
) -> Resolution:
    """Resolve the model from the replicas' state documents; None is a replica that does not answer, `facts` go to every pod."""
    document = made(model={"source": source})
    template = template_of(document, default_image=image)
    if pinned is not None:
        document = made({"model": pinned}, model={"source": source})
    pods = [pod(index, **({"revision": template.revision} | facts)) for index in range(len(reports))]
    groups = [read_group(one, Poll(state=report), None, document) for one, report in zip(pods, reports, strict=True)]
    return resolve_model(document, template, groups, NOW)


def pin(revision: str | None = None, digest: str | None = None, **how: Any) -> ModelStatus:
    """Return the pin that a single replica with this version leaves in the status."""
    return resolved(ready(revision, digest), **how).model


PINS = [
    ("nobody has loaded it", [says(WorkerPhase.STARTING)], HUB, (None, None)),
    ("one is looking", [says(WorkerPhase.STARTING, model=ModelReport(revision="a"))], HUB, (None, None)),
    ("the first", [ready("a")], HUB, ("a", None)),
    ("its digest is known later", [ready("a", "sha256:1")], HUB, ("a", "sha256:1")),
    ("the first of two", [ready("a"), ready("b", "sha256:2")], HUB, ("a", None)),
    ("a folder without its digest", [ready()], FOLDER, (None, None)),
    ("a folder", [ready(None, "sha256:1")], FOLDER, (None, "sha256:1")),
    ("asleep since its start", [says(WorkerPhase.ASLEEP, model=ModelReport(revision="a"))], HUB, ("a", None)),
]


@pytest.mark.parametrize(("reports", "source", "expected"), [row[1:] for row in PINS], ids=[row[0] for row in PINS])
def test_pinned_is_what_the_first_replica_loaded(reports: list[Any], source: dict[str, Any], expected: tuple[str, str]) -> None:
    model = resolved(*reports, source=source).model
    assert (model.revision, model.digest) == expected
    assert (model.resolved_at == NOW) == (model.pinned_for is not None) == (expected != (None, None))


def test_a_pin_stays_and_learns_its_digest_from_one_that_has_that_model() -> None:
    model = resolved(ready("b", "sha256:2"), ready("a", "sha256:1"), pinned=pin("a")).model
    assert (model.revision, model.digest) == ("a", "sha256:1")
    assert resolved(pinned=model).model == model, "also without any replica"


def test_a_replica_of_an_older_template_pins_nothing() -> None:
    model = resolved(ready("a", "sha256:1"), revision="older").model
    assert model == ModelStatus(source="hf://org/x@main")


VOID = [
    ("another branch", {"source": {"huggingFace": {"repo": "org/x", "revision": "b"}}}, None),
    ("another kind of source", {"source": FOLDER}, None),
    ("the same", {}, "a"),
    ("another image", {"image": "worker:2"}, "a"),
]


@pytest.mark.parametrize(("now", "expected"), [row[1:] for row in VOID], ids=[row[0] for row in VOID])
def test_a_pin_is_for_one_source(now: dict[str, Any], expected: str | None) -> None:
    assert resolved(pinned=pin("a"), **now).model.revision == expected


def test_a_folder_in_another_image_may_be_another_model() -> None:
    pinned = pin(None, "sha256:1", source=FOLDER)
    assert resolved(pinned=pinned, source=FOLDER).model.digest == "sha256:1"
    assert resolved(pinned=pinned, source=FOLDER, image="worker:2").model.digest is None


RACES = [
    ("the same", HUB, [ready("a"), ready("a")], EPOCH, []),
    ("another", HUB, [ready("a"), ready("b")], EPOCH, ["uid-1-0"]),
    ("another, asleep", HUB, [ready("a"), says(WorkerPhase.ASLEEP, model=ModelReport(revision="b"))], EPOCH, ["uid-1-0"]),
    ("another that still loads", HUB, [says(WorkerPhase.STARTING, model=ModelReport(revision="b"))], EPOCH, []),
    ("a worker that does not say", HUB, [ready("a"), ready()], EPOCH, []),
    ("one that was told of the pin", HUB, [ready("a"), ready("b")], LATER, []),
    ("a folder, which is what it is", FOLDER, [ready(None, "sha256:1"), ready(None, "sha256:2")], EPOCH, []),
]


@pytest.mark.parametrize(("source", "reports", "created_at", "losers"), [row[1:] for row in RACES], ids=[row[0] for row in RACES])
def test_who_lost_the_race(source: dict[str, Any], reports: list[Any], created_at: Any, losers: list[str]) -> None:
    pinned = pin(None, "sha256:1", source=FOLDER) if source is FOLDER else pin("a")
    found = resolved(*reports, source=source, pinned=pinned)
    found = Resolution(found.model, found.source, tuple(_made_at(group, created_at) for group in found.groups))
    assert sorted(unpinned(found)) == losers


def _made_at(group: Any, created_at: Any) -> Any:
    return msgspec.structs.replace(group, pod=msgspec.structs.replace(group.pod, created_at=created_at))


VERDICTS = [
    ("nobody answers", [None], None, {}, ("Unknown", "Resolving")),
    ("it loads", [says(WorkerPhase.STARTING)], None, {}, ("Unknown", "Resolving")),
    ("loaded", [ready("a")], None, {}, ("True", "Resolved")),
    ("no Secret", [missing("SecretMissing")], None, {}, ("False", "SecretMissing")),
    ("a token that is not enough", [missing("SourceUnauthorized")], None, {}, ("False", "Unauthorized")),
    ("no network", [missing("NetworkError")], None, {}, ("False", "NetworkError")),
    ("no room", [missing("CacheFull")], None, {}, ("False", "CacheFull")),
    ("too slow", [missing("Timeout")], None, {}, ("False", "NetworkError")),
    ("ended for it", [None], None, RAN_BEFORE, ("False", "SourceNotFound")),
    ("starts again after it", [says(WorkerPhase.STARTING)], None, {**RAN_BEFORE}, ("False", "SourceNotFound")),
    ("is there after all", [ready("a")], None, {**RAN_BEFORE, "container": Container(running=True, restarts=1)}, ("True", "Resolved")),
    ("one runs, another cannot", [ready("a"), missing("NetworkError")], "a", {}, ("False", "NetworkError")),
    ("one has another", [ready("a"), ready("b")], "a", {}, ("False", "DigestMismatch")),
    ("all are gone", [], "a", {}, ("True", "Resolved")),
    (
        "an engine that failed",
        [says(WorkerPhase.FAILED, failure=WireError("EngineFailed", NOT_FOUND))],
        None,
        {},
        ("False", "SourceNotFound"),
    ),
    ("ranks that died", [says(WorkerPhase.RESTARTING, failure=WireError("RankFailed", "rank 1 died"))], "a", {}, ("True", "Resolved")),
]


@pytest.mark.parametrize(("reports", "pinned", "facts", "expected"), [row[1:] for row in VERDICTS], ids=[row[0] for row in VERDICTS])
def test_whether_the_model_is_resolved(reports: list[Any], pinned: str | None, facts: dict[str, Any], expected: tuple[str, str]) -> None:
    found = model_resolved(resolved(*reports, pinned=pin(pinned) if pinned else None, **facts))
    assert (found.status.value, found.reason) == expected
    if found.status is ConditionStatus.FALSE:
        assert "replica " in found.message


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (NOT_FOUND, "SourceNotFound"),
        ("Error: --model: SourceNotFound: model path '/c/sd': expected a diffusers folder, found nothing there", "SourceNotFound"),
        ("--model hf://org/x: UnsupportedFormat: model path '/t': expected a diffusers folder", "UnsupportedFormat"),
        ("--vae-tiling: AutoencoderX is not supported", None),
        ("rank 0: the model has no component NetworkErrors", None),
    ],
)
def test_the_code_in_a_workers_last_words(words: str, code: str | None) -> None:
    assert code_in(words) == code


# lives ------------------------------------------------------------------------------------------------------------------


async def started(replicas: int, *revisions: str, **spec: Any) -> Rig:
    """Create a deployment, and start a replica for each revision, which it reports; replicas without a revision do not start."""
    rig = Rig()
    rig.cluster.put(deployment(replicas=replicas, model={"source": HUB}, **spec))
    await rig.run()
    for index, revision in enumerate(revisions):
        rig.start(f"d-{index}-0", model=ModelReport(revision=revision, pipeline="P", size_bytes=5))
    await rig.run(1)
    return rig


def told(rig: Rig) -> Any:
    return rig.desired().get("model")


async def test_what_the_first_replica_found_is_told_to_the_next_before_its_pod_is_there() -> None:
    rig = await started(1)
    assert rig.condition("ModelResolved") == ("Unknown", "Resolving")
    assert told(rig) is None
    worker = rig.start("d-0-0", model=ModelReport(revision="a"))
    await rig.run()
    assert rig.condition("ModelResolved") == ("True", "Resolved")
    assert told(rig) == {"source": HUB, "revision": "a", "digest": None}
    worker.model = ModelReport(revision="a", digest="sha256:1", size_bytes=5)
    await rig.run(60)
    status = rig.status()["model"]
    assert (status["revision"], status["digest"], status["sizeBytes"]) == ("a", "sha256:1", 5)
    assert told(rig)["digest"] == "sha256:1"
    assert rig.cluster.notes("ModelResolved") == ["hf://org/x@main has the version a, which is pinned for all replicas"], "once"


async def test_of_replicas_that_raced_the_one_with_another_model_is_replaced() -> None:
    rig = await started(2, "a", "b")
    assert rig.condition("ModelResolved") == ("False", "DigestMismatch")
    assert "replica 1 found the version b, expected a, which is pinned for all replicas" in rig.message("ModelResolved")
    await rig.run(10)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-1"]
    rig.start("d-1-1", model=ModelReport(revision="a"))
    await rig.run()
    assert rig.condition("ModelResolved") == ("True", "Resolved")
    assert rig.condition("Ready") == ("True", "Serving")
    await rig.run(600)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-1"]


async def test_several_that_raced_go_one_at_a_time() -> None:
    rig = await started(4, "a", "b", "b", "c")
    for _ in range(3):
        await rig.run(10)
        assert rig.status()["awakeReplicas"] == 3
        rig.start_all(model=ModelReport(revision="a"))
    await rig.run(10)
    assert rig.condition("ModelResolved") == ("True", "Resolved")
    assert rig.status()["awakeReplicas"] == 4


async def test_a_new_value_of_the_restart_annotation_looks_at_the_source_anew() -> None:
    rig = await started(1, "a")
    found = rig.cluster.find(DEPLOYMENT, "d")
    assert found is not None
    found["metadata"]["annotations"] = {ANNOTATION_RESTARTED_AT: "2026-01-02"}
    rig.cluster.on_change("MODIFIED", found)
    await rig.run()
    assert told(rig) is None
    assert "revision" not in rig.status()["model"]
    await rig.run(10)
    rig.start_all(model=ModelReport(revision="b"))
    await rig.run()
    assert (rig.status()["model"]["revision"], told(rig)["revision"]) == ("b", "b")
    rig.restart_operator()
    await rig.run(60)
    assert rig.status()["model"]["revision"] == "b"


async def test_a_pin_survives_an_operator_and_a_lost_configmap() -> None:
    rig = await started(1, "a")
    rig.restart_operator()
    rig.cluster.remove(CONFIG_MAP, "d-desired")
    await rig.run()
    assert told(rig)["revision"] == "a"


async def test_a_source_that_is_gone_stops_new_replicas_and_none_that_runs() -> None:
    """Check that a missing source fails a new replica alone, with a single Event: running ones have the model in memory."""
    rig = await started(1, "a")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run()
    rig.cluster.waiting("d-1-0", "ContainerCreating")
    rig.cluster.crashed("d-1-0", code=1, message=NOT_FOUND)
    await rig.run()
    assert rig.condition("ModelResolved") == ("False", "SourceNotFound")
    assert "pinned for all replicas: a" in rig.message("ModelResolved")
    assert rig.condition("Ready") == ("True", "ServingDegraded")
    assert rig.condition("Progressing") == ("False", "ModelError")
    assert rig.states() == ["Awake", "Failed"]
    assert len(rig.cluster.notes("ModelSourceNotFound")) == 1
    await rig.run(30)
    assert len(rig.cluster.notes("ModelSourceNotFound")) == 1


async def test_a_users_secret_that_is_missing_is_shown_while_the_worker_waits_for_it() -> None:
    """Check that a user's missing Secret is shown in conditions while a new worker waits for it, and stops nothing that runs."""
    rig = await started(2, "a")
    missing_secret = WireError(code="SecretMissing", message="model: there is no Secret 'hub'", retryable=True)
    worker = rig.start("d-1-0", phase=WorkerPhase.STARTING, failure=missing_secret, load=LoadReport(stage="Fetching"))
    await rig.run()
    assert rig.condition("ModelResolved") == ("False", "SecretMissing")
    assert "there is no Secret 'hub'" in rig.message("ModelResolved")
    assert rig.condition("Ready") == ("True", "ServingDegraded"), "what runs keeps running"
    assert rig.condition("Degraded") == ("True", "ReplicaFailed")
    worker.failure, worker.phase, worker.model = None, WorkerPhase.READY, ModelReport(revision="a")
    await rig.run()
    assert rig.condition("ModelResolved") == ("True", "Resolved")
    assert rig.condition("Ready") == ("True", "Serving")
