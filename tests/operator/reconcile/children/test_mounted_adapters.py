# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap with the adapters of a deployment, written and kept in virtual time."""

import hashlib
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, POD
from diffusion_operator.errors import ClusterError, ClusterRefused
from diffusion_operator.plan.adapters import mounted_file
from diffusion_operator.reconcile.children import keeping
from support.operator.mounted import mounted_desired, mounted_files
from support.operator.rig import Rig, adapter, serving


def listed(rig: Rig) -> dict[str, float]:
    """Return the adapters of the mounted file with their scales."""
    desired = mounted_desired(lambda name: rig.cluster.find(CONFIG_MAP, name), "d")
    return {one["name"]: one["scale"] for one in desired["adapters"]}


async def with_adapters(*names: str) -> Rig:
    rig = await serving(1)
    for name in names:
        rig.cluster.put(adapter(name, f"/loras/{name}"))
    await rig.run(20)
    return rig


async def test_the_adapters_are_in_the_one_config_map_that_a_pod_mounts() -> None:
    rig = await with_adapters("b", "a")
    assert rig.cluster.names(CONFIG_MAP) == ["d-desired"]
    assert list(listed(rig)) == ["a", "b"]
    pod = rig.cluster.find(POD, "d-0-0") or {}
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "desired"]
    assert volume == {"name": "desired", "configMap": {"name": "d-desired"}}


async def test_a_full_list_is_written_every_fifteen_seconds_and_workers_are_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await with_adapters("a")
    content = mounted_files(lambda name: rig.cluster.find(CONFIG_MAP, name), "d")["adapters.json.gz"]
    monkeypatch.setattr(keeping, "BYTES_A_SECOND", len(content) / 15)
    (worker,) = rig.workers
    rig.cluster.change(ADAPTER, "a", lambda spec: spec.update(defaultScale="0.5"))
    await rig.run(2)
    assert listed(rig) == {"a": 0.5}
    rig.cluster.change(ADAPTER, "a", lambda spec: spec.update(defaultScale="0.25"))
    await rig.run(2)
    assert listed(rig) == {"a": 0.5}
    assert worker.adapters["a"].scale == 0.25
    await rig.run(15)
    assert listed(rig) == {"a": 0.25}


async def test_a_list_that_the_api_server_refuses_is_told_and_its_adapters_are_pushed() -> None:
    rig = await with_adapters("b")

    def refused(verb: str, manifest: dict[str, Any]) -> ClusterError | None:
        ours = manifest["metadata"]["name"] == "d-desired"
        return ClusterRefused("no", status=403, reason="Forbidden", said="a policy says no") if ours else None

    rig.cluster.refuse = refused
    rig.cluster.put(adapter("a", "/loras/a"))
    await rig.run(20)
    assert rig.condition("ChildrenReady") == ("False", "Forbidden")
    assert "the API server did not accept a write of ConfigMap d-desired: a policy says no" in rig.message("ChildrenReady")
    assert rig.adapter_condition("Ready", "a") == ("True", "LoadedEverywhere")
    rig.cluster.remove(POD, "d-0-0")
    await rig.run(20)
    assert len(rig.cluster.names(POD)) == 1, "the list that is there holds no pod up"
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(61)
    assert list(listed(rig)) == ["a", "b"]


async def test_a_list_that_somebody_deletes_is_made_again_and_told() -> None:
    rig = await with_adapters("a")
    rig.cluster.remove(CONFIG_MAP, "d-desired")
    await rig.run()
    assert list(listed(rig)) == ["a"]
    assert any("d-desired" in note for note in rig.cluster.notes("Repaired"))


async def test_the_newest_adapters_that_do_not_fit_are_refused_and_the_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await with_adapters("x0")
    content = mounted_files(lambda name: rig.cluster.find(CONFIG_MAP, name), "d")["adapters.json.gz"]
    monkeypatch.setattr(mounted_file, "FILE_BYTES", len(content) + 20)
    for name in ("x1", "x2"):
        await rig.run(1)
        rig.cluster.put(adapter(name, f"/loras/{hashlib.sha256(name.encode()).hexdigest()}"))
    await rig.run(20)
    assert rig.adapter_condition("Ready", "x0") == ("True", "LoadedEverywhere")
    assert rig.adapter_condition("Accepted", "x2") == ("False", "CapacityExceeded")
    assert "no room for this adapter: it has 1 older ones" in rig.adapter_message("Accepted", "x2")
    assert rig.condition("AdaptersReady") == ("False", "CapacityExceeded")
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")
