# SPDX-License-Identifier: Apache-2.0
"""Loads a diffusers pipeline and makes, for each request, a view of it that a fiber can run."""

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from diffusion_worker.config import Dtype, WorkerConfig, read_model_index
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo, RequestSpec
from diffusion_worker.runner.calls import StandIn
from diffusion_worker.runner.request_state import mark_step

DENOISERS = ("transformer", "unet")


def device_of(local_rank: int) -> torch.device:
    """The rank's device: the accelerator with its number, or the CPU where there is none."""
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(f"--ranks: rank {local_rank} has no GPU of its own, found {torch.cuda.device_count()}")
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def dtype_of(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The torch dtype of an option; `auto` depends on the device."""
    if dtype is Dtype.AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}[dtype]


def load_pipeline(config: WorkerConfig, dtype: torch.dtype) -> Any:
    """The pipeline of the model folder, from safetensors only, in host memory.

    Raises:
        ConfigError: no such pipeline class, or diffusers cannot make it from this folder.
    """
    index = read_model_index(config.model)
    name = index["_class_name"] if config.pipeline == "auto" else config.pipeline
    pipeline_class: Any = getattr(diffusers, str(name), None)
    if not _is_pipeline(pipeline_class):
        raise ConfigError(f"model {config.model!r}: {name!r} is no pipeline of diffusers {diffusers.__version__}")
    diffusers.logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    # Optional components are [null, null] in the index; the classes want them passed.
    absent = {key: None for key, value in index.items() if value == [None, None]}
    try:
        pipeline = pipeline_class.from_pretrained(config.model, dtype=dtype, use_safetensors=True, local_files_only=True, **absent)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model {config.model!r}: {name} cannot be loaded: {error}") from error
    _check_components(config, pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _check_components(config: WorkerConfig, pipeline: Any) -> None:
    """Diffusers only warns of components of another class; a pipeline chosen by name has to fit the folder."""
    expected = type(pipeline)._get_signature_types()
    for name, module in modules_of(pipeline).items():
        classes = tuple(kind for kind in expected.get(name, ()) if inspect.isclass(kind))
        if config.pipeline != "auto" and classes and not isinstance(module, classes):
            wanted = " or ".join(kind.__name__ for kind in classes)
            raise ConfigError(f"{config.pipeline}: expected {name} to be {wanted}, found {type(module).__name__} in {config.model!r}")


def _is_pipeline(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, diffusers.DiffusionPipeline)


def modules_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The shared modules of a pipeline, by component name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def denoiser_of(pipeline: Any) -> torch.nn.Module:
    """The module that adapters apply to."""
    modules = modules_of(pipeline)
    for name in DENOISERS:
        if name in modules:
            return modules[name]
    raise ConfigError(f"{type(pipeline).__name__} has none of the components {', '.join(DENOISERS)}")


def describe(pipeline: Any, dtype: torch.dtype, weights_bytes: int) -> ModelInfo:
    """What the server needs to know of the pipeline."""
    return ModelInfo(
        pipeline=type(pipeline).__name__,
        dtype=str(dtype).removeprefix("torch."),
        size_multiple=int(getattr(pipeline, "vae_scale_factor", 8)) * int(getattr(pipeline, "patch_size", 1)),
        weights_bytes=weights_bytes,
    )


def checkpoint_folder(config: WorkerConfig, component: str) -> Path:
    """Where a component's safetensors files are."""
    return Path(config.model) / component


def make_body(pipeline: Any, spec: RequestSpec) -> Callable[[], np.ndarray[Any, np.dtype[np.uint8]]]:
    """What a request's fiber runs: the pipeline's own `__call__` on a view of it.

    The generator is a CPU one: the same seed gives the same noise on every device and rank.

    Raises:
        RequestError: InvalidRequest, the pipeline takes no such argument.
    """
    view = view_of(pipeline)
    arguments = _arguments(pipeline, spec)

    def body() -> np.ndarray[Any, np.dtype[np.uint8]]:
        images = view(**arguments, generator=torch.Generator().manual_seed(spec.seed), output_type="np", return_dict=False)[0]
        return np.ascontiguousarray((images[0] * 255).round().astype(np.uint8))

    return body


def _arguments(pipeline: Any, spec: RequestSpec) -> dict[str, Any]:
    asked = {
        "prompt": spec.prompt,
        "negative_prompt": spec.negative_prompt,
        "height": spec.height,
        "width": spec.width,
        "num_inference_steps": spec.steps,
        "guidance_scale": spec.guidance_scale,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    taken = inspect.signature(type(pipeline).__call__).parameters
    if strangers := [name for name in given if name not in taken]:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{', '.join(strangers)}: {type(pipeline).__name__} takes no such argument")
    return given


def view_of(pipeline: Any) -> Any:
    """A shallow copy with stand-ins for the shared modules and a scheduler of its own; a request's fiber calls it."""
    view = copy.copy(pipeline)
    for name, module in modules_of(pipeline).items():
        # Past the pipeline's own __setattr__, which would register the stand-in in the shared config.
        view.__dict__[name] = StandIn(name, module)
    scheduler = copy.deepcopy(pipeline.scheduler)
    step = scheduler.step

    @functools.wraps(step)
    def step_and_mark(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        mark_step()
        return result

    scheduler.step = step_and_mark
    view.__dict__["scheduler"] = scheduler
    return view
