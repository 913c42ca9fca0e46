# SPDX-License-Identifier: Apache-2.0
"""Offloading, on a machine without a GPU: other memory of the CPU takes the part of the device, so that weights really move."""

import copy

import pytest
import torch
from torch import nn

from diffusion_worker.config import Offload, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.memory.slabs import make_slab
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.diffusion_worker import DiffusionWorker
from diffusion_worker.runner.loading.offloading import Offloading, Residence, check_device
from diffusion_worker.runner.model_call.call import ModelCall
from support.runner.rig import RunnerRig, request
from support.worker.process import DIGITS

CPU = torch.device("cpu")


def places(module: nn.Module) -> list[int]:
    """Return the memory addresses of all parameters and buffers of a module."""
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


class Mixed(nn.Module):
    """A model whose tensors are stored in unlike ways: tied, halves of one storage, transposed, empty, or a single integer.

    The forward pass uses all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight
        whole = torch.randn(12, 6).to(torch.bfloat16)
        self.upper, self.lower = nn.Parameter(whole[:6]), nn.Parameter(whole[6:])
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("count", torch.tensor(7))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x)) @ self.upper.float() @ self.lower.float() @ self.turned
        return x * self.count + self.none.numel()


def test_weights_come_to_other_memory_with_their_contents_and_leave_for_the_very_places_they_came_from() -> None:
    module, x = Mixed(), torch.randn(2, 6)
    expected, home, values = module(x), places(module), copy.deepcopy(module.state_dict())
    residence = Residence(module)
    residence.come(CPU)
    there = places(module)
    assert all(here != away for here, away in zip(home, there, strict=True) if here)  # an empty tensor has no address
    assert torch.equal(module(x), expected)
    assert module.two.weight is module.one.weight
    assert module.turned.stride() == (1, 6)
    assert all(torch.equal(tensor, values[name]) for name, tensor in module.state_dict().items())
    residence.leave()
    assert places(module) == home
    assert torch.equal(module(x), expected)


def test_what_lies_in_one_slab_comes_in_one_copy() -> None:
    module = nn.Linear(32, 32).requires_grad_(False)
    slab = make_slab(8192, CPU)
    for offset, tensor in zip((0, 4096), (module.weight, module.bias), strict=True):
        view = slab.bytes[offset : offset + tensor.numel() * 4].view(torch.float32).view(tensor.shape)
        tensor.data = view.copy_(tensor.data)
    Residence(module).come(CPU)
    assert module.bias.data_ptr() - module.weight.data_ptr() == 4096
    assert module.bias.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr() != slab.bytes.data_ptr()


def call_of(name: str, module: nn.Module) -> ModelCall:
    return ModelCall(name, "forward", {"input": torch.ones(2, 4)}, module=module)


def test_one_component_at_a_time_is_on_the_device_and_a_copy_that_is_met_late_is_one_too() -> None:
    one, two = (nn.Linear(4, 4).requires_grad_(False) for _ in range(2))
    home = {id(module): places(module) for module in (one, two)}
    offloading = Offloading(Offload.MODEL, CPU)
    offloading.manage({"transformer": one, "vae": two})
    offloading.execute(one, call_of("transformer", one))
    there = places(one)
    assert there != home[id(one)] and places(two) == home[id(two)]
    offloading.execute(one, call_of("transformer", one))
    assert places(one) == there, "it stays while nobody else is called"
    # A request that decodes in another precision uses a copy, made of weights that are on the device at that time.
    late = copy.deepcopy(one)
    offloading.execute(two, call_of("vae", two))
    assert places(one) == home[id(one)] and places(two) != home[id(two)]
    assert torch.equal(offloading.execute(late, call_of("transformer", late)), one(torch.ones(2, 4)))
    assert places(two) == home[id(two)]
    offloading.send_home()
    assert places(one) == home[id(one)]


def test_the_arguments_of_a_call_go_where_its_weights_are() -> None:
    class Said(nn.Module):
        def forward(self, **given: object) -> dict[str, object]:
            return given

    nested = {"x": torch.ones(1), "more": [torch.ones(1), {"deep": (torch.ones(1), "text")}], "scale": 2.0}
    said = Offloading(Offload.MODEL, torch.device("meta")).execute(module := Said(), ModelCall("vae", "forward", nested, module=module))
    assert said["x"].device.type == said["more"][0].device.type == said["more"][1]["deep"][0].device.type == "meta"
    assert (said["more"][1]["deep"][1], said["scale"]) == ("text", 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Offload.MODEL, Offload.GROUP])
def test_images_with_offload_are_bit_for_bit_those_without_also_with_adapters(kind: Offload) -> None:
    plain, rig = RunnerRig(), RunnerRig(offload=kind)
    assert rig.model.features == {"offload": kind}
    transformer, seen = rig.runner.pipeline.transformer, set()
    home = tuple(places(transformer))
    compute = rig.runner._stepper.batches.compute
    specs = [request(f"{index}", seed=index, loras=[LoRAUse(index, 1.0)] if index < 2 else []) for index in range(3)]

    def watch(module: nn.Module, call: ModelCall, is_plain: bool) -> object:
        result = compute(module, call, is_plain)
        seen.add((call.component, tuple(places(transformer)) == home))
        return result

    rig.runner._stepper.batches.compute = watch  # type: ignore[assignment]
    for each in (plain, rig):
        assert each.runner.loras is not None
        for number, name in enumerate(("stripes", "frame")):
            each.runner.loras.add_adapter(LoRARequest(name, number, str(DIGITS / "loras" / name)))
    expected, made = plain.run(*specs), rig.run(*specs)
    assert expected[1] == made[1] == {}
    assert all((made[0][name] == expected[0][name]).all() for name in expected[0])
    if kind is Offload.MODEL:
        # The denoiser was on the device during its own calls, and at home during others.
        assert {("transformer", False), ("vae", True)} <= seen and not {("transformer", True), ("vae", False)} & seen


@pytest.mark.slow
def test_new_weights_reach_the_home_of_weights_that_are_away() -> None:
    rig = RunnerRig(offload=Offload.MODEL)
    rig.run(request("before"))
    rig.runner._offloading.execute(vae := rig.runner.pipeline.vae, ModelCall("vae", "decode", {"z": torch.zeros(1, 4, 4, 4)}, module=vae))
    name = "vae.decoder.conv_out.bias"
    values = torch.full_like(vae.decoder.conv_out.bias, 0.25)
    assert rig.runner.load_weights([(name, values)]) == {name}
    assert torch.equal(vae.decoder.conv_out.bias, values)
    rig.run(request("after"))
    rig.runner._offloading.send_home()
    assert torch.equal(vae.decoder.conv_out.bias, values)


def test_a_cpu_has_nothing_to_offload_from() -> None:
    check_device(Offload.NONE, CPU)
    check_device(Offload.GROUP, torch.device("cuda"))
    for kind in (Offload.MODEL, Offload.GROUP):
        with pytest.raises(ConfigError, match=f"--offload {kind}: expected a GPU, found a CPU, where weights are in host memory anyway"):
            check_device(kind, CPU)


def test_a_rank_on_a_cpu_that_is_to_offload_refuses_before_it_reads_a_weight() -> None:
    worker = object.__new__(DiffusionWorker)
    # Without a model runner nothing can be read.
    worker._config, worker.device = WorkerConfig(model="m", served_name="m", offload=Offload.MODEL), CPU
    with pytest.raises(ConfigError, match="--offload model: expected a GPU, found a CPU"):
        worker.load_model(lambda done, total: None)
