# SPDX-License-Identifier: Apache-2.0
"""The ConfigMaps that a worker starts from, so that a restart needs no operator: the main file, and the shards with adapters. No secrets.

The main file has sleep policy, cold requests, model, and the name and sha256 of each shard. A mounted folder changes file by file, so a
worker takes a shard only when it has this sha256.
"""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import ModelStatus
from diffusion_operator.api.names import DESIRED_KEY, SHARDS, desired_config_name, shard_config_name, shard_file
from diffusion_operator.plan.adapters.shards import Shard
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata


class ShardReference(msgspec.Struct, frozen=True):
    """An entry of the main file's index."""

    file: str
    sha256: str

    @property
    def number(self) -> int:
        return next((number for number in range(SHARDS) if shard_file(number) == self.file), -1)


def desired_config(deployment: DiffusionDeployment, model: ModelStatus | None = None, shards: Sequence[ShardReference] = ()) -> Manifest:
    """Return the ConfigMap with a worker's main file: sleep policy, cold requests, model, and an index of the shards.

    A `model` without a pinned revision is left out.
    """
    sleep = deployment.spec.sleep
    content: dict[str, Any] = {
        "sleep": {"policy": sleep.policy.value, "level": sleep.level.value, "wakeTimeoutSeconds": sleep.wake_timeout_seconds},
        "coldRequests": msgspec.to_builtins(deployment.spec.cold_requests),
        "shards": msgspec.to_builtins(shards),
    }
    if model is not None and model.revision is not None:
        # The file names its source too, so a restarted worker of an older template does not mistake it for its own.
        source = msgspec.to_builtins(deployment.spec.model.source)
        content["model"] = {"source": source, "revision": model.revision, "digest": model.digest}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(deployment, desired_config_name(deployment.metadata.name)),
        "data": {DESIRED_KEY: msgspec.json.format(msgspec.json.encode(content), indent=1).decode()},
    }


def shard_config(deployment: DiffusionDeployment, number: int, content: bytes) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(deployment, shard_config_name(deployment.metadata.name, number)),
        "binaryData": {shard_file(number): base64.b64encode(content).decode()},
    }


def reference_to(shard: Shard) -> ShardReference:
    return ShardReference(file=shard_file(shard.number), sha256=shard.sha256)


class _Index(msgspec.Struct, frozen=True):
    shards: tuple[ShardReference, ...] = ()


def named_shards(main: Manifest) -> tuple[ShardReference, ...]:
    """Return the entries of the shards in a live main file; empty where somebody made it unreadable."""
    try:
        return msgspec.json.decode(main.get("data", {}).get(DESIRED_KEY, ""), type=_Index).shards
    except msgspec.DecodeError:
        return ()
