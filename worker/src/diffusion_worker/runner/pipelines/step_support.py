# SPDX-License-Identifier: Apache-2.0
"""Execution modes of pipeline classes, read from their source: step by step beside other requests, whole and alone, or impossible.

The fibers need two things of a pipeline: that it steps a scheduler, and that it leaves the shared modules as they are. Stand-ins ensure the
second (`SharedPart`): a request that would change a module is run again by itself. The words searched for here only spare a first
attempt to the classes of diffusers that always do so. A step cache is refused for these at start, too.
"""

import functools
import importlib.util
import inspect
import linecache
import re
from collections.abc import Iterator
from typing import Any

import diffusers

from diffusion_worker.runner.families import pipeline_record

STEPS = re.compile(r"scheduler\w*(?:\[\w+\])?\.step\(|\.step\(\s*(?:noise_pred|model_output)")
CHANGES = {
    "set_attn_processor(": "swaps the model's attention processors during its call",
    "register_forward_hook(": "hooks a model during its call",
    "enable_fuser(": "switches layers of the model during its call",
}
# Methods that are no part of a call, or that only users of the class call.
NO_PART_OF_A_CALL = frozenset({"__init__", "invert"})


def missing_libraries(found: Any) -> list[str]:
    """Return the libraries that are not installed here and that diffusers needs to offer a class; empty for a class that it offers.

    Without them diffusers has only a placeholder of that name.
    """
    return [library for library in getattr(found, "_backends", ()) if importlib.util.find_spec(library) is None]


@functools.cache
def whole_run_reason(pipeline_class: Any) -> str | None:
    """Return the reason, from the source, why requests of this class do not advance by steps beside others; None if they do.

    The class changes the shared model during its call, or it steps no scheduler.
    """
    changes = why_exclusive(pipeline_class)
    if changes:
        return changes
    source = "\n".join(_sources(pipeline_class))
    return None if STEPS.search(source) else "steps no scheduler"


@functools.cache
def why_exclusive(pipeline_class: Any) -> str | None:
    """Return the reason why a request of this class changes the shared model, so that no other may run meanwhile; None if it does not."""
    if pipeline_record(pipeline_class).harmless:
        return None
    source = "\n".join(_sources(pipeline_class))
    return next((why for word, why in CHANGES.items() if word in source), None)


def why_impossible(pipeline_class: Any) -> str | None:
    """Return the reason on record for which a class is refused at start and as a companion; None for all others."""
    return pipeline_record(pipeline_class).impossible or None


def _sources(pipeline_class: Any) -> Iterator[str]:
    """Yield the text of every function that may run during a call, except `__init__` and `invert`.

    A modular class has those of its default blocks. A classic one has its own, those of its bases below `DiffusionPipeline`, and those of
    inner pipelines.
    """
    if issubclass(pipeline_class, diffusers.ModularPipeline):
        name = pipeline_class.default_blocks_name
        yield from _block_sources(getattr(diffusers, name)()) if name else ()
        return
    for parent in pipeline_class.__mro__:
        if parent is diffusers.DiffusionPipeline or not issubclass(parent, diffusers.DiffusionPipeline):
            continue
        yield from _method_sources(parent)
    for part in inner_classes(pipeline_class):
        yield from _sources(part)


def inner_classes(pipeline_class: Any) -> list[Any]:
    """Find the classes that a combined pipeline instantiates, from the text of `__init__` and in its order; empty for others."""
    made_by = inspect.unwrap(pipeline_class.__init__)
    found = re.findall(r"= (\w+Pipeline)\(", source_of(made_by))
    return [made_by.__globals__[name] for name in found if name in getattr(made_by, "__globals__", {})]


def _method_sources(kind: Any) -> Iterator[str]:
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and name not in NO_PART_OF_A_CALL:
            yield source_of(method)


def _block_sources(block: Any) -> Iterator[str]:
    for parent in type(block).__mro__:
        if parent.__module__.startswith("diffusers.modular_pipelines.") and not parent.__module__.endswith("modular_pipeline"):
            yield from _method_sources(parent)
    for inner in (getattr(block, "sub_blocks", None) or {}).values():
        yield from _block_sources(inner)


@functools.cache
def source_of(found: Any) -> str:
    """Return the source of a class or function; nothing where it has none, as a class made at run time."""
    function = inspect.unwrap(found)
    if inspect.isfunction(function):
        return _function_source(function.__code__)
    try:
        return inspect.getsource(found)
    except (OSError, TypeError):
        return ""


def _function_source(code: Any) -> str:
    """Cut a function's text out of its file by indentation, from the first decorator on; empty if the file cannot be read.

    This is much cheaper than `inspect.getsource`, which tokenizes on to find the end, in files of a thousand lines.
    """
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    inside = False
    for number, line in enumerate(lines):
        outer = line.strip() and len(line) - len(line.lstrip()) <= indent
        if outer and inside and not line.lstrip().startswith((")", "#", '"')):
            return "".join(lines[:number])
        inside = inside or line.lstrip().startswith(("def ", "async def "))
    return "".join(lines)
