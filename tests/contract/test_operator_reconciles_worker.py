# SPDX-License-Identifier: Apache-2.0
"""The operator's real reconciles against the worker's real server: the server does what they decide, and they understand its reports.

The cluster is the fake one and its time virtual. The server is real, over fake ranks, and over real ones at the end.
"""

import shutil
from pathlib import Path

import pytest

from diffusion_operator.api.names import ADAPTER
from support.operator.reconcile_story import REAL_PROGRAM, story
from support.operator.rig import adapter
from support.worker.process import DIGITS

pytestmark = pytest.mark.slow
ONE_IN_MEMORY = ("--max-loras=1", "--max-cached-loras=1", "--max-loras-per-request=1")
LORA = {"maxLoaded": 1, "maxCached": 1}


def lora(folder: Path, name: str) -> str:
    """Copy an adapter to a folder of this name and return its path; the ranks are fake, so its content is irrelevant."""
    shutil.copytree(DIGITS / "loras" / "frame", folder / name)
    return str(folder / name)


async def test_adapters_take_turns_in_memory_and_each_says_where_it_is(tmp_path: Path) -> None:
    async with story(*ONE_IN_MEMORY, lora=LORA) as told:
        rig = told.rig
        rig.cluster.put(adapter("a", lora(tmp_path, "a")))
        await told.until("Ready", "True", "LoadedEverywhere", name="a")
        rig.cluster.put(adapter("b", lora(tmp_path, "b")))
        await told.until("Ready", "True", "LoadedEverywhere", name="b")
        message = await told.until("Ready", "False", "Evicted", name="a")
        assert "replica 0" in message
        assert rig.condition("AdaptersReady") == ("False", "CapacityExceeded")
        rig.cluster.put(adapter("c", lora(tmp_path, "c"), residency="OnDemand"))
        await told.until("Ready", "True", "CachedOnDemand", name="c")
        assert told.records() == {"a": ("Cached", "Cached"), "b": ("Loaded", "Cached"), "c": ("Cached", "OnDemand")}

        rig.cluster.change(ADAPTER, "a", lambda spec: spec.update(residency="Resident"))
        await told.until("Ready", "True", "LoadedEverywhere", name="a")
        await told.until("Ready", "False", "Evicted", name="b")
        assert rig.adapter_condition("Degraded", "b") == ("True", "Evicted")
        rig.cluster.put(adapter("d2", lora(tmp_path, "d2"), residency="Resident"))
        message = await told.until("Accepted", "False", "CapacityExceeded", name="d2")
        assert "spec.lora.maxLoaded of DiffusionDeployment d is 1" in message

        for name in ("d2", "a"):
            rig.cluster.remove(ADAPTER, name)
        await told.until("Ready", "True", "LoadedEverywhere", name="b")
        await told.wait(lambda: told.records() == {"b": ("Loaded", "Cached"), "c": ("Cached", "OnDemand")}, told.records)


async def test_a_source_that_changes_a_scale_that_changes_and_a_source_that_is_broken(tmp_path: Path) -> None:
    async with story() as told:
        rig = told.rig
        first, second = lora(tmp_path, "first"), lora(tmp_path, "second")
        rig.cluster.put(adapter("x", first))
        await told.until("Ready", "True", "LoadedEverywhere", name="x")
        pinned = rig.adapter_status()["resolved"]
        assert (pinned["source"], pinned["rank"], pinned["modules"]) == (first, 8, 24)

        rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(defaultScale="0.5", priority=2))
        await told.wait(lambda: told.worker.state()["adapters"][0]["scale"] == 0.5, told.records)
        assert told.worker.state()["adapters"][0]["priority"] == 2

        rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": second}))
        await told.wait(lambda: rig.adapter_status()["resolved"]["source"] == second, rig.adapter_status)
        await told.until("UpToDate", "True", "Current", name="x")
        assert rig.adapter_status()["resolved"]["digest"] != pinned["digest"]

        rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": lora(tmp_path, "broken")}))
        message = await told.until("SourceResolved", "False", "InvalidAdapter", name="x")
        assert "no adapter_config.json" in message
        assert rig.adapter_condition("UpToDate") == ("False", "OldDigestStillLoaded")
        assert [one["source"]["path"] for one in told.worker.state()["adapters"] if one["state"] == "Loaded"] == [second]

        rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": first}))
        await told.until("Ready", "True", "LoadedEverywhere", name="x")


async def test_what_the_ranks_find_out_is_in_the_condition_it_belongs_to(tmp_path: Path) -> None:
    async with story() as told:
        rig = told.rig
        for name in ("too-wide", "elsewhere", "crowded"):
            rig.cluster.put(adapter(name, lora(tmp_path, name)))
        rig.cluster.put(adapter("nowhere", str(tmp_path / "nowhere")))
        assert "rank 128, at most 64" in await told.until("Accepted", "False", "RankTooLarge", name="too-wide")
        assert "norm_out.linear" in await told.until("Accepted", "False", "ModulesOutsideEnvelope", name="elsewhere")
        assert "InsufficientMemory" in await told.until("Ready", "False", "Failed", name="crowded")
        await told.until("SourceResolved", "False", "SourceNotFound", name="nowhere")
        assert rig.adapter_status("too-wide")["replicaInstances"][0]["lastError"]["retryable"] is False
        assert rig.adapter_status("nowhere")["replicaInstances"][0]["lastError"]["retryable"] is True
        lora(tmp_path, "nowhere")
        await told.until("Ready", "True", "LoadedEverywhere", name="nowhere")


async def test_real_ranks_report_what_is_pinned_and_a_damaged_file_takes_nothing_with_it(tmp_path: Path) -> None:
    async with story(*ONE_IN_MEMORY, program=REAL_PROGRAM, lora=LORA) as told:
        rig = told.rig
        rig.cluster.put(adapter("frame", str(DIGITS / "loras" / "frame"), expectedRank=4, format="PEFT"))
        await told.until("Ready", "False", "SourceError", name="frame")
        assert "rank" in await told.until("SourceResolved", "False", "InvalidAdapter", name="frame")
        rig.cluster.change(ADAPTER, "frame", lambda spec: spec.pop("expectedRank"))
        await told.until("Ready", "True", "LoadedEverywhere", name="frame")
        resolved = rig.adapter_status("frame")["resolved"]
        assert (resolved["format"], resolved["components"]) == ("PEFT", ("Transformer",))
        assert resolved["digest"].startswith("sha256:")
        assert resolved["rank"] > 4

        damaged = Path(lora(tmp_path, "damaged"))
        weights = damaged / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        rig.cluster.put(adapter("damaged", str(damaged)))
        await told.until("SourceResolved", "False", "InvalidAdapter", name="damaged")
        assert rig.adapter_condition("Ready", "frame") == ("True", "LoadedEverywhere"), "nothing was evicted for it"

        rig.cluster.put(adapter("paper", str(DIGITS / "loras" / "paper")))
        await told.until("Ready", "True", "LoadedEverywhere", name="paper")
        await told.until("Ready", "False", "Evicted", name="frame")
