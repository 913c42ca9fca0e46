# SPDX-License-Identifier: Apache-2.0
"""Reads the facts of diffusers' pipeline classes from their source, for the worker's table of them.

`python -m tools.families` compares the table and writes it. The words searched for are the ones that diffusers writes today.
"""

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import msgspec

from diffusion_worker.runner import families
from diffusion_worker.runner.families import PipelineFacts
from diffusion_worker.runner.pipelines.description import KINDS

PAGE = Path(families.__file__).with_name("pipelines.json")
STEPS = re.compile(r"scheduler\w*(?:\[\w+\])?\.step\(|\.step\(\s*(?:noise_pred|model_output)")
CHANGES = {
    "set_attn_processor(": "swaps the model's attention processors during its call",
    "register_forward_hook(": "hooks a model during its call",
    "enable_fuser(": "switches layers of the model during its call",
}
# Methods that are no part of a call, or that only users of the class call.
NO_PART_OF_A_CALL = frozenset({"__init__", "invert"})
WITHOUT_HEIGHT = re.compile(r"^ +height = height or (\w+)$", re.MULTILINE)
SIDES = frozenset({"height", "width"})


def table() -> dict[str, PipelineFacts]:
    """Return the facts of every pipeline class of the installed diffusers, in the order of their names."""
    bases = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    exported = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")]
    kinds = {kind.__name__: kind for kind in exported if issubclass(kind, bases) and kind not in bases}
    return {name: read(kind) for name, kind in sorted(kinds.items())}


def written(facts: dict[str, PipelineFacts]) -> str:
    """Return the text of the table, a line for each class."""
    lines = [f"{json.dumps(name)}: {msgspec.json.encode(each).decode()}" for name, each in facts.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def differences() -> Iterator[str]:
    """Yield a line for each class whose facts in the table are not those of its installed source."""
    told = msgspec.json.decode(PAGE.read_bytes(), type=dict[str, PipelineFacts])
    now = table()
    for name in sorted(told.keys() | now.keys()):
        if told.get(name) != now.get(name):
            yield f"{name}: {told.get(name)} in {PAGE.name}, installed {now.get(name)}"


def read(kind: Any) -> PipelineFacts:
    """Return the facts that the source of a pipeline class says."""
    source = "\n".join(_sources(kind))
    modular = issubclass(kind, diffusers.ModularPipeline)
    timesteps = getattr(kind, "get_timesteps", None)
    return PipelineFacts(
        makes="" if modular else next((name for name in _results(kind) if name in KINDS), ""),
        changes=next((why for word, why in CHANGES.items() if word in source), ""),
        steps=STEPS.search(source) is not None,
        divisors=tuple(divisors(getattr(kind, "check_inputs", None))),
        sides=tuple(WITHOUT_HEIGHT.findall(source_of(kind.__call__))),
        counts_parts=timesteps is not None and "int(num_inference_steps * strength)" not in source_of(timesteps),
    )


def divisors(check: Any) -> Iterator[str]:
    """Yield the N of `height % N` and `width % N` in conditions of a `raise`, as a product; other forms are left out.

    A check that only warns does not count: most of these pipelines make such an image all the same.
    """
    tree = ast.parse(textwrap.dedent(source_of(check))) if check is not None else ast.Module([], [])
    refusals = (node for node in ast.walk(tree) if isinstance(node, ast.If) and any(isinstance(part, ast.Raise) for part in node.body))
    found = dict[str, None]()  # in order, each once
    for node in (part for refusal in refusals for part in ast.walk(refusal.test)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Name) and node.left.id in SIDES:
            factors = [factor for factor in _factors(node.right) if factor]
            if len(factors) == len(list(_factors(node.right))):
                found[" * ".join(factors)] = None
    yield from found


def _factors(node: ast.expr) -> Iterator[str | None]:
    """Yield the factors of a product: numbers, and settings of the pipeline without `self.`; None for another form."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from (*_factors(node.left), *_factors(node.right))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value)
    else:
        text = ast.unparse(node)
        yield text.removeprefix("self.") if re.fullmatch(r"self(\.\w+)+", text) else None


def _sources(kind: Any) -> Iterator[str]:
    """Yield the text of every function that may run during a call, except `__init__` and `invert`.

    A modular class has those of its default blocks. A classic one has its own, those of its bases below `DiffusionPipeline`, and those of
    inner pipelines.
    """
    if issubclass(kind, diffusers.ModularPipeline):
        name = kind.default_blocks_name
        yield from _block_sources(getattr(diffusers, name)()) if name else ()
        return
    for parent in kind.__mro__:
        if parent is not diffusers.DiffusionPipeline and issubclass(parent, diffusers.DiffusionPipeline):
            yield from _method_sources(parent)
    for part in _inner_classes(kind):
        yield from _sources(part)


def _inner_classes(kind: Any) -> list[Any]:
    """Find the classes that a combined pipeline instantiates, from the text of `__init__` and in its order; empty for others."""
    made_by = inspect.unwrap(kind.__init__)
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


def _results(kind: Any) -> Iterator[str]:
    """Yield names of the first field of the result, as the class's call writes them, then those of its bases and inner classes."""
    for call in (vars(parent)["__call__"] for parent in kind.__mro__ if "__call__" in vars(parent)):
        source = source_of(call)
        if "ImagePipelineOutput(" in source:
            yield "images"
        # `return SomeOutput(images=…)`, or before that an output type of this name.
        yield from re.findall(r"(?:return|output =)\s+\w*Output\w*\(\s*(\w+)", source)
    for part in _inner_classes(kind):
        yield from _results(part)


@functools.cache
def source_of(found: Any) -> str:
    """Return the source of a function; nothing where it has none, as one made at run time."""
    try:
        return inspect.getsource(inspect.unwrap(found))
    except (OSError, TypeError):
        return ""
