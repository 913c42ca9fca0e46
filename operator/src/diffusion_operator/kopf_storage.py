# SPDX-License-Identifier: Apache-2.0
"""Storages for kopf that store nothing, because no handler here uses its change detection.

Kopf's own storages copy each whole object several times an event for a comparison that nothing uses. The copies took a third of the
operator's CPU time.
"""

from typing import Any

import kopf
from kopf._core.reactor.inventory import ResourceMemories


class NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


class NoDiffBase(kopf.DiffBaseStorage):  # type: ignore[misc]
    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


class NoMemories(ResourceMemories):  # type: ignore[misc]
    """Memories of kopf that keep nothing: its notes of an object last for one event only.

    They are for kopf's daemons and timers, and would take a kilobyte for each object.
    """

    async def recall(self, raw_body: kopf.RawBody, **known: Any) -> Any:
        return await super().recall(raw_body, **known | {"ephemeral": True})
