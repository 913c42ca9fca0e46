# SPDX-License-Identifier: Apache-2.0
"""Storages for kopf that store nothing, because no handler here uses its change detection.

Kopf's own storages copy each whole object several times an event for a comparison that nothing uses. The copies took a third of the
operator's CPU time.
"""

from typing import Any

import kopf


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
