# SPDX-License-Identifier: Apache-2.0
"""Changes that a request makes to modules: they are found, and put back at its end.

Only changes made while the request's own code runs count: in between, the engine gives layers to adapters, and models keep state of their
calls. So the modules are compared at the begin and the end of each run of the fiber. In-place changes of a tensor's values are not seen.
Neither are changes inside of objects that a module's own objects hold.
"""

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

CONTAINERS = (dict, OrderedDict, list, set)
EMPTY: Mapping[type, Any] = {kind: kind() for kind in CONTAINERS}
# Objects without attributes that a request could set, or whose attributes are no state of a module.
_WITHOUT_STATE = (
    *(bool, int, float, str, type(None), tuple, torch.dtype, torch.device),
    *(torch.nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType),
)

Missing = object()
Modules = Mapping[str, torch.nn.Module]


class Copied(NamedTuple):
    """A container that belongs to a module, with its path and a copy of it. The attributes of an object are a container as well."""

    path: str
    now: Any
    before: Any
    attributes: bool = False

    def change(self) -> str:
        """Return the path of the first change."""
        if not isinstance(self.now, dict):
            return self.path
        keys = [*self.before, *(key for key in self.now if key not in self.before)]
        key = next(key for key in keys if self.now.get(key, Missing) is not self.before.get(key, Missing))
        return f"{self.path}.{key}" if self.attributes else f"{self.path}[{key!r}]"


class Attributes:
    """A snapshot of modules with all submodules: shallow copies of their attributes, and each weight's data.

    Lists, sets and dicts are copied too, and the attributes of other objects that a module holds, such as attention processors.
    """

    def __init__(self, modules: Modules) -> None:
        self.containers: dict[int, Copied] = {}
        self.weights: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for path, module in _all_modules(modules):
            for container in _containers(path, module):
                self.containers.setdefault(id(container.now), container)
            for name, weight in (*module._parameters.items(), *module._buffers.items()):
                if weight is not None:
                    self.weights.setdefault(id(weight), (f"{path}.{name}", weight, weight.data))

    def changed(self) -> Iterator[Copied]:
        """Yield the containers that have changed since the snapshot."""
        return (container for container in self.containers.values() if not _same(container.now, container.before))

    def moved(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the weights that have other memory or another precision since the snapshot, each with its path and its earlier data."""
        for path, weight, before in self.weights.values():
            if weight.dtype != before.dtype or weight.data_ptr() != before.data_ptr():
                yield path, weight, before


class ModuleChanges:
    """A record of what a request changes in the pipeline's modules during all runs of its fiber, so that it can be undone.

    `modules` returns the modules by path.
    """

    def __init__(self, modules: Callable[[], Modules]) -> None:
        self._modules = modules
        self._copies: list[tuple[str, torch.nn.Module]] = []
        self._begun = False
        self._before: Attributes | None = None
        self._undo: list[Callable[[], None]] = []
        # The path of the first change that is not put back yet.
        self.first: str | None = None

    def watch(self, path: str, module: torch.nn.Module) -> None:
        """Watch a module beside the pipeline's: a copy in another precision."""
        if all(module is not known for _, known in self._copies):
            self._copies.append((path, module))

    def begin(self) -> None:
        """Take the snapshot that `end_run` compares with, unless this run of the fiber has one.

        It is called just before a change, or before the request gets a real module. Later runs of the request take theirs at their start.
        """
        self._begun = True
        if self._before is None:
            copies = {f"{path}, copy {number}": module for number, (path, module) in enumerate(self._copies)}
            self._before = Attributes({**self._modules(), **copies})

    def start_run(self) -> None:
        """Take a snapshot at the start of a run if the request has touched modules in an earlier one; do nothing before that."""
        if self._begun:
            self.begin()

    def end_run(self) -> None:
        """Compare the modules with this run's snapshot, note the changes for `put_back`, and drop the snapshot; without one do nothing."""
        before, self._before = self._before, None
        if before is None:
            return
        for container in before.changed():
            self.first = self.first or container.change()
            self._undo.append(_undo_container(container.now, container.before))
        for path, weight, data in before.moved():
            self.first = self.first or path
            self._undo.append(_undo_weight(weight, data))

    def put_back(self) -> None:
        """Revert every change that `end_run` noted, from newest to oldest, and forget them all. A repeated call has no effect."""
        while self._undo:
            self._undo.pop()()
        self._begun, self.first = False, None


def _all_modules(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    seen: set[torch.nn.Module] = set()
    for path, module in modules.items():
        yield from module.named_modules(seen, path)


def _containers(path: str, module: torch.nn.Module) -> Iterator[Copied]:
    yield Copied(path, vars(module), dict(vars(module)), attributes=True)
    for name, value in vars(module).items():
        kind: Any = type(value)
        if kind in CONTAINERS:
            # A model has ten thousands of these, nearly all of them empty tables of hooks.
            if value:
                yield from _copied(f"{path}.{name}", value)
            else:
                yield Copied(f"{path}.{name}", value, EMPTY[kind])
        elif _has_state(kind) and hasattr(value, "__dict__"):
            yield from _of_object(f"{path}.{name}", value)


@functools.cache
def _has_state(kind: type) -> bool:
    return not issubclass(kind, _WITHOUT_STATE)


def _of_object(path: str, found: Any) -> Iterator[Copied]:
    yield Copied(path, vars(found), dict(vars(found)), attributes=True)
    for name, value in vars(found).items():
        yield from _copied(f"{path}.{name}", value)


def _copied(path: str, value: Any) -> Iterator[Copied]:
    """Yield a list, set or dict and all those in it; nothing for other values."""
    if type(value) in CONTAINERS:
        yield Copied(path, value, value.copy())
        if type(value) is not set:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _copied(f"{path}[{key!r}]", item)


def _same(now: Any, before: Any) -> bool:
    if not before:
        return not now
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
