# SPDX-License-Identifier: Apache-2.0
"""An Event about one of our objects. The name is a hash of the content, so an Event is never written twice.

It is of the core group: only there may it have the first and last time by which `kubectl describe` sorts.
"""

import hashlib
from datetime import datetime

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import EVENT, FIELD_MANAGER, GROUP, Kind
from diffusion_operator.plan.results.events import PlannedEvent
from diffusion_operator.render import Manifest

NAME_LENGTH = 253
"""The longest name of an object."""


def event(planned: PlannedEvent, *, kind: Kind, about: ObjectMeta, now: datetime) -> Manifest:
    second = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": _name(planned, about), "namespace": about.namespace},
        "firstTimestamp": second,
        "lastTimestamp": second,
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "count": 1,
        "type": planned.type.value,
        "reason": planned.reason,
        "action": planned.reason,
        "message": planned.message or planned.reason,
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": f"{GROUP}/{FIELD_MANAGER}",
        "reportingInstance": FIELD_MANAGER,
        "involvedObject": {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        },
    }


def _name(planned: PlannedEvent, about: ObjectMeta) -> str:
    """Return the object's name, cut where there is no room for the hash behind it, and the hash."""
    identity = hashlib.sha256(f"{about.uid}/{planned.reason}/{planned.key}".encode()).hexdigest()[:16]
    return f"{about.name[: NAME_LENGTH - len(identity) - 1].rstrip('.-')}.{identity}"
