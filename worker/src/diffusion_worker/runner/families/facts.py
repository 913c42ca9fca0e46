# SPDX-License-Identifier: Apache-2.0
"""Facts of diffusers' pipeline classes that only their source says: `pipelines.json`, which `python -m tools.families --write` generates.

A class of a user's own has those of the nearest class of diffusers that it extends.
"""

import functools
from pathlib import Path
from typing import Any

import msgspec


class PipelineFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts of one class."""

    makes: str = ""
    """The name of its first result, for a class without blocks; empty where its source does not say."""
    changes: str = ""
    """The way in which it changes the shared model during its call; empty where it changes none."""
    steps: bool = True
    """It steps a scheduler."""
    divisors: tuple[str, ...] = ()
    """Numbers that must divide a side of an image, or its call raises. Each is a product of numbers and of settings of the pipeline."""
    sides: tuple[str, ...] = ()
    """The sides that its call makes without a height: numbers, arguments or `default_resolution`."""
    counts_parts: bool = False
    """In an edit, a part of a step that the strength asks for counts as a whole step."""


def facts_of(pipeline_class: Any) -> PipelineFacts | None:
    """Return the facts of a class, or of the nearest class that it extends; None where there are none."""
    return next((facts for parent in pipeline_class.__mro__ if (facts := _table().get(parent.__name__))), None)


@functools.cache
def _table() -> dict[str, PipelineFacts]:
    return msgspec.json.decode(Path(__file__).with_name("pipelines.json").read_bytes(), type=dict[str, PipelineFacts])
