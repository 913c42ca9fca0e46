# SPDX-License-Identifier: Apache-2.0
"""Two calls of a model, alone and as one, and the judgement whether the difference is rounding.

Rounding depends on the number of rows in a call. It is measured by two equal calls as one: a rule that takes an argument from the wrong
row does not show in them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from diffusion_worker.runner.model_call.call import ModelCall, group_key, merge, slice_rows, split, tensors_of

# Calls the real module, all rows of a call together.
Run = Callable[[ModelCall], Any]

# Allowed at least, in units of the type's rounding, and as a multiple of the measured rounding.
UNITS = 16
TIMES = 4
# Two calls whose results are less than this multiple of the allowed difference apart show nothing.
POWER = 8
UNFINISHED = "the verification ended before all of its calls were compared"


class Comparison(msgspec.Struct):
    """The outcome: `wrong` if calls as one differ from calls alone, `unknown` if nothing could be shown; both empty if they agree.

    `apart` is the largest relative difference that was found, `allowed` the largest that rounding explains.
    """

    wrong: str = ""
    unknown: str = ""
    apart: float = 0.0
    allowed: float = 0.0


def compare(one: ModelCall, other: ModelCall, run: Run, outcome: Comparison) -> Iterator[None]:
    """Call two calls alone and both as one, and a row of a call alone too, and judge the differences; fill in `outcome`.

    It yields after each call of the module, so that its caller can do other work. Calls that cannot be merged are not made: `unknown` says
    why.
    """
    if group_key(one) is None or group_key(one) != group_key(other):
        outcome.unknown = "the model's calls have no rows, or an argument of a kind that cannot be merged"
        return
    outcome.unknown = UNFINISHED
    alone = run(one)
    yield
    alone_other = run(other)
    yield
    twins = split(run(merge([one, one])), [one.rows, one.rows])
    yield
    together = split(run(merge([one, other])), [one.rows, other.rows])
    yield
    pairs = [(together[0], alone), (together[1], alone_other)]
    if one.rows > 1 and one.divisible:
        row = run(slice_rows(one, 0, 1))
        pairs.append((row, split(alone, [1, one.rows - 1])[0]))
        yield
    _judge(outcome, twins, pairs, alone, alone_other)


def _judge(outcome: Comparison, twins: list[Any], pairs: list[tuple[Any, Any]], alone: Any, alone_other: Any) -> None:
    outcome.unknown = ""
    unit = max((torch.finfo(tensor.dtype).eps for tensor in tensors_of(alone) if tensor.is_floating_point()), default=0.0)
    if not unit:
        outcome.unknown = "the model's results have no floating-point numbers to compare"
        return
    if not all(bool(tensor.isfinite().all()) for output in (alone, alone_other) for tensor in tensors_of(output)):
        outcome.unknown = "the model's results have values that are not finite"
        return
    rounding = max(apart(twin, alone) for twin in twins)
    outcome.allowed = max(UNITS * unit, TIMES * rounding)
    outcome.apart = max(apart(found, expected) for found, expected in pairs)
    if not rounding <= math.sqrt(unit):
        outcome.wrong = f"two equal calls merged into one differ by {rounding:.1e} from one alone, more than rounding explains"
    elif not outcome.apart <= outcome.allowed:
        outcome.wrong = (
            f"merged or split calls differ by {outcome.apart:.1e} from the same calls alone, at most {outcome.allowed:.1e} is rounding"
        )
    elif not apart(alone_other, alone) >= POWER * outcome.allowed:
        outcome.unknown = "two calls with different arguments have nearly the same result, so the comparison shows nothing"


def apart(found: Any, expected: Any) -> float:
    """Return the largest relative difference of the floating tensors in two outputs, by the norm of each expected one; 0 without any.

    It is infinite if the number or the shapes of the tensors differ, or a difference is not finite.
    """
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=False))
    if len(tensors_of(found)) != len(tensors_of(expected)) or any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return max((_relative(a.double(), b.double()) for a, b in pairs if a.is_floating_point()), default=0.0)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, divided by that of `expected` unless it is 0; infinite if the difference is not finite."""
    difference, size = float((found - expected).norm()), float(expected.norm())
    return math.inf if math.isnan(difference) or math.isinf(difference) else difference / size if size else difference
