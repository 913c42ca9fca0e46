# SPDX-License-Identifier: Apache-2.0
"""What the operator counts: objects by the reason of Ready, with no object's name in a label."""

from prometheus_client import CollectorRegistry, generate_latest

from diffusion_operator.api.names import ADAPTER
from diffusion_operator.metrics import ObjectsByReason
from operator_rig import Rig, adapter, serving


def scraped(rig: Rig) -> list[str]:
    registry = CollectorRegistry()
    registry.register(ObjectsByReason(rig.runtime.ready_reasons))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


async def test_objects_are_counted_by_kind_and_reason_and_forgotten_when_they_go() -> None:
    rig = await serving()
    for name in ("a", "b"):
        rig.cluster.put(adapter(name, f"/loras/{name}"))
    rig.cluster.put(adapter("c", "/loras/c", suspend=True))
    await rig.run()
    assert scraped(rig) == [
        'diffusion_operator_objects{kind="DiffusionDeployment",reason="Serving"} 1.0',
        'diffusion_operator_objects{kind="LoRAAdapter",reason="LoadedEverywhere"} 2.0',
        'diffusion_operator_objects{kind="LoRAAdapter",reason="Suspended"} 1.0',
    ]
    for name in ("a", "b", "c"):
        rig.cluster.remove(ADAPTER, name)
    await rig.run()
    assert scraped(rig) == ['diffusion_operator_objects{kind="DiffusionDeployment",reason="Serving"} 1.0']
