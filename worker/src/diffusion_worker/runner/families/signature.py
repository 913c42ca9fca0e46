# SPDX-License-Identifier: Apache-2.0
"""The signature of a method as text: names, kinds and defaults of its parameters."""

import functools
import inspect
from typing import Any

# Methods whose calls are merged, of models that have them. Other models have `forward`.
CODER_METHODS = ("encode", "decode")


@functools.cache
def signature_of(model_class: Any, method: str) -> str | None:
    """Return the parameters of a class's method as text, such as `x, return_dict=True`, without `self` and annotations.

    The result is None if there is no such method.
    """
    function = getattr(model_class, method, None)
    if function is None:
        return None
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in list(signature.parameters.values())[1:]]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return text[1:-1]


def merged_methods(model_class: Any) -> tuple[str, ...]:
    """Return the methods of a class whose calls could be merged: `encode` and `decode` as far as it has them, otherwise `forward`."""
    coder = tuple(method for method in CODER_METHODS if hasattr(model_class, method))
    return coder or ("forward",)
