# SPDX-License-Identifier: Apache-2.0
"""The control token of a deployment, derived from the operator's key: to call a worker the operator need read no Secret."""

import base64
import hashlib
import hmac

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import TOKEN_KEY, control_secret_name
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata


def control_token(key: bytes, owner: ObjectMeta) -> str:
    """Return a deployment's control token in hex: the HMAC-SHA256 of its namespace, name and UID under `key`.

    A deployment that is deleted and created again has another UID, and so a new token.
    """
    identity = f"{owner.namespace}/{owner.name}/{owner.uid}"
    return hmac.new(key, identity.encode(), hashlib.sha256).hexdigest()


def control_secret(deployment: DiffusionDeployment, *, key: bytes) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(deployment, control_secret_name(deployment.metadata.name)),
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(control_token(key, deployment.metadata).encode()).decode()},
    }
