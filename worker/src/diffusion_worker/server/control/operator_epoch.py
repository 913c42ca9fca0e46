# SPDX-License-Identifier: Apache-2.0
"""The header by which the operator's leader shows that it still is the leader."""

from typing import Annotated

from fastapi import Header, Request

from diffusion_worker.engine.engine import Engine

READS = frozenset({"GET", "HEAD"})


async def admit_epoch(
    request: Request,
    x_operator_epoch: Annotated[
        int | None,
        Header(
            alias="X-Operator-Epoch",
            ge=1,
            le=2**63 - 1,
            description="The epoch of the operator's leader. A lower one than before is refused.",
        ),
    ] = None,
) -> None:
    """Note the epoch in a call's header, and refuse a call other than GET or HEAD if a higher epoch was seen before.

    A call without the header, of another program, is served.

    Raises:
        RequestError: StaleEpoch, a change by a replaced leader.
    """
    engine: Engine = request.app.state.engine
    if x_operator_epoch is None:
        return
    if request.method in READS:
        engine.operator_epoch.see(x_operator_epoch)
    else:
        engine.operator_epoch.admit(x_operator_epoch)
