# SPDX-License-Identifier: Apache-2.0
"""The writes of one child: made where its name is free, changed where it is ours, adopted where nobody controls it, else left alone.

A child is made by a create, never by an apply: an apply would take over an object that somebody else made a moment before.
"""

import logging
from typing import Any

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import KINDS, LABEL_DEPLOYMENT, Kind
from diffusion_operator.cluster import Manifest
from diffusion_operator.errors import ClusterConflict, ClusterRefused
from diffusion_operator.plan.observed.ownership import (
    Ownership,
    adopt,
    adopt_secret,
    as_if_applied,
    controller_of,
    has_our_labels,
    is_controlled_by,
    ownership,
    replace_whole,
    secret_is_leaving,
    secret_is_ours,
    was_posted,
)
from diffusion_operator.plan.results.drift import drift
from diffusion_operator.plan.results.events import repaired
from diffusion_operator.reconcile.children.repairs import tell
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.metadata import controller_reference

CANNOT_BE = 422
NOT_FOUND = 404

log = logging.getLogger(__name__)


async def write_child(runtime: Runtime, deployment: DiffusionDeployment, manifest: Manifest) -> Ownership:
    """Write a child that is watched, unless its name is taken; return whose the object is then."""
    kind, namespace, name = KINDS[manifest["kind"]], deployment.metadata.namespace, manifest["metadata"]["name"]
    known = await runtime.cluster.get(kind, namespace, name)
    if known is not None and ownership(known, deployment.metadata) is Ownership.OURS and not was_posted(known):
        await _apply(runtime, deployment, known, manifest)
        return Ownership.OURS
    made, refusal = await _made(runtime, manifest) if known is None else (False, None)
    if made:
        return Ownership.OURS
    live = await runtime.cluster.look_up(kind, namespace, name)
    if live is None and refusal is not None:
        raise refusal
    if live is None:
        raise ClusterConflict(f"{kind.kind} {name} was deleted a moment ago", status=409, reason="Conflict")
    found = ownership(live, deployment.metadata)
    if found in (Ownership.LEAVING, Ownership.STRANGER):
        return found
    if was_posted(live):
        live = {"kind": kind.kind, **await runtime.cluster.patch(kind, namespace, name, as_if_applied(live))}
    await _apply(runtime, deployment, live, manifest, version=found is Ownership.ORPHAN)
    return Ownership.OURS


async def write_secret(runtime: Runtime, deployment: DiffusionDeployment, manifest: Manifest) -> Ownership:
    """Write the Secret, unless its name is taken; return whose the object is then.

    There is no right to read it: patches that test its owner tell whose it is.
    """
    made, refusal = await _made(runtime, manifest)
    if made:
        return Ownership.OURS
    owner = deployment.metadata
    try:
        live = await _patched(runtime, manifest, secret_is_ours(owner))
    except ClusterRefused as error:
        raise (refusal if refusal is not None and error.status == NOT_FOUND else error) from None
    if live is None:
        live = await _patched(runtime, manifest, adopt_secret(owner, manifest["metadata"]["ownerReferences"]))
    if live is None:
        leaving = await _patched(runtime, manifest, secret_is_leaving(owner))
        return Ownership.STRANGER if leaving is None else Ownership.LEAVING
    if not _holds(live, manifest):
        await _patch(runtime, manifest, replace_whole(live, manifest))
    return Ownership.OURS


async def _made(runtime: Runtime, manifest: Manifest) -> tuple[bool, ClusterRefused | None]:
    """Create a child; return whether it was made, and the refusal if there was one.

    Admission comes before names are compared: a full quota or a policy refuses a child that is there already, too.
    """
    try:
        return await runtime.cluster.create(manifest), None
    except ClusterRefused as error:
        return False, error


async def remove_child(runtime: Runtime, deployment: DiffusionDeployment, kind: Kind, name: str) -> Ownership:
    """Delete the child that the spec does without, and an orphan under its name; a stranger's stays. Return whose object was found.

    An orphan is adopted first, so nobody can take it between the look and the deletion.
    """
    metadata, whose = deployment.metadata, Ownership.OURS
    for found in await unwanted(runtime, deployment, kind, name):
        owner = ownership(found, metadata)
        if owner is Ownership.STRANGER:
            whose = owner
            continue
        if owner is Ownership.ORPHAN:
            found = await runtime.cluster.patch(kind, metadata.namespace, name, adopt(found, controller_reference(metadata)))
            log.info("orphan removed namespace=%s kind=%s name=%s", metadata.namespace, kind.kind, name)
        await runtime.cluster.delete(kind, metadata.namespace, found["metadata"]["name"], uid=found["metadata"]["uid"])
    return whose


async def unwanted(runtime: Runtime, deployment: DiffusionDeployment, kind: Kind, name: str) -> list[Manifest]:
    """List the remains of a child that the spec does without: ours of the kind, and what nobody controls under its name.

    Our labels alone make no child: a user may have copied them to an object with another name.
    """
    metadata = deployment.metadata
    listed = await runtime.cluster.list(kind, metadata.namespace, labels={LABEL_DEPLOYMENT: metadata.name})
    return [one for one in listed if is_controlled_by(one, metadata.uid) or _is_left_behind(one, metadata, name)]


def _is_left_behind(found: Manifest, owner: ObjectMeta, name: str) -> bool:
    """Return whether nobody controls an object that has the name and both labels of a child."""
    metadata = found["metadata"]
    return metadata["name"] == name and controller_of(found) is None and has_our_labels(metadata, owner.name)


async def _apply(runtime: Runtime, deployment: DiffusionDeployment, live: Manifest, manifest: Manifest, *, version: bool = False) -> None:
    """Apply a child to the object that was seen, and to no other of its name.

    With `version` that must not have changed either, as somebody could take it meanwhile.
    An apply leaves what others added to a list that it merges. Such a list is replaced.
    """
    bound = {name: live["metadata"][name] for name in ("uid", *(("resourceVersion",) if version else ()))}
    try:
        after = await runtime.cluster.apply(manifest | {"metadata": manifest["metadata"] | bound})
        if drift(after, manifest):
            await _patch(runtime, manifest, replace_whole(after, manifest))
    except ClusterRefused as error:
        if error.status != CANNOT_BE or not await _mend(runtime, deployment, manifest, error):
            raise


async def _mend(runtime: Runtime, deployment: DiffusionDeployment, manifest: Manifest, error: ClusterRefused) -> bool:
    """Replace lists as a whole after an apply that could not merge ours with somebody else's changes, and report it.

    Return False, and write nothing, if the object is gone or not ours. A refusal of the write is raised.
    """
    kind, metadata = KINDS[manifest["kind"]], deployment.metadata
    live = await runtime.cluster.look_up(kind, metadata.namespace, manifest["metadata"]["name"])
    if live is None or ownership(live, metadata) is not Ownership.OURS:
        return False
    await _patch(runtime, manifest, replace_whole(live, manifest))
    name = manifest["metadata"]["name"]
    whole = f"{kind.kind} {name} was put back as a whole, because another client's change of it could not be merged: {error.said}"
    await tell(runtime, deployment, repaired(whole, key=f"{kind.kind}-{live['metadata']['resourceVersion']}"))
    return True


async def _patched(runtime: Runtime, manifest: Manifest, operations: list[dict[str, Any]]) -> Manifest | None:
    """Send a JSON patch and return the object after it; None where one of its tests fails."""
    try:
        return await _patch(runtime, manifest, operations)
    except ClusterRefused as error:
        if error.status != CANNOT_BE:
            raise
        return None


async def _patch(runtime: Runtime, manifest: Manifest, operations: list[dict[str, Any]]) -> Manifest:
    metadata = manifest["metadata"]
    return {
        "kind": manifest["kind"],
        **await runtime.cluster.patch(KINDS[manifest["kind"]], metadata["namespace"], metadata["name"], operations),
    }


def _holds(live: Manifest, manifest: Manifest) -> bool:
    """Return whether a Secret has all that is asked for; others may have added to it."""
    metadata, asked = live["metadata"], manifest["metadata"]
    pairs = (
        (live.get("data"), manifest["data"]),
        (metadata.get("labels"), asked["labels"]),
        (metadata.get("annotations"), asked["annotations"]),
    )
    return all((found or {}).get(name) == value for found, wanted in pairs for name, value in wanted.items())
