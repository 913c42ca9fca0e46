# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap that a worker starts from, so that a restart needs no operator: its settings, and its adapters. No secrets."""

import base64
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import ModelStatus
from diffusion_operator.api.names import ADAPTERS_KEY, DESIRED_KEY, desired_config_name
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata


def desired_config(deployment: DiffusionDeployment, adapters: bytes, model: ModelStatus | None = None) -> Manifest:
    """Return the ConfigMap with the settings file (sleep policy, cold requests, model) and `adapters`, the compressed file of those.

    A `model` without a pinned revision is left out.
    """
    sleep = deployment.spec.sleep
    content: dict[str, Any] = {
        "sleep": {"policy": sleep.policy.value, "level": sleep.level.value, "wakeTimeoutSeconds": sleep.wake_timeout_seconds},
        "coldRequests": msgspec.to_builtins(deployment.spec.cold_requests),
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
        "binaryData": {ADAPTERS_KEY: base64.b64encode(adapters).decode()},
    }
