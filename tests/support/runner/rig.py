# SPDX-License-Identifier: Apache-2.0
"""A model runner in the test's own process, at one rank and without a process group, on the digits model.

Real: the runner and the model. Not real: the process group, which is `OneRank`, and the server's ticks, which `RunnerRig.run` makes. After
each run all attributes of the pipeline's modules must be what they were.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from typing import Any

import msgspec
import numpy as np
import torch

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import RequestError
from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.messages import ErrorReport, ModelInfo, RequestSpec, Tick
from diffusion_worker.runner.model_call.call import ModelCall, merge
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel.rows import CallFailed, kinds_of
from diffusion_worker.runner.pipelines.view import modules_of
from diffusion_worker.runner.stepping.pixels import pixels_of
from diffusion_worker.runner.stepping.stepper import report_of
from support.worker.process import DIGITS_MODEL

# Attributes that models keep from their calls. VAEs of diffusers reset theirs at each call. Models of transformers add hooks at
# the first call, which return hidden states.
KEPT_BY_CALLS = {
    *("_feat_map", "_conv_idx", "_conv_num", "_enc_feat_map", "_enc_conv_idx", "_enc_conv_num"),
    "_output_capturing_hooks_installed",
    # Tables of positions, made at the first call of a size.
    *("_freqs_cache", "inv_freq"),
}
CAPTURING = "output_capturing_hook"
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, tuple)
Images = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]


class OneRank:
    """A stand-in for `Parallel` at one rank. `before` gets each call first, and may raise.

    It records calls and failures. The runner repeats failed calls one by one, which would hide the failures.
    """

    world = 1

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.failures: list[CallFailed] = []
        self.before: Callable[[ModelCall], None] = lambda call: None

    def run(self, calls: list[ModelCall], execute: Callable[[ModelCall, slice], Any]) -> Any:
        try:
            call = merge(calls)
            self.calls.append(call)
            self.before(call)
            return execute(call, slice(0, call.rows))
        except Exception as error:
            self.failures.append(CallFailed(str(error), error if isinstance(error, RequestError) else None, kinds=kinds_of(error)))
            raise self.failures[-1] from error


class RunnerRig:
    """A loaded runner, on the CPU by default, with a method that runs whole requests on it."""

    def __init__(self, *, device: torch.device | None = None, **config: Any) -> None:
        torch.set_num_threads(1)
        self.parallel = OneRank()
        self.config = WorkerConfig(**{"model": str(DIGITS_MODEL), "served_name": "digits"} | config)
        self.runner = DiffusionModelRunner(self.config, device or torch.device("cpu"), self.parallel)  # type: ignore[arg-type]
        # Requests of the last run that were repeated as `whole`, with the reason.
        self.replays: dict[str, str] = {}
        self.progress: list[tuple[int, int]] = []
        self.model: ModelInfo = self.runner.load_model(lambda done, total: self.progress.append((done, total)))

    def run(
        self, *requests: RequestSpec, joining: list[int] | None = None, running: int = 0, frames: Mapping[str, list[bytes]] = {}
    ) -> tuple[Images, dict[str, ErrorReport]]:
        """Run `requests`, along with `running` earlier ones, until all have ended; return images and errors by request id.

        `joining` is the tick at which each request joins, the first one by default. `frames` maps request ids to images. A request that
        needs the model alone is sent once more, as by the server.

        Raises:
            AssertionError: an attribute of a module has changed, or a request has not ended after 1000 ticks.
        """
        self.parallel.calls.clear()
        self.replays.clear()
        modules = modules_of(self.runner.pipeline)
        before = attributes_of(modules)
        at = joining or [0] * len(requests)
        images: Images = {}
        errors: dict[str, ErrorReport] = {}
        join: list[RequestSpec] = []
        for number in range(1000):
            join += [spec for spec, first in zip(requests, at, strict=True) if first == number]
            sent = [frames.get(spec.request_id, []) for spec in join]
            tick = Tick(number, join, frames=list(map(len, sent)))
            output = self.runner.execute_stepwise(tick, [frame for each in sent for frame in each])
            errors |= output.errors
            self.replays |= output.replays
            join = [msgspec.structs.replace(spec, whole=True) for spec in requests if spec.request_id in output.replays]
            for name, returned in output.images.items():
                try:
                    images[name] = pixels_of(returned)
                except RequestError as error:  # like the rank's output
                    errors[name] = report_of(error, asked=True)
            if len(images) + len(errors) == len(requests) + running:
                assert not (changed := changes_of(before, attributes_of(modules))), changed
                return images, errors
        raise AssertionError(f"after 1000 ticks only {sorted(images)} are done")

    def denoiser_calls(self) -> list[ModelCall]:
        """Return the transformer's calls of the latest run, each with the rows that were merged into it."""
        return [call for call in self.parallel.calls if call.component == "transformer"]


def runner_with(
    pipeline: Any, parallel: Any, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None, **config: Any
) -> DiffusionModelRunner:
    """Make a runner and let it adopt a pipeline that was built here, so no files are read. Defaults: float32, the CPU; `config`
    overrides worker settings."""
    settings = WorkerConfig(**{"model": "(in memory)", "served_name": "tiny"} | config)
    runner = DiffusionModelRunner(settings, device or torch.device("cpu"), parallel)
    runner.adopt(pipeline, dtype, lambda done, total: None)
    return runner


def request(name: str, **fields: Any) -> RequestSpec:
    """Return a request for an image of 32 by 32 pixels in 3 steps with seed 1; any field of `RequestSpec` may be overridden."""
    return RequestSpec(**{"request_id": name, "prompt": "a red digit seven", "seed": 1, "height": 32, "width": 32, "steps": 3} | fields)


def image_of_diffusers(pipeline: Any, spec: RequestSpec) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Run a request directly through the diffusers pipeline, with a CPU generator seeded by `spec.seed`. Return the pixels as uint8,
    height by width by 3."""
    fields = ("height", "width", "guidance_scale", "negative_prompt")
    given = {name: getattr(spec, name) for name in fields} | {"num_inference_steps": spec.steps}
    given = {name: value for name, value in given.items() if value is not None}
    image = pipeline(spec.prompt, generator=torch.Generator().manual_seed(spec.seed), output_type="np", **given).images[0]
    return np.asarray((image * 255).round(), np.uint8)


def levels_apart(one: Any, other: Any) -> int:
    """Return the largest absolute difference in any channel of any pixel, 0 to 255. Both are arrays or images of the same shape."""
    return int(np.abs(np.asarray(one, int) - np.asarray(other, int)).max())


def attributes_of(modules: dict[str, torch.nn.Module]) -> dict[str, Any]:
    """Return all attributes by path: plain values as they are, other objects by identity, and items of dicts, lists and sets one by one."""
    found: dict[str, Any] = {}
    for name, module in modules.items():
        for path, part in module.named_modules(prefix=name):
            found |= {f"{path}.{key}": value for key, value in _flat(vars(part).items())}
    return found


def changes_of(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the attributes that differ from before, except those that calls keep and the layers that the engine put in for adapters."""
    wrapped = [path for path, value in now.items() if isinstance(value, LoRALayer)]
    places = tuple(path.replace("._modules.", ".") for path in wrapped)
    return [
        f"{path}: {old!r:.80} became {new!r:.80}"
        for path in sorted(before.keys() | now.keys())
        if not _same(old := before.get(path, MISSING), new := now.get(path, MISSING))
        and not (path in wrapped or path.startswith(places) or KEPT_BY_CALLS & set(path.split(".")))
    ]


def _flat(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[str, Any]]:
    for key, value in items:
        if type(value) in (dict, OrderedDict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items() if getattr(item, "__name__", "") != CAPTURING)
        elif type(value) in (list, set):
            yield key, tuple(value)
        else:
            yield key, value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(a is b or (isinstance(a, PLAIN) and a == b) for a, b in zip(one, other, strict=True))
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))
