# SPDX-License-Identifier: Apache-2.0
"""Execution modes of pipeline classes: step by step beside other requests, whole and alone, or impossible.

The fibers need two things of a pipeline: that it steps a scheduler, and that it leaves the shared modules as they are. Stand-ins ensure the
second (`SharedPart`): a request that would change a module is run again by itself. The facts of diffusers' classes only spare a first
attempt to those that always do so. A step cache is refused for these at start, too.
"""

import importlib.util
from typing import Any

from diffusion_worker.runner.families import facts_of, pipeline_record


def missing_libraries(found: Any) -> list[str]:
    """Return the libraries that are not installed here and that diffusers needs to offer a class; empty for a class that it offers.

    Without them diffusers has only a placeholder of that name.
    """
    return [library for library in getattr(found, "_backends", ()) if importlib.util.find_spec(library) is None]


def whole_run_reason(pipeline_class: Any) -> str | None:
    """Return the reason why requests of this class do not advance by steps beside others; None if they do, or if that is not known.

    The class changes the shared model during its call, or it steps no scheduler.
    """
    facts = facts_of(pipeline_class)
    return why_exclusive(pipeline_class) or (None if facts is None or facts.steps else "steps no scheduler")


def why_exclusive(pipeline_class: Any) -> str | None:
    """Return the reason why a request of this class changes the shared model, so that no other may run meanwhile; None if it does not."""
    facts = facts_of(pipeline_class)
    return facts.changes or None if facts and not pipeline_record(pipeline_class).harmless else None


def why_impossible(pipeline_class: Any) -> str | None:
    """Return the reason on record for which a class is refused at start and as a companion; None for all others."""
    return pipeline_record(pipeline_class).impossible or None
