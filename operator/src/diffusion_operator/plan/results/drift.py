# SPDX-License-Identifier: Apache-2.0
"""Differences of a child from what was rendered. Only what we own counts: an API server fills in defaults, and others add their own.

A list or selector that means something as a whole has nothing of others: with one more rule, a NetworkPolicy lets in more.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_METADATA = ("labels", "annotations", "ownerReferences")
_WHOLE = ("selector", "podSelector", "policyTypes", "ingress")
_CLOSED = ("ports",)
"""Lists to whose elements the API server adds fields."""


def drift(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare a live object with the rendered one, and return the paths that differ, such as `spec.selector`.

    Fields that are not rendered are ignored, except within selectors and lists that must match as a whole.
    """
    metadata = {key: value for key, value in wanted["metadata"].items() if key in _METADATA}
    content = {key: value for key, value in wanted.items() if key not in ("apiVersion", "kind", "metadata")}
    return (*_differences(live["metadata"], metadata, "metadata"), *_differences(live, content, ""))


def leads_elsewhere(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a live Service leads to other pods than the rendered one, or lacks a port of it."""
    found, expected = live["spec"], wanted["spec"]
    # Without its key the list may have ports of others beside ours.
    return found.get("selector") != expected["selector"] or not _same(found.get("ports"), expected["ports"])


def _differences(live: Mapping[str, Any], wanted: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in wanted.items():
        place = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value and isinstance(live.get(key), Mapping) and key not in _WHOLE:
            yield from _differences(live[key], value, place)
        elif not _same(live.get(key), value, key=key):
            yield place


def _same(live: Any, wanted: Any, *, key: str = "") -> bool:
    """Return whether a live value has all of the rendered one; where the key stands for a whole, whether they are equal.

    An absent field equals an empty one.
    """
    if key in _WHOLE:
        return bool(live == wanted)
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return not list(_differences(live, wanted, ""))
    if isinstance(wanted, list) and isinstance(live, list):
        return all(any(_same(one, each) for one in live) for each in wanted) and (key not in _CLOSED or len(live) == len(wanted))
    return bool(live == wanted) or (not wanted and not live and live is not False)
