# SPDX-License-Identifier: Apache-2.0
"""Lists, dicts and sets of a shared module as a request reads them beside others: copies, of which no method makes a change.

A change ends the attempt, as it does on a `SharedPart`. So the copies never differ from the module's own.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

# A function that ends the attempt beside others; its argument says what the request was about to do.
LeaveCompany = Callable[[str], None]

_CHANGES: dict[type, tuple[str, ...]] = {
    list: ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", "__delitem__", "__iadd__", "__imul__", "__setitem__"),
    set: (
        *("add", "clear", "difference_update", "discard", "intersection_update", "pop", "remove", "symmetric_difference_update", "update"),
        *("__iand__", "__ior__", "__isub__", "__ixor__"),
    ),
    dict: ("clear", "pop", "popitem", "setdefault", "update", "__delitem__", "__ior__", "__setitem__"),
}
# Tables of hooks are of this type. A copy is a plain dict, because copies of an OrderedDict's subclass are made by its changing methods.
_SHOWN_AS = {OrderedDict: dict}


def guarded(path: str, value: Any, seen: Callable[[str, Any], Any], leave_company: LeaveCompany) -> Any:
    """Return a copy of a plain list, set or dict that cannot be changed; `seen` is applied to each item.

    Values of other types are returned as they are.
    """
    kind: Any = _SHOWN_AS.get(type(value), type(value))
    if kind not in _CHANGES:
        return value
    copy = _guarding(kind)()
    vars(copy).update(_path=path, _leave_company=leave_company)
    # The methods of the plain type fill the copy, because its own end the attempt.
    if kind is dict:
        for key, item in value.items():
            kind.__setitem__(copy, key, seen(f"{path}[{key!r}]", item))
    elif kind is list:
        kind.extend(copy, (seen(f"{path}[{place}]", item) for place, item in enumerate(value)))
    else:
        kind.update(copy, value)
    return copy


@functools.cache
def _guarding(kind: Any) -> type:
    """Return a subclass of a container type whose changing methods end the attempt, and whose copies are plain."""
    members: dict[str, Any] = {name: _changing(kind, name) for name in _CHANGES[kind]}
    members["__reduce_ex__"] = lambda self, protocol: (kind, (kind.copy(self),))
    return type(kind.__name__, (kind,), members)


def _changing(kind: Any, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    @functools.wraps(method)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        # It returns outside of a request's fiber only, where the copy may change.
        vars(self)["_leave_company"](f"changes {vars(self)['_path']}")
        return method(self, *args, **kwargs)

    return change
