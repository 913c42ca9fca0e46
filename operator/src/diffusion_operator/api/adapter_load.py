# SPDX-License-Identifier: Apache-2.0
"""The description of an adapter for a worker, as the mounted file and a put both have it, in the worker's words."""

from collections.abc import Iterable

import msgspec

from diffusion_operator.api.adapter import AdapterFormat, AdapterSpec, Component, Residency
from diffusion_operator.api.source import AdapterSource

# A model with two denoisers of one kind has its second as `transformer_2`.
_WORKER_NAMES = {
    Component.TRANSFORMER: ("transformer", "transformer_2"),
    Component.UNET: ("unet",),
    Component.TEXT_ENCODER: ("text_encoder",),
    Component.TEXT_ENCODER_2: ("text_encoder_2",),
    Component.TEXT_ENCODER_3: ("text_encoder_3",),
}
_COMPONENTS = {name: component for component, names in _WORKER_NAMES.items() for name in names}
_FORMATS = {one.value.lower(): one for one in AdapterFormat if one is not AdapterFormat.AUTO}


class AdapterLoad(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    source: AdapterSource
    digest: str | None = None
    identity: str | None = None
    scale: float = 1.0
    components: tuple[str, ...] = ()
    format: str | None = None
    expected_rank: int | None = None
    residency: Residency = Residency.CACHED
    priority: int = 0


def adapter_load(spec: AdapterSpec, *, digest: str | None, identity: str | None = None) -> AdapterLoad:
    """Build the description of an adapter for a worker from its spec.

    `digest` is the hash that its content must have, and `identity` names its effect; None where it is not known.
    """
    return AdapterLoad(
        source=spec.source,
        digest=digest,
        identity=identity,
        scale=float(spec.default_scale),
        components=tuple(name for component in spec.components for name in _WORKER_NAMES[component]),
        format=None if spec.format is AdapterFormat.AUTO else spec.format.value.lower(),
        expected_rank=spec.expected_rank,
        residency=spec.residency,
        priority=spec.priority,
    )


def components_of(worker_names: Iterable[str]) -> tuple[str, ...]:
    """Translate a worker's names of components into the API's, each once; keep a name that the API does not have."""
    return tuple(dict.fromkeys(_COMPONENTS[name].value if name in _COMPONENTS else name for name in worker_names))


def format_of(worker_name: str | None) -> str | None:
    """Return the API's name of an adapter format, given the worker's. An unknown name, and None, are returned unchanged."""
    return _FORMATS[worker_name].value if worker_name in _FORMATS else worker_name
