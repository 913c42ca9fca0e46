# SPDX-License-Identifier: Apache-2.0
"""Tasks of a loaded pipeline, and the pipeline that serves each: the loaded one, or a companion over its modules.

A companion is another class of diffusers for the same components, image to image or inpainting, as diffusers itself pairs
them. It holds the same modules, so that it costs no memory, adapters and sleep apply to it, and its requests share calls.
"""

import copy
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import diffusers
import msgspec
from diffusers.pipelines import auto_pipeline

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo, RequestSpec, Task
from diffusion_worker.runner.families import pipeline_record
from diffusion_worker.runner.pipelines.body import PipelineBody, inputs_of, make_body
from diffusion_worker.runner.pipelines.conditioning import (
    ImageInputs,
    conditioning_of,
    image_inputs,
    masked_inputs,
    strength_of,
    works_from_words,
)
from diffusion_worker.runner.pipelines.step_support import missing_libraries, why_impossible
from diffusion_worker.runner.pipelines.view import silence

log = logging.getLogger(__name__)

PAIRS = {Task.EDIT: auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING, Task.INPAINT: auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING}


class TaskPipeline(msgspec.Struct, frozen=True):
    """The pipeline of a task and its image arguments; None if the task has none."""

    pipeline: Any
    inputs: ImageInputs | None = None


class TaskPipelines:
    """The pipelines of one loaded model by task."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._servers: dict[Task, TaskPipeline] = {}
        if works_from_words(pipeline):
            self._servers[Task.GENERATE] = TaskPipeline(pipeline)
        for inputs in (image_inputs(pipeline), masked_inputs(pipeline)):
            if inputs is not None:
                self._servers[inputs.task] = TaskPipeline(pipeline, inputs)
        # A class that starts from an image and noise was chosen for that task. For other classes diffusers may have companions.
        if "strength" not in inputs_of(pipeline):
            self._add_companions(pipeline)

    @property
    def served(self) -> list[Task]:
        """All tasks with a pipeline here, sorted as `Task` declares them; empty for a class that needs other inputs."""
        return [task for task in Task if task in self._servers]

    def pipeline_of(self, task: Task) -> Any:
        """Look up the loaded pipeline or companion for a task; raise KeyError for a task that is not in `served`."""
        return self._servers[task].pipeline

    def describe(self, info: ModelInfo) -> ModelInfo:
        """Return the description with the tasks and the most input images of an edit added.

        `references` is True if some task has input images that the model processes beside the output, so that each costs as much as the
        output.
        """
        inputs = [server.inputs for server in self._servers.values() if server.inputs is not None]
        most = max((each.most for each in inputs), default=0)
        return msgspec.structs.replace(
            info, tasks=self.served, max_input_images=most, references=any(not each.fitted or each.more is not None for each in inputs)
        )

    def body(self, spec: RequestSpec, frames: Sequence[bytes] = ()) -> PipelineBody:
        """Build the call that a request needs, on the loaded pipeline or the companion for the task; `frames` hold the images' pixels.

        A request with images gets the loaded class's defaults for steps and guidance that it leaves open.

        Raises:
            RequestError: InvalidRequest, nothing serves the task, or a field or the number of images does not fit.
        """
        server = self._servers.get(spec.task)
        if server is None:
            pipeline, served = type(self._pipeline).__name__, " and ".join(self.served) or "nothing"
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"model: expected a pipeline that serves {spec.task}, found {pipeline}, which serves {served}"
            )
        if server.inputs is None:
            return make_body(server.pipeline, spec)
        takes, loaded = inputs_of(server.pipeline), inputs_of(self._pipeline)
        # Values that a request leaves open follow the loaded class, to match the model's card and the answer's provenance.
        steps = spec.steps or (len(spec.sigmas) if spec.sigmas else loaded.get("num_inference_steps"))
        spec = msgspec.structs.replace(spec, steps=steps)
        conditioning = conditioning_of(server.inputs, spec, frames)
        if (strength := strength_of(server.pipeline, spec)) is not None:
            conditioning["strength"] = strength
        if spec.guidance_scale is None and "guidance_scale" in takes and loaded.get("guidance_scale") is not None:
            conditioning["guidance_scale"] = loaded["guidance_scale"]
        if server.inputs.fitted and "height" not in takes:
            # The class makes an image of its first image's size, which is the requested one by now.
            spec = msgspec.structs.replace(spec, height=None, width=None)
        return make_body(server.pipeline, spec, conditioning=conditioning)

    def _add_companions(self, pipeline: Any) -> None:
        for task in (Task.EDIT, Task.INPAINT):
            kind = None if task in self._servers else _paired_class(type(pipeline), task)
            if kind is None or (companion := _made_of(kind, pipeline)) is None:
                continue
            inputs = image_inputs(companion)
            if inputs is not None and inputs.task is task:
                self._servers[task] = TaskPipeline(companion, inputs)


def _paired_class(pipeline_class: Any, task: Task) -> Any:
    """Look up diffusers' sibling of a pipeline class for edits or inpainting, in the class's record, then in the lists of auto pipelines.

    None if they have no sibling for the task.
    """
    name, record = pipeline_class.__name__, pipeline_record(pipeline_class)
    more = record.edits_by if task is Task.EDIT else record.inpaints_by
    # Not of a class that it extends: the companion would lack all that this one adds.
    if more and record.name == name:
        return getattr(diffusers, more, None)
    for mapping in (auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, *PAIRS.values()):
        for family, kind in mapping.items():
            if kind.__name__ == name:
                return PAIRS[task].get(family)
    return None


def _made_of(kind: Any, pipeline: Any) -> Any:
    """Make a pipeline of a class from the components of another; return None where they do not fit it."""
    if missing_libraries(kind) or why_impossible(kind):
        return None
    modules, options = kind._get_signature_keys(kind)
    parts = {name: pipeline.components.get(name) for name in modules}
    # Some classes change the configuration of a scheduler that they are given, which has to stay as it is for the loaded one.
    parts |= {name: copy.deepcopy(part) for name, part in parts.items() if hasattr(part, "set_timesteps")}
    # Companions also go without the components that the loaded class lacks (the third text encoder of Stable Diffusion 3).
    if any(name not in pipeline.components and name not in kind._optional_components for name in modules) or not _fit(kind, parts):
        return None
    config = pipeline.config
    settings = {name: config[key] for name in options for key in (name, f"_{name}") if key in config}
    try:
        with warnings.catch_warnings():
            # The loaded class has already warned about old settings.
            warnings.simplefilter("ignore", FutureWarning)
            made = kind(**parts, **settings)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        log.warning(
            "the task of %s is not served, as it cannot be made of the components of %s: %s", kind.__name__, type(pipeline).__name__, error
        )
        return None
    silence(made)
    return made


def _fit(kind: Any, parts: dict[str, Any]) -> bool:
    """Return whether the class can use these weights; it would report that itself only after the first model call."""
    masked = pipeline_record(kind).masked_channels
    return not masked or parts["transformer"].config.in_channels in (masked, parts["vae"].config.latent_channels)
