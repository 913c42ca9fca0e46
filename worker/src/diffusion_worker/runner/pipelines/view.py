# SPDX-License-Identifier: Apache-2.0
"""The pipeline as a request's fiber runs it: a view that shares the modules and owns everything that a run changes.

A view is a shallow copy, for classic and modular pipelines alike. It has a stand-in for every module, guiders of its own, and a scheduler
whose step suspends the fiber. Tokenizers, image processors and blocks keep no state between calls and are shared as they are.
"""

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import diffusers
import torch
from diffusers.guiders.guider_utils import BaseGuidance

from diffusion_worker.runner.pipelines.host_times import with_times_on_host
from diffusion_worker.runner.pipelines.schedule import own_scheduler
from diffusion_worker.runner.stepping.request_state import take_step
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule

# The scheduler of the denoising loop. A pipeline without one of this name marks the steps of all its schedulers.
MAIN_SCHEDULER = "scheduler"


def modules_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return every component that is a torch module, which requests share, by name; empty places and schedulers are left out."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def schedulers_of(pipeline: Any) -> dict[str, Any]:
    """Return the schedulers of a pipeline, by component name: every component that steps, also a custom pipeline's own."""
    return {name: part for name, part in pipeline.components.items() if hasattr(part, "step") and hasattr(part, "set_timesteps")}


def guiders_of(pipeline: Any) -> dict[str, Any]:
    """Return the components that compute guidance (subclasses of `BaseGuidance`) by name; classic pipelines have none."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, BaseGuidance)}


def hooks_models(guider: Any) -> bool:
    """Return whether a guider changes the shared model during its call, so that no other call may run meanwhile."""
    return type(guider).prepare_models is not BaseGuidance.prepare_models


def view_of(pipeline: Any, *, shift: float | None = None) -> Any:
    """Copy a pipeline for one request: stand-ins for the modules, and schedulers and guiders of its own.

    Call the copy in the request's fiber only, because stand-ins and marked steps suspend that. A `shift` replaces the flow schedulers' own.
    """
    view = copy.copy(pipeline)
    parts: dict[str, Any] = {name: SuspendingModule(name, module) for name, module in modules_of(pipeline).items()}
    schedulers = schedulers_of(pipeline)
    for name, scheduler in schedulers.items():
        own = own_scheduler(scheduler, shift)
        parts[name] = _marking(own, view) if name == MAIN_SCHEDULER or MAIN_SCHEDULER not in schedulers else own
    for name, guider in guiders_of(pipeline).items():
        parts[name] = guider.new()
    # This bypasses the pipeline's own __setattr__, which would register the parts in the shared config.
    view.__dict__.update(parts)
    kind: Any = type(pipeline)
    view.__class__ = _class_of_views(kind)
    _share_with_inner(view, {id(getattr(pipeline, name)): part for name, part in parts.items()})
    return view


def compute_on(pipeline: Any, device: torch.device) -> None:
    """Fix the device that views of an offloaded pipeline report, because between calls its weights are elsewhere."""
    vars(pipeline)["_device_of_view"] = device


@functools.cache
def _class_of_views(kind: Any) -> Any:
    """Return a subclass of a pipeline class for views, which looks the device up once.

    Diffusers walks over all modules whenever it asks for the device, several times a request.
    """

    def device(self: Any) -> torch.device:
        weights = (weight for part in modules_of(self).values() for weight in part.parameters())
        return next((weight.device for weight in weights), torch.device("cpu"))

    def remembered(self: Any) -> torch.device:
        if "_device_of_view" not in self.__dict__:
            self.__dict__["_device_of_view"] = device(self)
        return self.__dict__["_device_of_view"]  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"_execution_device": property(remembered), "__module__": kind.__module__})


def _share_with_inner(view: Any, parts: dict[int, Any]) -> None:
    """Give copies of the pipelines inside a combined one the view's parts.

    They hold the same modules by other names. `parts` is by the id of the real part.
    """
    for name, inner in vars(view).items():
        if isinstance(inner, diffusers.DiffusionPipeline):
            copied = copy.copy(inner)
            copied.__dict__.update({key: parts[id(part)] for key, part in inner.components.items() if id(part) in parts})
            view.__dict__[name] = copied


def guide(view: Any, scale: float) -> bool:
    """Give every guider of a view this scale; return False if none takes a scale."""
    guiders = {name: guider for name, guider in guiders_of(view).items() if "guidance_scale" in guider.config}
    for name, guider in guiders.items():
        view.__dict__[name] = guider.new(guidance_scale=scale)
    return bool(guiders)


def silence(pipeline: Any) -> None:
    """Disable the progress bar of a pipeline, and those that nested blocks of a modular one have of their own."""
    pipeline.set_progress_bar_config(disable=True)
    for block in _blocks_of(getattr(pipeline, "_blocks", None)):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)


def _blocks_of(block: Any) -> Iterator[Any]:
    for inner in (getattr(block, "sub_blocks", None) or {}).values():
        yield inner
        yield from _blocks_of(inner)


def _marking(scheduler: Any, view: Any) -> Any:
    """Wrap the `step` of a scheduler so that the fiber can be suspended after each, and return the same scheduler.

    The wrapper is bound to the instance, so `deepcopy` binds the copy's to the copy. LTX 2 (sound) and SkyReels V2 (frames) step such
    copies. The scheduler keeps its type, which Bria checks.
    """
    plain: Any = type(scheduler)
    plain_step = with_times_on_host(plain.step)

    @functools.wraps(plain.step)  # pipelines look at its signature
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return take_step(plain_step, self, args, kwargs, lambda: steps_of(view, self))

    scheduler.step = types.MethodType(step, scheduler)
    return scheduler


def steps_of(view: Any, scheduler: Any) -> int | None:
    """Return the number of steps of the loop that steps this scheduler; None if neither the pipeline nor the scheduler has one.

    It is the pipeline's own count, or else that of the scheduler's time steps from its first one on.
    """
    inner = (part for part in vars(view).values() if isinstance(part, diffusers.DiffusionPipeline))
    for pipeline in (view, *inner):
        counted = vars(pipeline).get("_num_timesteps")
        if isinstance(counted, int) and any(part is scheduler for part in vars(pipeline).values()):
            return counted
    timesteps = getattr(scheduler, "timesteps", None)
    return None if timesteps is None else len(timesteps) - (getattr(scheduler, "begin_index", None) or 0)
