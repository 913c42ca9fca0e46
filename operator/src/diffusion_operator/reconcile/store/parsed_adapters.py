# SPDX-License-Identifier: Apache-2.0
"""The adapters of a deployment as structs: each is read again only where it has another version."""

from collections.abc import Mapping

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.names import ADAPTER
from diffusion_operator.cluster import Cluster, Manifest
from diffusion_operator.errors import NotUnderstood
from diffusion_operator.pace import Pace
from diffusion_operator.reconcile.store.parsing import parse


def _read(manifest: Manifest, before: LoRAAdapter | None) -> LoRAAdapter | None:
    """Return the adapter; if it is not understood, the state of the same object that was understood last, else None.

    The adapter's own pass tells of the error.
    """
    try:
        return parse(manifest, LoRAAdapter)
    except NotUnderstood:
        return before if before is not None and before.metadata.uid == manifest["metadata"]["uid"] else None


class ParsedAdapters:
    def __init__(self) -> None:
        self._versions: Mapping[str, object] = {}
        """Versions that were read, by name."""
        self._parsed: dict[str, LoRAAdapter | None] = {}
        """Adapters by name; None is on its way out, or was never understood."""
        self.all: tuple[LoRAAdapter, ...] = ()
        """The same object while nothing changes. Adapters on their way out are gone already: they are removed from what runs."""

    async def read(self, cluster: Cluster, namespace: str, deployment: str) -> None:
        versions = await cluster.adapter_versions(namespace, deployment)
        if versions is self._versions:
            return
        known = self._versions
        changed = [name for name, version in versions.items() if (it := known.get(name)) is not version and it != version]
        if not changed and versions.keys() == self._versions.keys():
            return
        parsed, pace = {name: self._parsed.get(name) for name in versions}, Pace()
        for name in changed:
            manifest = await cluster.get(ADAPTER, namespace, name)
            going = manifest is None or manifest["metadata"].get("deletionTimestamp")
            parsed[name] = _read(manifest, self._parsed.get(name)) if manifest is not None and not going else None
            await pace.keep()
        self._versions, self._parsed = versions, parsed
        self.all = tuple(one for one in parsed.values() if one is not None)
