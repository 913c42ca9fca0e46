# SPDX-License-Identifier: Apache-2.0
"""The schedule that an adapter's recipe asks for: its own sigmas, or another shift of a flow scheduler.

Both apply to the request alone. A scheduler that cannot follow them is reported before the request runs: a recipe without effect makes
images that look like a bad adapter.
"""

import copy
import inspect
from typing import Any

from diffusion_worker.errors import refused

# Schedulers' names for their shift, and the setting without which they ignore it.
SHIFTS: dict[str, str | None] = {"shift": None, "flow_shift": "use_flow_sigmas"}
DYNAMIC = "use_dynamic_shifting"


def check_sigmas(scheduler: Any, sigmas: list[float], *, steps: int | None) -> None:
    """Refuse sigmas that `set_timesteps` has no argument for, or whose number contradicts `steps`; None leaves that to the sigmas.

    Raises:
        RequestError: InvalidRequest that names sigmas or num_inference_steps.
    """
    if scheduler is None or "sigmas" not in inspect.signature(scheduler.set_timesteps).parameters:
        raise refused("sigmas", "a scheduler that takes them", "none" if scheduler is None else type(scheduler).__name__)
    count = len(sigmas)
    if steps not in (None, count):
        raise refused("num_inference_steps", f"{count}, the number of the adapter's sigmas", steps)


def check_shift(scheduler: Any) -> None:
    """Refuse a shift for a scheduler that would ignore it, as its configuration has none in use; raise RequestError (InvalidRequest)."""
    if _setting_of(scheduler) is None:
        raise refused("shift", "a flow scheduler that uses it", type(scheduler).__name__)


def own_scheduler(scheduler: Any, shift: float | None) -> Any:
    """Return a request's own scheduler: a deep copy, or a new one with another shift if one is given and the scheduler uses any.

    The new one is built from the configuration: a shift that is set later leaves the ends of the schedule unchanged.
    """
    setting = None if shift is None else _setting_of(scheduler)
    if setting is None:
        return copy.deepcopy(scheduler)
    changes: dict[str, Any] = {setting: shift}
    if scheduler.config.get(DYNAMIC):
        # The shift then comes from the size of the image instead.
        changes[DYNAMIC] = False
    return type(scheduler).from_config(scheduler.config, **changes)


def _setting_of(scheduler: Any) -> str | None:
    config = getattr(scheduler, "config", {})
    return next((name for name, switch in SHIFTS.items() if name in config and (switch is None or config.get(switch))), None)
