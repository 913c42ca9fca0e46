# SPDX-License-Identifier: Apache-2.0
"""A kopf operator as its tutorial writes one: on creation it makes the same children as ours and says so in the status.

It handles as many objects at once as ours does: kopf sets no bound, and requests that time out are tried again a minute later.

`kopf run -n NAMESPACE benchmarks/stand_ins/kopf_twin.py`. P12 is measured beside it.
"""

import asyncio
from typing import Any

import kopf

from benchmarks.operators.children import AT_ONCE, children
from diffusion_operator.api.names import DEPLOYMENT, GROUP, VERSION
from diffusion_operator.cluster import KubernetesCluster, connect


@kopf.on.startup()  # type: ignore[untyped-decorator]
async def start(memo: kopf.Memo, **_: Any) -> None:
    """Connect to the API server at startup. Handlers share this client, and a semaphore limits how many create children at a time."""
    memo.cluster = await connect()
    memo.gate = asyncio.Semaphore(AT_ONCE)


@kopf.on.create(GROUP, VERSION, DEPLOYMENT.plural)  # type: ignore[untyped-decorator]
async def create(memo: kopf.Memo, body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
    """Create the children of a new deployment, one after the other, and set `replicas` in its status."""
    cluster: KubernetesCluster = memo.cluster
    async with memo.gate:
        for manifest in children(dict(body)):
            await cluster.create(manifest)
    patch.status["replicas"] = 1


@kopf.on.cleanup()  # type: ignore[untyped-decorator]
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Close the client's connections."""
    await memo.cluster.__aexit__(None, None, None)
