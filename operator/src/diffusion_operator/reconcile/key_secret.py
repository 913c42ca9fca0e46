# SPDX-License-Identifier: Apache-2.0
"""A guard of the operator's key, from which every control token is derived: no worker's pod may mount its Secret."""

from diffusion_operator.errors import ClusterRefused
from diffusion_operator.render import Manifest
from diffusion_operator.settings import Settings


def guard_key(settings: Settings, pod: Manifest) -> None:
    """Raise ClusterRefused for a pod of the operator's namespace that would mount the operator's key."""
    own = settings.operator_pods
    if own is None or not settings.operator_key_secret or pod["metadata"]["namespace"] != own.namespace:
        return
    if any(volume.get("secret", {}).get("secretName") == settings.operator_key_secret for volume in pod["spec"]["volumes"]):
        raise ClusterRefused(
            f"the Secret {settings.operator_key_secret} is the operator's own key, and no worker may mount it: name another Secret in "
            "model.source, lora.secrets or service.apiKeySecret",
            status=422,
        )
