# SPDX-License-Identifier: Apache-2.0
"""The arguments that the operator renders, read by the worker's own parser: every field, every value, every bound."""

import json
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from diffusion_operator.api import deployment_spec as operator_api
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import DeploymentSpec
from diffusion_operator.api.names import CACHE_DIR, CLAIMS_DIR, SECRETS_DIR
from diffusion_operator.plan.replicas.revision import template_of
from diffusion_operator.render.check_pod import check_pod
from diffusion_operator.render.pod import pod
from diffusion_operator.render.worker_arguments import option_word, worker_arguments
from diffusion_worker import config
from diffusion_worker.config import RequestDefaults, RequestLimits, WorkerConfig
from diffusion_worker.options import check_options
from support.operator.worker_driver import config_of_arguments
from support.worker.process import DIGITS_MODEL, REPOSITORY

Spec = dict[str, Any]
SOURCE = {"path": str(DIGITS_MODEL)}


def deployment_of(spec: Spec) -> DiffusionDeployment:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    document: Spec = {"metadata": metadata, "spec": {**spec, "model": {"source": SOURCE} | spec.get("model", {})}}
    return msgspec.convert(document, DiffusionDeployment)


def arguments_of(spec: Spec) -> list[str]:
    return worker_arguments(deployment_of(spec))


def config_of(spec: Spec) -> WorkerConfig:
    return config_of_arguments(arguments_of(spec))


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"lora": {"maxLoaded": 0}},
        {"lora": {"enabled": False, "maxPerRequest": 4}},
        {"engine": {"maxBatchSize": 64}, "parallelism": {"ranksPerReplica": 64}, "startup": {"timeoutSeconds": 86400}},
        {"lora": {"maxLoaded": 64, "maxCached": 1024, "maxRank": 256, "maxPerRequest": 16, "loadTimeoutSeconds": 3600}},
        {"parallelism": {"ranksPerReplica": 16, "tensor": 16}, "engine": {"vaeTiling": True, "exact": True}},
        {"model": {"source": {"s3": {"uri": "s3://bucket/m/"}}, "cache": {"emptyDir": {"sizeLimit": "5Gi"}}}},
    ],
    ids=["defaults", "no room for adapters", "no adapters", "largest", "most adapters", "tensor", "from elsewhere"],
)
def test_the_worker_would_start_with_the_arguments_of_its_pod(spec: Spec) -> None:
    found = config_of(spec)
    check_options(found)
    source = spec.get("model", {}).get("source", SOURCE)
    assert (json.loads(found.model_source) if found.model_source else {"path": found.model}) == source
    assert (found.secrets_dir, found.claims_dir, found.cache_dir) == (SECRETS_DIR, CLAIMS_DIR, CACHE_DIR)


ENUMS: dict[str, tuple[type[StrEnum], type[StrEnum], str]] = {
    # For a field of the spec: its values, the worker's values, and the resulting setting.
    "model.dtype": (operator_api.Dtype, config.Dtype, "dtype"),
    "engine.loadFormat": (operator_api.LoadFormat, config.LoadFormat, "load_format"),
    "engine.compile": (operator_api.Compile, config.Compile, "compile"),
    "engine.offload": (operator_api.Offload, config.Offload, "offload"),
    "engine.quantization": (operator_api.Quantization, config.Quantization, "quantization"),
    "engine.stepCache": (operator_api.StepCache, config.StepCache, "step_cache"),
    "lora.onMissing": (operator_api.OnMissing, config.OnMissing, "lora_on_missing"),
}


def letters(word: str) -> str:
    return word.replace("-", "").lower()


@pytest.mark.parametrize("field", ENUMS)
def test_every_value_of_an_enum_is_one_of_the_workers_and_the_other_way_round(field: str) -> None:
    ours, theirs, setting = ENUMS[field]
    part, _, name = field.partition(".")
    found = {str(value): getattr(config_of({part: {name: value}}), setting) for value in ours}
    assert set(found.values()) == set(theirs)
    assert {letters(value): letters(got) for value, got in found.items() if letters(value) != letters(got)} in ({}, {"disabled": "none"})


def test_every_option_of_a_spec_reaches_the_worker() -> None:
    found = config_of(
        {
            "servedName": "sd",
            "servedNames": ["openai/gpt-image-1", "sd-3"],
            "model": {"pipeline": "FluxPipeline", "dtype": "Float16", "componentDtypes": {"vae": "Float32", "text_encoder": "BFloat16"}},
            "engine": {"maxBatchSize": 3, "batchWindowMilliseconds": 20, "exact": True, "promptCacheSize": 0, "vaeTiling": True},
            "parallelism": {"ranksPerReplica": 24, "tensor": 4, "sequence": 3, "shard": 2},
            "lora": {"maxLoaded": 5, "maxCached": 9, "maxRank": 32, "maxPerRequest": 2, "targetModules": ["to_q"], "loadTimeoutSeconds": 7},
            "startup": {"timeoutSeconds": 60, "warmup": {"steps": 2, "sizes": ["32x32", "64x32"]}},
            "service": {"apiKeySecret": {"name": "s", "key": "k"}},
            "requests": {
                "defaults": {"steps": 9, "guidanceScale": "3.5", "size": "64x48"},
                "limits": {"maxSteps": 30, "maxPixels": 4096, "maxImages": 2},
            },
        }
    )
    assert found.served_names == ["sd", "openai/gpt-image-1", "sd-3"]
    assert (found.served_name, found.pipeline, found.max_batch_size, found.batch_window_s) == ("sd", "FluxPipeline", 3, 0.02)
    assert (found.dtype, found.component_dtypes) == ("float16", {"vae": "float32", "text_encoder": "bfloat16"})
    assert (found.exact, found.prompt_cache_size, found.vae_tiling) == (True, 0, True)
    assert (found.ranks, found.tensor, found.sequence, found.shard) == (24, 4, 3, 2)
    assert (found.max_loras, found.max_cached_loras, found.max_lora_rank, found.max_loras_per_request) == (5, 9, 32, 2)
    assert (found.lora_target_modules, found.lora_load_timeout_s, found.startup_timeout_s) == (["to_q"], 7, 60)
    assert (found.warmup_steps, found.warmup_sizes) == (2, [(32, 32), (64, 32)])
    assert found.api_key_path == "/etc/diffusion/api-key/k"
    assert found.defaults == RequestDefaults(steps=9, guidance_scale=3.5, width=64, height=48)
    assert found.limits == RequestLimits(max_steps=30, max_pixels=4096, max_images=2)


def test_every_place_that_the_arguments_name_is_mounted_in_the_pod() -> None:
    spec: Spec = {"service": {"apiKeySecret": {"name": "s", "key": "k"}}, "lora": {"secrets": ["hub"], "claims": ["styles"]}}
    deployment = deployment_of(spec)
    container = pod(deployment, template_of(deployment, default_image="i"), index=0, incarnation=0)["spec"]["containers"][0]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    places = [one.partition("=")[2] for one in container["args"] if "=/" in one and not one.startswith("--model=")]
    assert "/etc/diffusion/api-key/k" in places
    assert [place for place in places if not any(f"{one}/".startswith(f"{place}/") or place.startswith(f"{one}/") for one in mounts)] == []


def test_the_worker_accepts_the_options_of_a_check_pod_which_has_none_of_the_places_that_they_name(tmp_path: Path) -> None:
    spec = {"model": {"source": {"pvc": {"claimName": "c", "path": "m"}}}, "service": {"apiKeySecret": {"name": "keys"}}}
    deployment = deployment_of(spec | {"parallelism": {"ranksPerReplica": 2}, "lora": {"claims": ["adapters"]}})
    made = check_pod(deployment, template_of(deployment, default_image="i"), nodes=("node",))
    (container,) = made["spec"]["containers"]
    program = [sys.executable, "-c", "from diffusion_worker.program import main; main()", *container["args"]]
    environment = {one["name"]: one.get("value", "uid") for one in container["env"]}
    ended = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_worker_reads_the_device_from_the_environment_of_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployment_of({})
    container = pod(deployment, template_of(deployment, default_image="i"), index=0, incarnation=0)["spec"]["containers"][0]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "of the pod"))
    assert config_of_arguments(container["args"]).device is config.Device.CUDA


def test_the_worker_reads_the_bounds_of_its_queue_from_the_environment_of_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"maxQueued": 7, "maxQueuedSeconds": 60, "maxQueuedBytes": 1000, "maxConnections": 9}
    for spec, queue, connections in (
        ({"requests": {"limits": limits}}, config.QueueLimits(7, 60.0, 1000), 9),
        ({}, config.QueueLimits(), config.WorkerConfig(model="m", served_name="m").max_connections),
    ):
        deployment = deployment_of(spec)
        container = pod(deployment, template_of(deployment, default_image="i"), index=0, incarnation=0)["spec"]["containers"][0]
        names = {one["name"] for one in container["env"] if "MAX_" in one["name"]}
        assert len(names) == (4 if spec else 0)  # an upgrade changes no pod, and an older container image ignores them
        with monkeypatch.context() as own:
            for variable in container["env"]:
                own.setenv(variable["name"], variable.get("value", "of the pod"))
            found = config_of_arguments(container["args"])
        assert (found.queue, found.max_connections) == (queue, connections)


def test_a_pipeline_of_ones_own_is_named_by_its_import_path() -> None:
    found = config_of({"model": {"pipeline": "my.package:Pipeline"}, "engine": {"loadFormat": "CustomPipeline"}})
    assert (found.pipeline, found.load_format) == ("my.package:Pipeline", config.LoadFormat.CUSTOM_PIPELINE)


def test_without_a_warm_up_its_steps_and_sizes_say_nothing() -> None:
    found = config_of({"startup": {"warmup": {"enabled": False, "steps": 5, "sizes": ["64x64"]}}})
    assert (found.warmup_steps, found.warmup_sizes) == (0, [])


def test_what_has_its_default_is_no_argument_because_the_worker_has_the_same() -> None:
    named = {one.partition("=")[0] for one in arguments_of({})}
    assert not named & {"--pipeline", "--compile", "--exact", "--tensor", "--warmup-steps", "--max-pixels", "--api-key-file"}
    found, spec = config_of({}), DeploymentSpec(model=msgspec.convert({"source": SOURCE}, operator_api.Model))
    engine, parallelism = spec.engine, spec.parallelism
    assert (found.pipeline, found.batch_window_s, found.exact) == ("auto", engine.batch_window_milliseconds, engine.exact)
    assert (found.prompt_cache_size, found.vae_tiling) == (engine.prompt_cache_size, engine.vae_tiling)
    assert (found.tensor, found.sequence, found.shard) == (parallelism.tensor, parallelism.sequence, parallelism.shard)
    assert (found.warmup_steps, found.warmup_sizes) == (spec.startup.warmup.steps, list(spec.startup.warmup.sizes))
    assert (found.defaults, found.api_key_path) == (RequestDefaults(), None)
    limits = spec.requests.limits
    assert found.limits == RequestLimits(max_steps=limits.max_steps, max_pixels=limits.max_pixels, max_images=limits.max_images)
    for field, (_, _, setting) in ENUMS.items():
        ours = getattr(getattr(spec, field.partition(".")[0]), setting.removeprefix("lora_"))
        assert getattr(found, setting) == option_word(ours)


def bounds(schema: Spec, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the minimum and the maximum of each integer in a schema, each with its path. Lists are not searched; an integer without
    bounds raises KeyError."""
    for name, inner in schema.get("properties", {}).items():
        yield from bounds(inner, (*path, name))
    if schema.get("type") == "integer":
        yield path, schema["minimum"]
        yield path, schema["maximum"]


def numbers_of_the_worker() -> list[tuple[tuple[str, ...], int]]:
    crd = yaml.safe_load((REPOSITORY / "crds" / "diffusiondeployments.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    parts = {"engine", "parallelism", "lora", "startup", "requests"}
    return [(path, number) for path, number in bounds(spec) if path[0] in parts]


@pytest.mark.parametrize(
    ("path", "number"), numbers_of_the_worker(), ids=lambda value: value if isinstance(value, int) else ".".join(value)
)
def test_the_bounds_of_a_number_are_within_the_workers(path: tuple[str, ...], number: int) -> None:
    spec: Any = number
    for name in reversed(path):
        spec = {name: spec}
    config_of(spec)
