# SPDX-License-Identifier: Apache-2.0
"""Numbers that must divide a side of an image: read from the source of the pipeline's check, so that no rank has to run it.

Most stand for whole latents and patches, which are known otherwise. CogView4 and SDXL write a number, and GLM-Image wants two patches a
side.
"""

import ast
import textwrap
from collections.abc import Iterator
from typing import Any

from diffusion_worker.runner.families import pipeline_record
from diffusion_worker.runner.pipelines.step_support import source_of

SIDES = frozenset({"height", "width"})


def written_divisors(pipeline: Any) -> list[int]:
    """Return the numbers that must divide a side by the pipeline's own check, if they consist of constants and its settings.

    A check that only warns does not count: most of these pipelines make such an image all the same.
    """
    check = getattr(type(pipeline), "check_inputs", None)
    tree = ast.parse(textwrap.dedent(source_of(check))) if check is not None else ast.Module([], [])
    return [divisor for node in _divisors(tree) if (divisor := _value(node, pipeline)) > 0]


def tokens_side(pipeline: Any) -> int:
    """Return the number of latents along a side that the pipeline packs into one token by itself."""
    return pipeline_record(type(pipeline)).packs


def _divisors(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the N of `height % N` and `width % N` in conditions of a `raise`."""
    refusals = (node for node in ast.walk(tree) if isinstance(node, ast.If) and any(isinstance(part, ast.Raise) for part in node.body))
    for node in (part for refusal in refusals for part in ast.walk(refusal.test)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Name) and node.left.id in SIDES:
            yield node.right


def _value(node: ast.expr, pipeline: Any) -> int:
    """Return the number that an expression stands for in this pipeline; 0 where it has another form."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _value(node.left, pipeline) * _value(node.right, pipeline)
    found = node.value if isinstance(node, ast.Constant) else _setting(node, pipeline)
    return found if isinstance(found, int) else 0


def _setting(node: ast.expr, pipeline: Any) -> Any:
    """Return the value of `self.one.other`; None for any other expression."""
    if isinstance(node, ast.Attribute):
        return getattr(_setting(node.value, pipeline), node.attr, None)
    return pipeline if isinstance(node, ast.Name) and node.id == "self" else None
