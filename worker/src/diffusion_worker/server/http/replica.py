# SPDX-License-Identifier: Apache-2.0
"""The name of this replica, and request ids that carry it, so that a Service's client learns which replica has a request."""

import re
import socket
import uuid

UNNAMED = "worker"
# The form of a drawn id: the name of a replica, a dot, and the 32 digits of a UUID.
DRAWN = re.compile(r"([A-Za-z0-9_-]{1,63})\.[0-9a-f]{32}")


def replica_name() -> str:
    """Return the first label of this machine's host name, which in a pod is the pod's name.

    Other characters than letters, digits, `_` and `-` become `-`; without a host name the result is `worker`.
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:63] or UNNAMED


def draw_id(replica: str) -> str:
    """Return a new id for a request of a replica."""
    return f"{replica}.{uuid.uuid4().hex}"


def replica_of(request_id: str) -> str | None:
    """Return the replica that an id of the form of `draw_id` names, even if a client made up the id; None for any other form."""
    drawn = DRAWN.fullmatch(request_id)
    return drawn[1] if drawn else None
