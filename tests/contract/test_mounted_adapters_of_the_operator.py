# SPDX-License-Identifier: Apache-2.0
"""The mounted folder as the operator renders it, read by the worker's own code: every adapter, with every field."""

from pathlib import Path
from typing import Any

import msgspec

from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.source import AdapterRepository, AdapterSource, HttpSource, PvcSource, S3Source, SecretKeyRef, SecretRef
from diffusion_operator.plan.adapters.acceptance import Decision, DesiredAdapter
from diffusion_operator.plan.adapters.shards import NO_SHARDS, Shards, plan_shards
from diffusion_operator.plan.adapters.slices import finish
from diffusion_operator.render.desired_config import desired_config, reference_to, shard_config
from diffusion_worker.engine.adapters.desired_files import DesiredFiles
from diffusion_worker.engine.sleep.policy import read_desired
from diffusion_worker.engine.state.state_document import DesiredAdapter as WorkersAdapter
from support.apiserver.kind_api import dd
from support.operator.mounted import mounted_files

TOKEN, KEYS = SecretKeyRef(name="hub", key="token"), SecretRef(name="keys")
SOURCES = (
    AdapterSource(path="/loras/x"),
    AdapterSource(hugging_face=AdapterRepository(repo="org/x", revision="c0ffee", file="x.safetensors", token_secret_ref=TOKEN)),
    AdapterSource(s3=S3Source(uri="s3://b/x.safetensors", endpoint="https://s3", region="r", credentials_secret_ref=KEYS)),
    AdapterSource(pvc=PvcSource(claim_name="styles", path="x")),
    AdapterSource(http=HttpSource(url="https://h/x.safetensors", sha256="0" * 64)),
)


def deployment() -> DiffusionDeployment:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return msgspec.convert({**dd("d"), "metadata": metadata}, DiffusionDeployment)


def wanted(count: int) -> list[DesiredAdapter]:
    """Return `count` adapters with all fields set, whose sources take turns among all kinds."""
    fields: dict[str, Any] = {"components": ("transformer", "text_encoder"), "format": "peft", "expected_rank": 8}
    return [
        DesiredAdapter(
            uid=f"u{number}",
            generation=1,
            name=f"style {number}",
            load=AdapterLoad(
                source=SOURCES[number % len(SOURCES)],
                digest=f"sha256:{number:064x}",
                scale=0.5,
                priority=number,
                residency=Residency.ON_DEMAND,
                **fields,
            ),
            load_timeout_s=number + 1,
        )
        for number in range(count)
    ]


def planned(adapters: list[DesiredAdapter]) -> Shards:
    return finish(plan_shards([Decision(adapter=None, accepted=True, desired=one) for one in adapters], {}, NO_SHARDS))  # type: ignore[arg-type]


def mounted(folder: Path, adapters: list[DesiredAdapter]) -> dict[str, WorkersAdapter]:
    """Write the operator's ConfigMaps with `adapters` to `folder`, and return those that a worker reads there, by name."""
    shards = planned(adapters).shards
    main = desired_config(deployment(), None, [reference_to(shard) for shard in shards])
    maps = {one["metadata"]["name"]: one for one in (main, *(shard_config(deployment(), shard.number, shard.content) for shard in shards))}
    for name, content in mounted_files(maps.get, "d").items():
        (folder / name).write_bytes(content)
    path = str(folder / "desired.json")
    named, missing = DesiredFiles(path).read(read_desired(path))
    assert missing == {}
    return named


def test_the_worker_reads_every_adapter_with_all_that_the_operator_says_of_it(tmp_path: Path) -> None:
    adapters = wanted(40)
    found = mounted(tmp_path, adapters)
    assert sorted(found) == sorted(one.name for one in adapters)
    for one in adapters:
        told = plain(found[one.name])
        said = plain(one.load) | {"name": one.name, "loadTimeoutSeconds": one.load_timeout_s}
        (kind, source), where = next(iter(said.pop("source").items())), told.pop("source")
        assert told == said
        assert source == where[kind] if isinstance(source, str) else source.items() <= where[kind].items()


def plain(struct: msgspec.Struct) -> dict[str, Any]:
    return dict(msgspec.json.decode(msgspec.json.encode(struct)))


def test_a_worker_reads_twenty_thousand_adapters(tmp_path: Path) -> None:
    adapters = wanted(20_000)
    assert len(mounted(tmp_path, adapters)) == 20_000
