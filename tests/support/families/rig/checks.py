# SPDX-License-Identifier: Apache-2.0
"""Checks of properties of every family. Each raises AssertionError; `test_families_can_fail.py` shows that they do."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from diffusion_worker.runner.model_call.call import ModelCall, group_key, merge, split
from support.families.rig.family import Family, as_tensor
from support.families.rig.family_rig import JOINING, TRIO, Asked, FamilyRig, apart

Path = tuple[Any, ...]


def check_trio(family: Family, rig: FamilyRig) -> None:
    """Check that three requests that join at different ticks give the results of each alone, within the family's tolerance.

    One of them is served by itself as well, and its result is bit for bit that of diffusers.

    For a family that shares calls, also check that a tick of all three takes no more calls than a tick of one. With separate models for
    early and late steps, check only that sharing saves calls.
    """
    alone = [rig.alone(asked) for asked in TRIO]
    (served,) = rig.together(TRIO[-1])
    assert served.equal(alone[-1]), f"{apart(served, alone[-1]):.1e} apart"
    made = Counter(call.component for call in rig.denoiser_calls())
    together = rig.together(*TRIO, joining=JOINING)
    for one, other in zip(together, alone, strict=True):
        assert apart(one, other) <= family.tolerance
    if family.shares:
        ticks = max(joined + asked.steps for joined, asked in zip(JOINING, TRIO, strict=True))
        steps = TRIO[-1].steps
        if all(count % steps == 0 for count in made.values()):
            assert len(rig.denoiser_calls()) == ticks * made.total() / steps
        else:  # early and late steps have separate models (Wan 2.2): one tick may call both
            assert len(rig.denoiser_calls()) < sum(asked.steps for asked in TRIO) * made.total() / steps
    if alone[0].shape == alone[1].shape:
        assert apart(alone[0], alone[1]) > 1e-3


def first_calls(rig: FamilyRig, asked: Asked) -> dict[str, ModelCall]:
    """Return the first call that a request makes of each denoiser, as it is without other requests."""
    rig.together(asked)
    found: dict[str, ModelCall] = {}
    for call in rig.denoiser_calls():
        # Merged already, the call may be one whose rows have to stay on one rank.
        found.setdefault(call.component, msgspec.structs.replace(call, whole=False))
    return found


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value in nested dicts, lists and tuples, with its path of keys and indices; nothing for empty ones."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def with_leaf(value: Any, path: Path, leaf: Any) -> Any:
    """Copy the containers along `path` and put `leaf` at its end; all else is shared with the original, which stays as it is."""
    if not path:
        return leaf
    if isinstance(value, dict):
        items = dict(value) | {path[0]: with_leaf(value[path[0]], path[1:], leaf)}
        return items if type(value) is dict else type(value)(**items)
    return type(value)(with_leaf(item, path[1:], leaf) if index == path[0] else item for index, item in enumerate(value))


def changed(value: Any) -> Any:
    """Return a leaf of a call's arguments perturbed within its valid range; None if it is no tensor, boolean or number.

    A boolean and the last entries of a mask are flipped, other tensors and numbers are moved. Empty and complex tensors stay as they are.
    """
    if isinstance(value, torch.Tensor):
        return _changed_tensor(value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return None


def _changed_tensor(value: torch.Tensor) -> torch.Tensor:
    if value.numel() == 0 or value.is_complex():  # complex: tables of angles
        return value
    if ((value == 0) | (value == 1)).all() and value.dim() > 0:  # a mask: the last entry of each line
        flipped = value.clone()
        flipped[..., -1] = 1 - value[..., -1].int()
        return flipped
    if value.is_floating_point():
        # A time step stays within its range.
        return value * 0.5 if value.dim() < 2 else value + 0.5 * torch.randn(value.shape, generator=torch.Generator().manual_seed(5))
    return torch.where(value > 0, value - 1, value + 1)


def check_sizes(rig: FamilyRig, asked: Asked) -> None:
    """Check a merge of two equal calls against the pipeline's own call for `doubled`: tensors must have equal shapes.

    Time steps are skipped, and a table may keep a single row.
    """
    assert rig.family.doubled is not None
    single = first_calls(rig, asked)
    double = first_calls(rig, Asked(asked.seed, asked.steps, asked.guidance, changes=rig.family.doubled))
    assert single.keys() == double.keys()
    for component, call in single.items():
        merged = dict(leaves(merge([call, call]).arguments))
        for path, wanted in leaves(double[component].arguments):
            if not isinstance(wanted, torch.Tensor) or _is_time(path):
                continue
            if _is_table(path):  # equal in all rows, so it may as well have one
                assert merged[path].shape[1:] == wanted.shape[1:], path
            else:
                assert merged[path].shape == wanted.shape, (component, path)


def _is_time(path: Path) -> bool:
    return len(path) == 1 and (str(path[0]).startswith("timestep") or path[0] == "t")


def _is_table(path: Path) -> bool:
    return str(path[-1]).endswith("_ids") and not str(path[-1]).endswith("time_ids")


def check_following(rig: FamilyRig, first: Asked, second: Asked) -> None:
    """Check that in a merged call row 1 obeys its own arguments and row 0 ignores them.

    Every leaf of row 1 that merging allows to differ is perturbed in turn; at least two arguments must matter.
    """
    calls = first_calls(rig, first)
    for component, other in first_calls(rig, second).items():
        one = calls[component]
        assert group_key(one) is not None
        assert group_key(one) == group_key(other), f"{component}: two requests of one shape make no call together"
        alone = as_tensor(rig.execute(one))
        followed = set()
        for path, leaf in leaves(other.arguments):
            perturbed = msgspec.structs.replace(other, arguments=with_leaf(other.arguments, path, changed(leaf)))
            if changed(leaf) is None or group_key(perturbed) != group_key(one):
                continue
            try:
                expected = as_tensor(rig.execute(perturbed))
            except IndexError:  # an entry of a list of one: there is no other
                continue
            parts = split(rig.execute(merge([one, perturbed])), [one.rows, perturbed.rows])
            assert apart(as_tensor(parts[0]), alone) <= rig.family.tolerance, f"{component}: {path} of row 1 changes row 0"
            assert apart(as_tensor(parts[1]), expected) <= rig.family.tolerance, f"{component}: row 1 does not follow its {path}"
            if apart(expected, as_tensor(rig.execute(other))) > 1e-6:
                followed.add(path[0])
        assert len(followed) >= 2, f"{component}: only {followed} have an effect on their row"
