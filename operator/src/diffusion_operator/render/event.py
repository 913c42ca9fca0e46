# SPDX-License-Identifier: Apache-2.0
"""An Event about one of our objects. Its name is a hash of what it says, so the same one is never written twice."""

import hashlib
from datetime import datetime

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import EVENT, FIELD_MANAGER, GROUP, Kind
from diffusion_operator.plan.results.events import PlannedEvent
from diffusion_operator.render import Manifest


def event(planned: PlannedEvent, *, kind: Kind, about: ObjectMeta, now: datetime) -> Manifest:
    identity = hashlib.sha256(f"{about.uid}/{planned.reason}/{planned.key}".encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{about.name}.{identity}", "namespace": about.namespace},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": planned.type.value,
        "reason": planned.reason,
        "action": planned.reason,
        "note": planned.message or planned.reason,
        "reportingController": f"{GROUP}/{FIELD_MANAGER}",
        "reportingInstance": FIELD_MANAGER,
        "regarding": {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        },
    }
