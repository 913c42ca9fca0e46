# SPDX-License-Identifier: Apache-2.0
"""Time steps as numbers of the host while a scheduler takes a step.

Pipelines keep the time steps on the accelerator, for the model. Many schedulers look up their tables by them (DDIM, DDPM, LCM), and would
wait each time until the accelerator has done all work before. So the times are copied to the host once a request. A step gets the host's
number of the time that it was asked for, and computes the same with it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from diffusion_worker.runner.families import looks_up_times

# The attribute of a scheduler for the times on the accelerator and their copy on the host. A copy of the scheduler has both.
_KEPT = "times_on_host"
Step = Callable[..., Any]


def with_times_on_host(step: Step) -> Step:
    """Return a scheduler's step that does its work with times on the host.

    The times have to be on an accelerator, and the time of this step one of them. Otherwise, and for schedulers that do not look up their
    tables by it, the step does as before.
    """

    @functools.wraps(step)
    def stepped(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        given = _place_of_time(args, kwargs)
        time = None if given is None else (args[given] if isinstance(given, int) else kwargs[given])
        times: Any = getattr(scheduler, "timesteps", None)
        place = _index_in(times, time)
        if place is None or not looks_up_times(type(scheduler)):
            return step(scheduler, *args, **kwargs)
        here = _on_host(scheduler, times)
        if isinstance(given, int):
            args = (*args[:given], here[place], *args[given + 1 :])
        else:
            kwargs = kwargs | {"timestep": here[place]}
        scheduler.timesteps = here
        try:
            return step(scheduler, *args, **kwargs)
        finally:
            if scheduler.timesteps is here:
                scheduler.timesteps = times

    return stepped


def _place_of_time(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Return the place of the time among a step's arguments; it comes after the model's output in every scheduler of diffusers."""
    if "timestep" in kwargs:
        return "timestep"
    return 1 if len(args) > 1 else None


def _index_in(times: Any, time: Any) -> int | None:
    """Return the index of a time that is a view of one of `times` on an accelerator, by its address; otherwise None."""
    if not isinstance(times, torch.Tensor) or not isinstance(time, torch.Tensor):
        return None
    if times.device.type == "cpu" or times.dim() != 1 or not times.is_contiguous() or time.dim() != 0 or time.dtype != times.dtype:
        return None
    offset = time.data_ptr() - times.data_ptr()
    return offset // times.element_size() if 0 <= offset < times.numel() * times.element_size() else None


def _on_host(scheduler: Any, times: torch.Tensor) -> torch.Tensor:
    """Return the copy of these times on the host; the first call of a request makes it."""
    kept = vars(scheduler).get(_KEPT)
    if kept is None or kept[0] is not times:
        kept = vars(scheduler)[_KEPT] = times, times.cpu()
    here: torch.Tensor = kept[1]
    return here
