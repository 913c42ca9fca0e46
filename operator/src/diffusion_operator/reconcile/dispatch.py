# SPDX-License-Identifier: Apache-2.0
"""From a key to the reconcile of its kind."""

from diffusion_operator.api.names import DEPLOYMENT
from diffusion_operator.errors import NamespaceEnds, NotLeading
from diffusion_operator.reconcile.adapter import reconcile_adapter
from diffusion_operator.reconcile.deployment import reconcile_deployment
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.runtime import Runtime


async def reconcile(runtime: Runtime, key: Key) -> Result:
    try:
        if key.kind == DEPLOYMENT.kind:
            return await reconcile_deployment(runtime, key)
        return await reconcile_adapter(runtime, key)
    except NamespaceEnds:
        return Result()  # the object is deleted next, and that wakes the key
    except NotLeading:
        return Result()  # the process that leads next looks at every object
