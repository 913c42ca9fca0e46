# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap a worker starts from, so that a restart needs no operator: sleep policy, cold requests, adapters, model. No secrets."""

from collections.abc import Sequence

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import ModelStatus
from diffusion_operator.api.names import DESIRED_KEY, desired_config_name
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata


def desired_config(deployment: DiffusionDeployment, adapters: Sequence[DesiredAdapter], model: ModelStatus | None = None) -> Manifest:
    """`model` is what is pinned of it, if anything is."""
    sleep = deployment.spec.sleep
    content = {
        "sleep": {"policy": sleep.policy.value, "level": sleep.level.value, "wakeTimeoutSeconds": sleep.wake_timeout_seconds},
        "coldRequests": msgspec.to_builtins(deployment.spec.cold_requests),
        "adapters": [
            {"name": one.name, **msgspec.to_builtins(one.load), "loadTimeoutSeconds": one.load_timeout_s}
            for one in sorted(adapters, key=lambda one: one.name)
        ],
    }
    if model is not None and model.revision is not None:
        # With the source it is about: a worker of an older template, started again, is told another one.
        source = msgspec.to_builtins(deployment.spec.model.source)
        content["model"] = {"source": source, "revision": model.revision, "digest": model.digest}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(deployment, desired_config_name(deployment.metadata.name)),
        "data": {DESIRED_KEY: msgspec.json.format(msgspec.json.encode(content), indent=1).decode()},
    }
