# SPDX-License-Identifier: Apache-2.0
"""Shards, the ConfigMaps with adapters of a deployment, written and kept in virtual time (faults 41 to 43 and 46)."""

import copy
import gzip
import hashlib
import json
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, POD, SHARDS, shard_config_name
from diffusion_operator.api.worker_state import DesiredReport, WireError
from diffusion_operator.errors import ClusterError, ClusterRefused
from diffusion_operator.plan.adapters import shards
from diffusion_operator.plan.adapters.shards import shard_of
from support.operator.mounted import mounted_files
from support.operator.rig import Rig, adapter, deployment, serving

A, B = shard_config_name("d", shard_of("a")), shard_config_name("d", shard_of("b"))


def files(rig: Rig) -> dict[str, bytes]:
    return mounted_files(lambda name: rig.cluster.find(CONFIG_MAP, name), "d")


def main(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(rig)["desired.json"])
    return found


def in_shard(rig: Rig, file: str) -> list[str]:
    return [one["name"] for one in json.loads(gzip.decompress(files(rig)[file]))["adapters"]]


def refuse(rig: Rig, name: str) -> None:
    """Let the API server refuse all writes of the object with this name."""

    def refused(verb: str, manifest: dict[str, Any]) -> ClusterError | None:
        return (
            ClusterRefused("no", status=403, reason="Forbidden", said="a policy says no") if manifest["metadata"]["name"] == name else None
        )

    rig.cluster.refuse = refused


async def with_adapters(*names: str, **spec: Any) -> Rig:
    rig = await serving(1, **spec)
    for name in names:
        rig.cluster.put(adapter(name, f"/loras/{name}"))
    await rig.run()
    return rig


async def test_adapters_are_in_shards_that_the_main_file_names_with_their_sha256() -> None:
    rig = await with_adapters("a", "b")
    assert rig.cluster.names(CONFIG_MAP) == sorted(["d-desired", A, B]), "empty ones are not made"
    for entry in main(rig)["shards"]:
        assert hashlib.sha256(files(rig)[entry["file"]]).hexdigest() == entry["sha256"]
    assert sorted(name for entry in main(rig)["shards"] for name in in_shard(rig, entry["file"])) == ["a", "b"]


async def test_a_change_of_an_adapter_writes_its_shard_first_and_then_the_main_file_alone() -> None:
    rig = await with_adapters("a", "b")
    written: list[str] = []
    rig.cluster.refuse = lambda verb, manifest: written.append(manifest["metadata"]["name"])  # type: ignore[func-returns-value]
    rig.cluster.change(ADAPTER, "a", lambda spec: spec.update(defaultScale="0.5"))
    await rig.run()
    assert [name for name in written if "desired" in name] == [A, "d-desired"]


async def test_a_pod_mounts_all_shards_that_may_ever_be_and_of_each_our_file_alone() -> None:
    rig = await serving(1)
    pod = rig.cluster.find(POD, "d-0-0") or {}
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "desired"]
    first, *others = [one["configMap"] for one in volume["projected"]["sources"]]
    assert first == {"name": "d-desired", "items": [{"key": "desired.json", "path": "desired.json"}]}
    assert [one["name"] for one in others] == [f"d-desired-{number}" for number in range(SHARDS)]
    assert all(one["optional"] and len(one["items"]) == 1 for one in others)


async def test_a_strangers_shard_refuses_its_own_adapters_only_until_it_goes() -> None:
    rig = Rig()
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": A, "namespace": "default"}, "data": {"theirs": "yes"}}
    before = copy.deepcopy(rig.cluster.put(theirs))
    for name in ("a", "b"):
        rig.cluster.put(adapter(name, f"/loras/{name}"))
    rig.cluster.put(deployment())
    await rig.run()
    (worker,) = rig.start_all()
    await rig.run(20)
    assert rig.cluster.find(CONFIG_MAP, A) == before
    assert (rig.condition("ChildrenReady"), rig.condition("Ready")) == (("False", "NameConflict"), ("True", "Serving"))
    assert rig.adapter_condition("Accepted", "a") == ("False", "NameConflict")
    assert f"ConfigMap {A} is not managed by this DiffusionDeployment" in rig.adapter_message("Accepted", "a")
    assert rig.adapter_condition("Ready", "b") == ("True", "LoadedEverywhere")
    assert worker.loads == ["b"], "it was not even tried"
    rig.restart_operator()
    await rig.run(5)
    assert worker.loads == ["b"], "an operator that starts again does not know it yet, and calls nobody before it does"
    rig.cluster.remove(CONFIG_MAP, A)
    await rig.run(62)
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")
    assert rig.adapter_condition("Ready", "a") == ("True", "LoadedEverywhere")
    assert [len(main(rig)["shards"]), worker.loads] == [2, ["b", "a"]]


async def test_a_shard_that_the_api_server_refuses_is_told_and_its_adapters_are_pushed() -> None:
    rig = await with_adapters("b")
    refuse(rig, A)
    rig.cluster.put(adapter("a", "/loras/a"))
    await rig.run(20)
    assert rig.condition("ChildrenReady") == ("False", "Forbidden")
    assert f"the API server did not accept a write of ConfigMap {A}: a policy says no" in rig.message("ChildrenReady")
    assert rig.adapter_condition("Ready", "a") == ("True", "LoadedEverywhere")
    assert len(main(rig)["shards"]) == 1, "what is not there is not named"
    rig.cluster.remove(POD, "d-0-0")
    await rig.run(20)
    assert len(rig.cluster.names(POD)) == 1, "a shard holds no pod up"


async def test_a_shard_that_cannot_be_changed_keeps_the_name_of_what_is_there() -> None:
    rig = await with_adapters("a", "b")
    before = main(rig)["shards"]
    refuse(rig, A)
    rig.cluster.change(ADAPTER, "a", lambda spec: spec.update(defaultScale="0.5"))
    await rig.run(20)
    assert main(rig)["shards"] == before
    rig.restart_operator()
    await rig.run(20)
    assert main(rig)["shards"] == before
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(61)
    assert main(rig)["shards"] != before


async def test_a_shard_that_lost_its_last_adapter_stays_empty_and_is_not_named() -> None:
    rig = await with_adapters("a", "b")
    rig.cluster.remove(ADAPTER, "a")
    await rig.run(20)
    assert A in rig.cluster.names(CONFIG_MAP)
    assert [in_shard(rig, one["file"]) for one in main(rig)["shards"]] == [["b"]]
    rig.restart_operator()
    await rig.run(20)
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")


async def test_a_shard_that_somebody_deletes_is_made_again_and_told() -> None:
    rig = await with_adapters("a")
    rig.cluster.remove(CONFIG_MAP, A)
    await rig.run()
    assert A in rig.cluster.names(CONFIG_MAP)
    assert any(A in note for note in rig.cluster.notes("Repaired"))


async def test_the_newest_adapters_of_a_full_shard_are_refused_and_the_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in (f"x{number}" for number in range(200)) if shard_of(name) == 0][:4]
    rig = await with_adapters(names[0])
    monkeypatch.setattr(shards, "FILE_BYTES", len(files(rig)[main(rig)["shards"][0]["file"]]) + 20)
    for name in names[1:]:
        await rig.run(1)
        rig.cluster.put(adapter(name, f"/loras/{hashlib.sha256(name.encode()).hexdigest()}"))
    await rig.run(20)
    assert rig.adapter_condition("Ready", names[0]) == ("True", "LoadedEverywhere")
    assert rig.adapter_condition("Accepted", names[3]) == ("False", "CapacityExceeded")
    assert "d-desired-0 has no room for this adapter: 1 older adapters in it take" in rig.adapter_message("Accepted", names[3])
    assert rig.condition("AdaptersReady") == ("False", "CapacityExceeded")
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")


async def test_what_a_worker_says_of_its_mounted_files_is_in_the_message_of_its_replica() -> None:
    said = DesiredReport(problem=WireError(code="DigestMismatch", message="mounted adapters did not come"))
    rig = Rig()
    rig.cluster.put(deployment())
    await rig.run()
    rig.start_all(desired=said)
    await rig.run()
    assert "mounted adapters did not come" in rig.message("Ready")
