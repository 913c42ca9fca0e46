# SPDX-License-Identifier: Apache-2.0
"""The decision which calls of a model may share one: those of a class with a valid record. All others run alone.

A record counts only while the class has the signature in it. An argument that a library renamed could otherwise be merged by the wrong
rule without an error.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from diffusion_worker.messages import ModelMerging
from diffusion_worker.runner.families import TESTED_WITH, merged_methods, model_record, signature_of
from diffusion_worker.runner.model_call.call import ModelCall


class Trust(msgspec.Struct, frozen=True):
    """The judgement of a class's method by its record: calls may be merged if `ok`, and the reason for either."""

    ok: bool
    why: str


class Merging:
    """The decision about each call of the `modules`, by the record of its class."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._classes: dict[str, Any] = {name: type(module) for name, module in modules.items()}
        self._trust: dict[tuple[Any, str], Trust] = {}

    def allows(self, call: ModelCall) -> bool:
        """Return whether rows of other requests may be in this call, and its own be spread over ranks."""
        model_class = type(call.module) if call.module is not None else self._classes.get(call.component, type(None))
        return self._trusted(model_class, call.method).ok

    def described(self) -> list[ModelMerging]:
        """Return for each method of each component whether its calls are merged, and why."""
        found = []
        for name, kind in self._classes.items():
            for method in tuple(model_record(kind).signatures) or merged_methods(kind):
                trust = self._trusted(kind, method)
                found.append(ModelMerging(name, kind.__name__, method, trust.ok, trust.why))
        return found

    def _trusted(self, model_class: Any, method: str) -> Trust:
        key = model_class, method
        if key not in self._trust:
            self._trust[key] = trust_in(model_class, method)
        return self._trust[key]


def trust_in(model_class: Any, method: str) -> Trust:
    """Judge by the record of a class if calls of its `method` may be merged; without a record they may not.

    The record has to be for the class's library, the signature has to equal that on record, and a subclass may not override the method.
    """
    record = model_record(model_class)
    if not record.name:
        return Trust(False, f"{model_class.__name__} has no record that its calls may be merged")
    expected = record.signatures.get(method)
    if expected is None:
        return Trust(False, f"the record of {record.name} has no signature of its method {method}")
    tested = next(parent for parent in model_class.__mro__ if parent.__name__ == record.name)
    library, home = record.library, tested.__module__.partition(".")[0]
    if library and library != home:
        return Trust(False, f"the record is for the class {record.name} of {library}, found one of {home}")
    found = signature_of(model_class, method)
    if found != expected:
        return Trust(False, f"signature of {method}: expected {expected!r} as in the record of {record.name}, found {found!r}")
    if inspect.unwrap(getattr(model_class, method)) is not inspect.unwrap(getattr(tested, method)):
        return Trust(False, f"{model_class.__name__} has its own method {method}, and the record is for that of {record.name}")
    return Trust(True, f"tested with {library} {TESTED_WITH[library]}" if library else f"trusted by the record of {record.name}")
