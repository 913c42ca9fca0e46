# SPDX-License-Identifier: Apache-2.0
"""Keeps a status small enough for etcd, whatever replicas and workers have to say: 1.5 MiB is the most that it takes of an object.

Only details are left out. Counters are of all replicas.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from diffusion_operator.api.deployment_status import FailureStatus, OperationStatus, ReplicaStatus

GROUPS_SHOWN = 64  # the schema's bound
GROUPS_BYTES = 256 << 10
StatusWithMessage = TypeVar("StatusWithMessage", FailureStatus, OperationStatus)
_SHORTER = (512, 128, 32)  # characters, of up to four bytes; the last fits in any case


def truncate_groups(groups: Sequence[ReplicaStatus]) -> tuple[tuple[ReplicaStatus, ...], bool]:
    """Return the records to show, sorted by index, and whether any was left out or shortened.

    At most 64 are shown, those with a message or with failures first. Their texts are shortened where all take more than 256 KiB.
    """
    shown = sorted(sorted(groups, key=_silent)[:GROUPS_SHOWN], key=lambda group: group.index)
    whole = len(shown) == len(groups)
    for limit in _SHORTER:
        if len(msgspec.json.encode(shown)) <= GROUPS_BYTES:
            break
        shown, whole = [_cut(group, limit) for group in shown], False
    return tuple(shown), not whole


def _silent(group: ReplicaStatus) -> bool:
    return group.message is None and not group.failures


def _cut(group: ReplicaStatus, limit: int) -> ReplicaStatus:
    return msgspec.structs.replace(
        group,
        message=_shorter(group.message, limit),
        last_rank_loss=_shorter(group.last_rank_loss, limit),
        last_failure=_with_shorter_message(group.last_failure, limit),
        last_operation=_with_shorter_message(group.last_operation, limit),
    )


def _with_shorter_message(told: StatusWithMessage | None, limit: int) -> StatusWithMessage | None:
    return None if told is None else msgspec.structs.replace(told, message=_shorter(told.message, limit))


def _shorter(text: str | None, limit: int) -> str | None:
    return text if text is None or len(text) <= limit else f"{text[: limit - 1]}…"
