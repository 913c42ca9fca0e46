# SPDX-License-Identifier: Apache-2.0
"""What kopf keeps of objects for its change-detecting handlers, of which there are none here: nothing.

Its own storages copy each object whole, several times an event, only to find that nobody asks; that was a third of the operator's work.
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
