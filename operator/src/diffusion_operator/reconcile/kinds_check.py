# SPDX-License-Identifier: Apache-2.0
"""A look at the kinds before anything is done: with kinds that are older than the operator no status could be written."""

import asyncio
import logging

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, GROUP
from diffusion_operator.api.published_schema import missing_fields
from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.errors import KindsOutdated

PUBLISHED_WITHIN_S = 10.0
"""The API server publishes a changed kind a moment after it takes it."""
LOOK_AGAIN_S = 1.0

log = logging.getLogger(__name__)


async def require_kinds(cluster: KubernetesCluster) -> None:
    """Wait until every field of a status is in the published kinds, for about ten seconds.

    Raises KindsOutdated with the missing fields after that.
    """
    for _ in range(int(PUBLISHED_WITHIN_S / LOOK_AGAIN_S)):
        missing = missing_fields(await cluster.published_kinds())
        if not missing:
            return
        log.info("waiting for newer kinds missing=%s", ", ".join(missing))
        await asyncio.sleep(LOOK_AGAIN_S)
    crds = " and ".join(f"{kind.plural}.{GROUP}" for kind in (DEPLOYMENT, ADAPTER))
    raise KindsOutdated(
        f"the CustomResourceDefinitions {crds} are older than this operator: expected fields that they lack, {', '.join(missing)}. "
        "Apply those of this version (docs/install.md, Upgrade)"
    )
