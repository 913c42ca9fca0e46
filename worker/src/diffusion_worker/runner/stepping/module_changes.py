# SPDX-License-Identifier: Apache-2.0
"""Changes that a request makes to modules while it has the model alone: they are found, and put back at its end.

Only changes made while the request's own code runs count: in between, the engine gives layers to adapters, and models keep state of their
calls. So the modules are compared at the begin and the end of each run of the fiber. In-place changes of a tensor's values, and of other
objects than lists, sets and dicts, are not seen.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

CONTAINERS = (dict, OrderedDict, list, set)

# A container that belongs to a module with a copy of it.
Copied = tuple[Any, Any]
Missing = object()


class Attributes:
    """A snapshot of modules with all submodules: shallow copies of their attributes, lists, sets and dicts, and each weight's data."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.containers: dict[int, Copied] = {}
        self.weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in _all_modules(modules):
            for container in _containers(module):
                self.containers.setdefault(id(container), (container, container.copy()))
            for weight in (*module._parameters.values(), *module._buffers.values()):
                if weight is not None:
                    self.weights.setdefault(id(weight), (weight, weight.data))

    def changed(self) -> Iterator[Copied]:
        """Yield the containers that have changed since, each with its earlier contents."""
        for container, before in self.containers.values():
            if not _same(container, before):
                yield container, before

    def moved(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the weights that have moved since or have another precision, each with its earlier data."""
        for weight, before in self.weights.values():
            if weight.dtype != before.dtype or weight.data_ptr() != before.data_ptr():
                yield weight, before


class ModuleChanges:
    """The changes that one request makes to `modules`, over all runs of its fiber."""

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._modules = modules
        self._copies: list[torch.nn.Module] = []
        self._begun = False
        self._before: Attributes | None = None
        self._undo: list[Callable[[], None]] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Watch a module beside the pipeline's: a copy in another precision."""
        if all(module is not known for known in self._copies):
            self._copies.append(module)

    def begin(self) -> None:
        """Take the snapshot that `end_run` compares with, unless this run of the fiber has one.

        It is called just before a change, or before the request gets a real module. Later runs of the request take theirs at their start.
        """
        self._begun = True
        if self._before is None:
            self._before = Attributes((*self._modules(), *self._copies))

    def start_run(self) -> None:
        """Take a snapshot at the start of a run if the request has touched modules in an earlier one; do nothing before that."""
        if self._begun:
            self.begin()

    def end_run(self) -> None:
        """Note the changes that the request's own code made until it stopped."""
        before, self._before = self._before, None
        if before is not None:
            self._undo += [_undo_container(container, copy) for container, copy in before.changed()]
            self._undo += [_undo_weight(weight, data) for weight, data in before.moved()]

    def put_back(self) -> None:
        """Undo all changes, the last one first."""
        while self._undo:
            self._undo.pop()()
        self._begun = False


def _all_modules(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    seen: set[torch.nn.Module] = set()
    for module in modules:
        for _, part in module.named_modules(seen):
            yield part


def _containers(module: torch.nn.Module) -> Iterator[Any]:
    yield vars(module)
    yield from (value for value in vars(module).values() if type(value) in CONTAINERS)


def _same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(value is before.get(key, Missing) for key, value in now.items())
    return now == before if isinstance(now, set) else all(one is other for one, other in zip(now, before, strict=True))


def _undo_container(container: Any, before: Any) -> Callable[[], None]:
    """Return a function that undoes the request's changes of a container.

    Later changes by others stay in a dict; a list or set gets its whole former content back.
    """
    if isinstance(container, list):
        return lambda: container.__setitem__(slice(None), before)
    if isinstance(container, set):
        return lambda: container.__init__(before)  # type: ignore[misc]
    added = container.keys() - before.keys()
    changed = {key for key, value in before.items() if container.get(key, Missing) is not value}

    def undo() -> None:
        now = dict(container)
        old = {key: value if key in changed else now[key] for key, value in before.items() if key in changed or key in now}
        new = {key: value for key, value in now.items() if key not in before and key not in added}
        container.clear()
        container.update(old | new)

    return undo


def _undo_weight(weight: torch.Tensor, data: torch.Tensor) -> Callable[[], None]:
    def undo() -> None:
        weight.data = data

    return undo
