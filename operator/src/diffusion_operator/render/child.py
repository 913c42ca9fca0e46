# SPDX-License-Identifier: Apache-2.0
"""A child as the spec asks for it, with a hash of what is asked."""

import hashlib
from typing import NamedTuple

import msgspec

from diffusion_operator.api.names import ANNOTATION_APPLIED, KINDS, Kind
from diffusion_operator.render import Manifest


class Child(NamedTuple):
    """A child as the spec asks for it."""

    kind: Kind
    name: str
    manifest: Manifest | None
    """None where there must be none."""
    mark: str
    """A hash of the manifest; empty where there is none."""

    @property
    def written(self) -> str:
        """The hash that the child carries in an annotation; empty where there must be none."""
        return str(self.manifest["metadata"]["annotations"][ANNOTATION_APPLIED]) if self.manifest is not None else ""

    @property
    def key(self) -> str:
        """The name of the child in the memory of its deployment."""
        return child_key(self.kind.kind, self.name)


def child_key(kind: str, name: str) -> str:
    return f"{kind} {name}"


def asked(manifest: Manifest, **annotations: str) -> Child:
    """Return the child of a manifest, with these annotations added and a hash of the manifest as another one."""
    metadata, kind = manifest["metadata"], KINDS[manifest["kind"]]
    known = metadata.get("annotations", {}) | annotations
    marked = manifest | {"metadata": metadata | {"annotations": known | {ANNOTATION_APPLIED: _hash(manifest)}}}
    return Child(kind, metadata["name"], marked, _hash(marked))


def absent(kind: Kind, name: str) -> Child:
    """Return the child of this kind and name without a manifest: it must not be there."""
    return Child(kind, name, None, "")


def _hash(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(manifest, order="deterministic")).hexdigest()[:16]
