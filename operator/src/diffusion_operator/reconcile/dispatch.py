# SPDX-License-Identifier: Apache-2.0
"""From a key to the reconcile of its kind."""

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.reconcile.adapter import reconcile_adapter
from diffusion_operator.reconcile.deployment import reconcile_deployment
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.runtime import Runtime

_BY_KIND = {DEPLOYMENT.kind: reconcile_deployment, ADAPTER.kind: reconcile_adapter}


async def reconcile(runtime: Runtime, key: Key) -> Result:
    return await _BY_KIND[key.kind](runtime, key)
