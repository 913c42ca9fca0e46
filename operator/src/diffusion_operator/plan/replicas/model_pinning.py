# SPDX-License-Identifier: Apache-2.0
"""The version of a model that all replicas must serve, and the reason if it cannot be had.

The first replica to load the model reports its version: a hub's commit or a hash of a bucket's ETags. A folder read in place has only a
digest. The status pins that version, and every worker started later receives it. Replicas that looked at the same moment may have found
different states: those that differ from the pinned one are replaced. A folder cannot go back to an earlier state, so a replica that differs
there is reported and kept.

A pin is for one source, one `restartedAt` and, where the model may be part of the container image, one container image.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import ModelStatus, ReplicaState
from diffusion_operator.api.meta import Verdict, verdict
from diffusion_operator.api.names import ANNOTATION_RESTARTED_AT
from diffusion_operator.api.source import ModelSource, identity
from diffusion_operator.api.worker_state import ModelReport, WorkerPhase
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.worker_exit_codes import MODEL_REASONS, code_in
from diffusion_operator.plan.replicas.revision import Template, hash_of

PIN_ARRIVES_WITHIN = timedelta(minutes=2)
"""At every node, by the mounted file. A pod that was made later and has another model does not follow it, nor would the next one."""


class Resolution(msgspec.Struct, frozen=True):
    """The pinned version of the model, the source in the spec, and the replicas to compare with them.

    `groups` has only replicas of the newest template, since an older template may name another model.
    """

    model: ModelStatus
    source: ModelSource
    groups: tuple[Group, ...]


def resolve_model(deployment: DiffusionDeployment, template: Template, groups: Sequence[Group], now: datetime) -> Resolution:
    source, current = deployment.spec.model.source, tuple(group for group in groups if group.pod.revision == template.revision)
    loaded = [group.document.model for group in current if group.live and group.document is not None]
    model = _kept(deployment, template)
    if model.resolved_at is None:
        first = next((report for report in loaded if report.revision or report.digest), None)
        if first is not None:
            pinned_for = _pinned_for(deployment, template)
            model = msgspec.structs.replace(
                model, revision=_cut(first.revision), digest=first.digest, resolved_at=now, pinned_for=pinned_for
            )
    for report in loaded:
        if _agrees(report, model):
            model = _with_details(model, report)
    return Resolution(model=model, source=source, groups=current)


def fetched(source: ModelSource) -> bool:
    """Return whether workers download the model, and so can be given a version to download."""
    return source.hugging_face is not None or source.s3 is not None


def unpinned(resolution: Resolution) -> frozenset[str]:
    """Return the UIDs of pods to be replaced, because they found another state of the model at about the time of the pin.

    Empty without a pin, and for a model that workers do not download: a new pod would have the same.
    """
    made = resolution.model.resolved_at
    if not fetched(resolution.source) or made is None:
        return frozenset()
    return frozenset(group.pod.uid for group in _differing(resolution) if group.pod.created_at <= made + PIN_ARRIVES_WITHIN)


def model_resolved(resolution: Resolution) -> Verdict:
    for group in resolution.groups:
        failure = _failure(group)
        if failure is not None:
            code, message = failure
            return verdict("ModelResolved", False, MODEL_REASONS[code], f"replica {group.index}: {message}{_pinned_text(resolution.model)}")
    differing = _differing(resolution)
    if differing:
        return verdict("ModelResolved", False, "DigestMismatch", _difference(differing[0], resolution))
    if resolution.model.resolved_at is not None:
        return verdict("ModelResolved", True, "Resolved", f"{resolution.model.source}{_pinned_text(resolution.model)}")
    loaded = next((group for group in resolution.groups if group.live), None)
    if loaded is not None:
        return verdict("ModelResolved", True, "Resolved", f"replica {loaded.index} has loaded {resolution.model.source}")
    return verdict("ModelResolved", None, "Resolving", "no replica has loaded the model yet")


def _pinned_for(deployment: DiffusionDeployment, template: Template) -> str:
    source = deployment.spec.model.source
    image = None if fetched(source) else template.image
    return hash_of([identity(source), deployment.metadata.annotations.get(ANNOTATION_RESTARTED_AT), image])


def _kept(deployment: DiffusionDeployment, template: Template) -> ModelStatus:
    """Return the model's status from the last pass.

    Begin with an empty one if the source changed, or if the pin was for another restart or container image.
    """
    before, source = deployment.status.model, identity(deployment.spec.model.source)
    if before is None or before.source != source or before.pinned_for not in (None, _pinned_for(deployment, template)):
        return ModelStatus(source=source)
    return before


def _with_details(model: ModelStatus, report: ModelReport) -> ModelStatus:
    """Add a replica's details of the pinned model; a sleeping replica may know fewer than another reported."""
    return msgspec.structs.replace(
        model,
        digest=model.digest or (report.digest if model.resolved_at is not None else None),
        size_bytes=report.size_bytes if report.size_bytes is not None else model.size_bytes,
        pipeline=report.pipeline or model.pipeline,
    )


def _agrees(report: ModelReport, model: ModelStatus) -> bool:
    if model.revision is not None:
        return _cut(report.revision) in (None, model.revision)
    return model.digest is None or report.digest in (None, model.digest)


def _differing(resolution: Resolution) -> list[Group]:
    if resolution.model.resolved_at is None:
        return []
    return [
        group
        for group in resolution.groups
        if group.live and group.document is not None and not _agrees(group.document.model, resolution.model)
    ]


def _difference(group: Group, resolution: Resolution) -> str:
    report = group.document.model if group.document is not None else ModelReport()
    found = report.revision if resolution.model.revision is not None else report.digest
    pinned = resolution.model.revision or resolution.model.digest
    if group.pod.uid in unpinned(resolution):
        difference = f"replica {group.index} found the version {found}, expected {pinned}, which is pinned for all replicas"
        return f"{difference}; the replica is replaced"
    advice = f"to accept the source as it is now, give the annotation {ANNOTATION_RESTARTED_AT} a new value, which replaces all replicas"
    return f"replica {group.index} loaded the version {found}, expected {pinned}, which is pinned for all replicas; {advice}"


def _failure(group: Group) -> tuple[str, str] | None:
    """Return code and words of a failure to get the model, of a fetch that is tried again or of the worker that ended last.

    None for a replica that has its model or is pending, and for a failure of another kind.
    """
    if group.live or group.state is ReplicaState.PENDING:
        return None
    document, ended = group.document, group.pod.container.last_exit
    if document is not None and document.failure is not None and document.state is WorkerPhase.STARTING:
        code = document.failure.code
        return (code, f"{code}: {document.failure.message}") if code in MODEL_REASONS else None
    words = (
        document.failure.message if document is not None and document.failure is not None else ended.message if ended is not None else ""
    )
    code_there = code_in(words)
    return (code_there, words[-900:]) if code_there is not None else None


def _pinned_text(model: ModelStatus) -> str:
    if model.resolved_at is None:
        return ""
    return f"; pinned for all replicas: {', '.join(version for version in (model.revision, model.digest) if version)}"


def _cut(revision: str | None) -> str | None:
    """Cut a revision to the schema's length, which exceeds any commit and any known bucket's version."""
    return revision[:128] if revision else None
