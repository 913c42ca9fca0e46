# SPDX-License-Identifier: Apache-2.0
"""Lists, dicts, sets and objects of a shared module: what a request beside others may do with them, and how a check finds the rest."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, FiberDone, FiberEvent
from diffusion_worker.runner.stepping.shared_part import NeedsModelAlone
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from support.runner.rig import attributes_of, changes_of, request


class Processor:
    """An object with values of its own that is no module, as the attention processors of diffusers are."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.sizes = [1, 2]


class Shared(torch.nn.Module):
    """A module with attributes of many kinds: a layer, lists, dicts, a set, a tuple and an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.sizes = [1, 2, 3]
        self.table = {"a": {"b": 1}, "sizes": [4]}
        self.names = {"x"}
        self.hooks = OrderedDict(first=1)
        self.pair = (torch.nn.Identity(), 5)
        self.processor = Processor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


Use = Callable[[Any], Any]


def run(use: Use, *, whole: bool = False, check: bool = False) -> tuple[FiberEvent, Shared, dict[str, Any]]:
    """Run `use` on a module's stand-in in a request's fiber, up to the first event.

    Return the event, the module, and the attributes that the module had before.
    """
    module = Shared()

    def body() -> Any:
        return use(SuspendingModule("transformer", module))

    vars(body).update(whole=whole, modules=lambda: {"transformer": module})
    before = attributes_of({"transformer": module})
    return DiffusionRequestState(request("a"), body, check_sharing=check).advance(), module, before


CHANGES = [
    pytest.param(lambda model: model.sizes.append(4), "changes transformer.sizes", id="append"),
    pytest.param(lambda model: model.sizes.__setitem__(0, 4), "changes transformer.sizes", id="item of a list"),
    pytest.param(lambda model: model.sizes.reverse(), "changes transformer.sizes", id="reverse"),
    pytest.param(lambda model: model.table.update(c=1), "changes transformer.table", id="update"),
    pytest.param(lambda model: model.table["a"].pop("b"), "changes transformer.table['a']", id="a dict in a dict"),
    pytest.param(lambda model: model.table["sizes"].clear(), "changes transformer.table['sizes']", id="a list in a dict"),
    pytest.param(lambda model: model.names.add("y"), "changes transformer.names", id="set"),
    pytest.param(lambda model: model.hooks.pop("first"), "changes transformer.hooks", id="ordered dict"),
    pytest.param(lambda model: model._modules.pop("layer"), "changes transformer._modules", id="submodules"),
    pytest.param(lambda model: model.layer._forward_hooks.update({1: print}), "changes transformer.layer._forward_hooks", id="hooks"),
]


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_a_change_of_a_container_beside_others_ends_the_attempt_and_is_made_in_a_run_alone(change: Use, what: str) -> None:
    event, module, before = run(change)
    assert event == NeedsModelAlone(what)
    assert not changes_of(before, attributes_of({"transformer": module}))
    # The change is made in a run alone, and put back after it.
    seen: list[Any] = []
    event, module, before = run(
        lambda model: (change(model), seen.append(str(attributes_of({"transformer": vars(model)["_real"]})))), whole=True
    )
    assert isinstance(event, FiberDone)
    assert seen != [str(before)]
    assert not changes_of(before, attributes_of({"transformer": module}))


def test_containers_read_beside_others_are_equal_to_the_modules_own_and_their_copies_are_plain() -> None:
    def use(model: Any) -> Any:
        own = vars(model)["_real"]
        assert (model.sizes, model.table, model.names, model.hooks) == (own.sizes, own.table, own.names, own.hooks)
        for value in (model.sizes, model.table, model.names):
            for copied in (copy.copy(value), copy.deepcopy(value), value.copy()):
                assert type(copied) is type(value).__mro__[1]
        mine = copy.deepcopy(model.table)
        mine["a"]["b"] = 2
        assert isinstance(model.pair[0], torch.nn.Identity) and model.pair[1] == 5
        assert model._modules["layer"] is model.layer
        fresh = model.state_dict()
        fresh.pop("layer.bias")
        return "done"

    event, _, _ = run(use)
    assert event == FiberDone("done")


UNSEEN = [
    pytest.param(lambda model: setattr(model.processor, "scale", 2.0), "changes transformer.processor.scale", id="object"),
    pytest.param(lambda model: model.processor.sizes.append(1), "changes transformer.processor.sizes", id="a list of an object"),
    pytest.param(
        lambda model: setattr(model.layer.weight, "data", torch.zeros(2, 2)), "changes transformer.layer.weight", id="data of a weight"
    ),
]


@pytest.mark.parametrize(("change", "what"), UNSEEN)
def test_a_check_finds_a_change_that_no_stand_in_sees_puts_it_back_and_asks_for_a_run_alone(change: Use, what: str) -> None:
    # The run ends at a model call, as it would for a request that goes on.
    event, module, _ = run(lambda model: (change(model), model(torch.ones(1, 2))), check=True)
    assert event == NeedsModelAlone(what)
    assert (module.processor.scale, module.processor.sizes) == (1.0, [1, 2])
    assert module.layer.weight.any()
    # A change in the last run of the fiber is found, too.
    event, module, _ = run(change, check=True)
    assert event == NeedsModelAlone(what)
    event, _, _ = run(lambda model: [change(model), "done"][-1], whole=True, check=True)
    assert event == FiberDone("done"), "a run alone may change the model"


def test_a_check_finds_nothing_where_a_request_only_reads() -> None:
    event, _, _ = run(lambda model: (model.sizes[0], model.layer(torch.ones(1, 2)).shape[0], model.processor.scale), check=True)
    assert event == FiberDone((1, 1, 1.0))
