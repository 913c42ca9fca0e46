# SPDX-License-Identifier: Apache-2.0
"""The body of a request's fiber: the arguments of the pipeline's own call, that call on a view, and its result as pixels.

A pipeline's signature (a modular one's block inputs) lists its arguments. A request that asks for more is refused with the field's name.
Custom pipelines may say more, see `docs/custom-pipelines.md`.
"""

import functools
import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import diffusers
import numpy as np
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner.families import pipeline_record
from diffusion_worker.runner.pipelines.diffusers_workarounds import mend
from diffusion_worker.runner.pipelines.schedule import check_shift, check_sigmas
from diffusion_worker.runner.pipelines.step_support import why_exclusive
from diffusion_worker.runner.pipelines.view import MAIN_SCHEDULER, guide, guiders_of, hooks_models, modules_of, view_of
from diffusion_worker.runner.stepping.pixels import RawImage, keep_on_device

Arguments = dict[str, Any]

FRAMES = ("num_frames", "video_length", "frames")
# Guidance with a second, unguided call. If a class has both scales, this one works on every checkpoint of it.
TRUE_GUIDANCE = "true_cfg_scale"
# The models' authors use this for "no negative prompt"; without one their classes ignore the scale.
NO_NEGATIVE_PROMPT = " "


class PipelineBody:
    """A callable that runs the pipeline once, and returns its image or the frames of a video as a `RawImage`.

    Requests of different `batch_key` never share a model call. A `whole` one has the model for itself from its first step to its end, and
    no other request advances meanwhile. `shares` is False where the class's record has a reason why its changes are harmless, so that no
    check looks for them.
    """

    def __init__(
        self,
        pipeline: Any,
        arguments: Arguments,
        *,
        seed: int,
        guidance: float | None = None,
        shift: float | None = None,
        whole: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._shift = shift
        self._arguments = arguments
        self._seed = seed
        self._guidance = guidance
        self.batch_key: Hashable = _ask(pipeline, "worker_batch_key", arguments)
        self.shares = not pipeline_record(_type(pipeline)).harmless
        self.whole = (
            whole
            or bool(_ask(pipeline, "worker_runs_whole", arguments))
            or why_exclusive(_type(pipeline)) is not None
            or any(map(hooks_models, guiders_of(pipeline).values()))
        )

    def __call__(self) -> RawImage:
        view = view_of(self._pipeline, shift=self._shift)
        keep_on_device(view)
        mend(view)
        if self._guidance is not None:
            guide(view, self._guidance)
        # The generator is a CPU one: the same seed gives the same noise on every device and rank.
        generator = torch.Generator().manual_seed(self._seed)
        try:
            return RawImage(call_view(view, self._arguments | {"generator": generator, "output_type": "np"}))
        finally:
            if self.whole:
                _unhook(self._pipeline, view)

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the real modules behind the stand-ins by name, so that changes by a request can be found and undone."""
        return modules_of(self._pipeline)


def make_body(pipeline: Any, spec: RequestSpec, *, conditioning: Mapping[str, Any] | None = None) -> PipelineBody:
    """Translate a request into keyword arguments of the pipeline's call, and return a body that makes this call once.

    `conditioning` has further arguments by name, such as images; fields that the request leaves None are not passed.

    Raises:
        RequestError: InvalidRequest, the class does not take a field or would ignore it (the details name it), or a custom class refuses
            the request. RequestFailed, a custom class's own method failed.
    """
    takes = inputs_of(pipeline)
    arguments = {name: value for name, value in _fields(takes, spec).items() if value is not None}
    guidance = None
    if spec.guidance_scale is not None:
        guidance = _guide_by_argument(takes, arguments, spec.guidance_scale, pipeline)
    for name, value in (conditioning or {}).items():
        if name not in takes:
            raise _not_taken(name, pipeline)
        arguments[name] = value
    for name in arguments:
        if name not in takes:
            raise _not_taken(name, pipeline)
    _check_negative_prompt(takes, arguments, pipeline)
    _check_schedule(spec, pipeline)
    return PipelineBody(pipeline, arguments, seed=spec.seed, guidance=guidance, shift=spec.shift, whole=spec.whole)


def call_view(view: Any, arguments: Arguments) -> Any:
    """Call a view's pipeline, classic or modular; return the first of its results."""
    takes = inputs_of(view)
    # A pipeline that draws no noise takes no generator, one that only makes latents no output type.
    given = {name: value for name, value in arguments.items() if name in takes or name not in ("generator", "output_type")}
    if isinstance(view, diffusers.ModularPipeline):
        return view(**given, output=first_output(view))
    made = view(**given, **({"return_dict": False} if "return_dict" in takes else {}))
    # Outputs and tuples have the result first; Stable Video Diffusion returns its frames as they are.
    return made if isinstance(made, np.ndarray | torch.Tensor | list) else made[0]


def inputs_of(pipeline: Any) -> Mapping[str, Any]:
    """Return the arguments of the pipeline's call, with their defaults (None if there is none)."""
    return _inputs_of_blocks(pipeline._blocks) if isinstance(pipeline, diffusers.ModularPipeline) else _inputs_of_call(_type(pipeline))


# Cached, because a modular pipeline asks all its blocks each time.
@functools.lru_cache(maxsize=8)
def _inputs_of_blocks(blocks: Any) -> Mapping[str, Any]:
    return {item.name: item.default for item in blocks.inputs if item.name is not None}


@functools.cache
def _inputs_of_call(kind: Any) -> Mapping[str, Any]:
    """Return the arguments of a class's call; if it passes on `**kwargs`, also those of the class it extends."""
    found: Arguments = {}
    for call in (vars(parent)["__call__"] for parent in kind.__mro__ if "__call__" in vars(parent)):
        items = list(inspect.signature(call).parameters.values())[1:]
        named = [item for item in items if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        found = {item.name: None if item.default is item.empty else item.default for item in named} | found
        if len(named) == len(items):
            break
    return found


def _type(pipeline: Any) -> Any:
    return type(pipeline)


def first_output(pipeline: Any) -> str:
    """Return the name of a modular pipeline's main output: its images or videos, or else the first output of its last block."""
    names = [output.name for output in pipeline._blocks.outputs]
    return next((name for name in ("images", "videos") if name in names), names[0])


def _fields(takes: Mapping[str, Any], spec: RequestSpec) -> Arguments:
    frames = next((name for name in FRAMES if name in takes), FRAMES[0])
    return {
        "prompt": spec.prompt,
        "negative_prompt": spec.negative_prompt,
        "height": spec.height,
        "width": spec.width,
        # Kontext makes this number of pixels, whatever the size.
        "max_area": spec.height * spec.width if "max_area" in takes and spec.height and spec.width else None,
        frames: spec.frames,
        "num_inference_steps": spec.steps or (len(spec.sigmas) if spec.sigmas else None),
        "sigmas": spec.sigmas,
    }


def _check_schedule(spec: RequestSpec, pipeline: Any) -> None:
    """Raise RequestError where the denoising loop's scheduler cannot follow the schedule of the adapter's recipe."""
    scheduler = pipeline.components.get(MAIN_SCHEDULER)
    if spec.sigmas is not None:
        check_sigmas(scheduler, spec.sigmas, steps=spec.steps)
    if spec.shift is not None:
        check_shift(scheduler)


def _guide_by_argument(takes: Mapping[str, Any], arguments: Arguments, scale: float, pipeline: Any) -> float | None:
    """Put the guidance scale into the argument that the class has for it and return None, or return it for a modular pipeline's guiders.

    With `true_cfg_scale` and a scale above 1, a blank negative prompt is added unless there is one. A class without guidance raises
    RequestError.
    """
    if _guides_truly(takes):
        arguments[TRUE_GUIDANCE] = scale
        if scale > 1 and "negative_prompt" in takes:
            arguments.setdefault("negative_prompt", NO_NEGATIVE_PROMPT)
    elif "guidance_scale" in takes:
        arguments["guidance_scale"] = scale
    elif any("guidance_scale" in guider.config for guider in guiders_of(pipeline).values()):
        return scale
    else:
        raise _not_taken("guidance_scale", pipeline)
    return None


def _guides_truly(takes: Mapping[str, Any]) -> bool:
    """Return whether the class guides by a second, unguided call: the default of its `true_cfg_scale` is above that of `guidance_scale`."""
    return TRUE_GUIDANCE in takes and (takes[TRUE_GUIDANCE] or 0) > (takes.get("guidance_scale") or 0)


def default_guidance(pipeline: Any) -> float | None:
    """Return the guidance scale that the class itself uses if a request gives none; None if it has none.

    A class that guides by a second, unguided call counts as having none, because it does so only with a negative prompt.
    """
    takes = inputs_of(pipeline)
    if _guides_truly(takes):
        return None
    scales = [takes.get("guidance_scale"), *(guider.config.get("guidance_scale") for guider in guiders_of(pipeline).values())]
    return next((float(scale) for scale in scales if isinstance(scale, int | float)), None)


def _check_negative_prompt(takes: Mapping[str, Any], arguments: Arguments, pipeline: Any) -> None:
    """Refuse a negative prompt that the class would take and ignore, because its second call is off by default (Flux)."""
    if not arguments.get("negative_prompt") or TRUE_GUIDANCE not in takes or hasattr(type(pipeline), "do_classifier_free_guidance"):
        return
    if (arguments.get(TRUE_GUIDANCE, takes[TRUE_GUIDANCE]) or 0) <= 1:
        cure = "unless guidance_scale is above 1" if _guides_truly(takes) else "in every request"
        message = f"negative_prompt: {type(pipeline).__name__} ignores one {cure}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, details={"field": "negative_prompt"})


FIELD_OF = {"height": "size", "width": "size", **dict.fromkeys(FRAMES, "frames")}


def _not_taken(argument: str, pipeline: Any) -> RequestError:
    field = FIELD_OF.get(argument, argument)
    return RequestError(ErrorCode.INVALID_REQUEST, f"{field}: {type(pipeline).__name__} takes no such argument", details={"field": field})


def _ask(pipeline: Any, method: str, arguments: Arguments) -> Any:
    """Call a custom pipeline's method with the arguments of a request, and return its answer; None if the class has no such method.

    A ValueError from it becomes a RequestError with InvalidRequest, any other exception one with RequestFailed.
    """
    answer = getattr(type(pipeline), method, None)
    if answer is None:
        return None
    try:
        return answer(pipeline, arguments)
    except ValueError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from error
    except Exception as error:
        message = f"{type(pipeline).__name__}.{method}: {type(error).__name__}: {error}"
        raise RequestError(ErrorCode.REQUEST_FAILED, message) from error


def _unhook(pipeline: Any, view: Any) -> None:
    """Remove a guider's hooks from the model. A call that fails after the guider has set them would leave them there."""
    for guider in guiders_of(view).values():
        if hooks_models(guider):
            for module in pipeline.components.values():
                if isinstance(module, torch.nn.Module):
                    guider.cleanup_models(module)
