# SPDX-License-Identifier: Apache-2.0
"""The identity of an adapter: two effects on a model never share one, though one effect may have two.

It is computed from what a load reads, and never from converted tensors: those change with diffusers.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from diffusion_worker.messages import AdapterIdentity

# Increased when the same file is converted to something else than before; `tests/worker/lora/test_identity.py` says when.
CONVERTER_VERSION = 1
# The only kind of change that is applied so far: scaling * B @ A.
LOW_RANK = "lora"


class ModuleChange(NamedTuple):
    """A module that an adapter changes, by `component.path`, with the kind, rank and scaling of the change."""

    module: str
    kind: str
    rank: int
    scaling: float


def identity_of(digest: str, changes: Iterable[ModuleChange], *, converter: int = CONVERTER_VERSION) -> AdapterIdentity:
    """Return the identity of an adapter, from its file's digest and the changes that the file is applied as, in any order.

    `converter` is the version of the conversion of files; another version gives another identity.
    """
    # Scalings are written exactly, in hex: a short decimal may stand for several numbers.
    written = sorted((change.module, change.kind, change.rank, float(change.scaling).hex()) for change in changes)
    components = sorted({module.partition(".")[0] for module, *_ in written})
    text = json.dumps([converter, digest, components, written], separators=(",", ":"))
    return AdapterIdentity(f"v{converter}:{hashlib.sha256(text.encode()).hexdigest()}")


def identity_of_several(parts: Iterable[tuple[AdapterIdentity, float]]) -> str | None:
    """Return the identity of several adapters together at their strengths, the same in any order; None without any."""
    return " + ".join(sorted(f"{identity} x {float(scale).hex()}" for identity, scale in parts)) or None


def contradicts(found: str, expected: str | None) -> bool:
    """Return whether an identity differs from the expected one.

    It is False if none is expected, and for identities of different converter versions, which cannot be compared.
    """
    return expected is not None and found != expected and found.partition(":")[0] == expected.partition(":")[0]
