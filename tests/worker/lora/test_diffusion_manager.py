# SPDX-License-Identifier: Apache-2.0
"""The adapters of a rank as requests name them: shared bytes, evictions, refusals, and the calls of the server."""

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import diffusion_worker.lora
from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import LoRAUse
from diffusion_worker.ranks.worker_proc import RPC_METHODS
from diffusion_worker.runner.diffusion_worker import DiffusionWorker
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from support.lora.adapters import write_adapter
from support.runner import rank_processes
from support.runner.rig import OneRank, RunnerRig
from support.worker.process import DIGITS


class TwoParts(nn.Module):
    """A toy denoiser that applies the linear layers `first`, from 8 to 6 features, and `second`, back to 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class Rig:
    """A LoRA manager with few slots over a denoiser of two layers with fixed weights. Each adapter is written to a folder of its own.

    A test puts the adapters that are in use into `running`.
    """

    def __init__(self, folder: Path, *, slots: int = 2, cached: int = 3, max_rank: int = 16) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.denoiser = TwoParts()
        self.linears = {"first": self.denoiser.first, "second": self.denoiser.second}
        self.x = torch.randn(2, 5, 8)
        self.running: list[LoRAUse] = []
        self.manager = DiffusionLoRAManager(
            {"transformer": self.denoiser},
            denoiser="transformer",
            slots=slots,
            cached=cached,
            max_rank=max_rank,
            device=torch.device("cpu"),
            in_use=lambda: self.running,
        )

    def request(self, number: int, *, seed: int | None = None, rank: int = 4) -> LoRARequest:
        """Write an adapter to a folder of its own and return a request to load it. The same seed and rank give the same bytes."""
        path = self.folder / f"adapter-{number}"
        path.mkdir(exist_ok=True)
        write_adapter(path, self.linears, rank=rank, seed=number if seed is None else seed)
        return LoRARequest(f"adapter-{number}", number, str(path))

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.manager.add_adapter(self.request(number))

    def made(self, *uses: LoRAUse) -> torch.Tensor:
        """Activate adapters, run the denoiser on two rows that both use all of them, and return its output."""
        self.manager.activate(uses)
        with torch.inference_mode(), self.manager.set_adapter_mapping("transformer", [list(uses)] * 2):
            made: torch.Tensor = self.denoiser(self.x)
        return made


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield Rig(tmp_path)


def test_what_is_loaded_is_described_and_listed_and_an_unknown_id_is_nothing(rig: Rig) -> None:
    loaded = rig.manager.add_adapter(rig.request(1))
    assert (loaded.rank, loaded.modules, loaded.components, loaded.evicted) == (4, 2, ["transformer"], [])
    assert rig.manager.list_adapters() == [1]
    assert rig.manager.remove_adapter(1)
    assert not rig.manager.remove_adapter(1)
    assert rig.manager.list_adapters() == []
    assert not rig.manager.pin_adapter(1)
    assert not rig.manager.unpin_adapter(1)


def test_loading_twice_under_one_id_says_the_same_and_another_adapter_under_it_is_a_conflict(rig: Rig) -> None:
    request = rig.request(1)
    assert rig.manager.add_adapter(request) == rig.manager.add_adapter(request)
    with pytest.raises(RequestError, match="its id 1 is that of adapter 'adapter-1'") as refused:
        rig.manager.add_adapter(LoRARequest("other", 1, rig.request(2).lora_path))
    assert refused.value.code is ErrorCode.CONFLICT


def test_the_same_bytes_under_two_names_share_one_place_in_memory_and_one_slot(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=1, cached=1)
    rig.manager.add_adapter(rig.request(1))
    twin = rig.manager.add_adapter(rig.request(2, seed=1), LoadOptions(evict=[1]))
    assert twin.evicted == []
    assert rig.manager.list_adapters() == [1, 2]
    rig.running = [LoRAUse(1, 1.0)]
    one, two = rig.made(LoRAUse(1, 1.0)), rig.made(LoRAUse(2, 1.0))
    assert torch.equal(one, two)
    # Two names of one adapter are used, and their scales add up.
    assert torch.equal(rig.made(LoRAUse(1, 0.5), LoRAUse(2, 0.5)), one)
    assert rig.manager.remove_adapter(1)
    assert torch.equal(rig.made(LoRAUse(2, 1.0)), one)


def test_the_same_bytes_with_another_strength_of_their_own_are_another_adapter(rig: Rig) -> None:
    first, second = rig.request(1), rig.request(2, seed=1)
    config = Path(second.lora_path) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 8}))
    assert rig.manager.add_adapter(first).digest == rig.manager.add_adapter(second).digest
    assert not torch.allclose(rig.made(LoRAUse(1, 1.0)), rig.made(LoRAUse(2, 1.0)))
    assert torch.allclose(rig.made(LoRAUse(1, 2.0)), rig.made(LoRAUse(2, 1.0)), atol=1e-5)


def test_the_same_path_with_new_bytes_is_a_new_adapter(rig: Rig) -> None:
    old = rig.request(1)
    first = rig.manager.add_adapter(old)
    before = rig.made(LoRAUse(1, 1.0))
    write_adapter(old.lora_path, rig.linears, seed=99)
    second = rig.manager.add_adapter(LoRARequest("adapter-1", 2, old.lora_path))
    assert first.digest != second.digest
    assert torch.equal(rig.made(LoRAUse(1, 1.0)), before)
    assert not torch.allclose(rig.made(LoRAUse(2, 1.0)), before)
    assert rig.manager.identity_in("transformer", [LoRAUse(1, 1.0)]) != rig.manager.identity_in("transformer", [LoRAUse(2, 1.0)])


def test_the_callers_list_says_who_goes_and_only_as_many_as_needed_go(rig: Rig) -> None:
    rig.add(1, 2, 3)
    loaded = rig.manager.add_adapter(rig.request(4), LoadOptions(evict=[77, 2, 1]))
    assert loaded.evicted == [2]
    assert rig.manager.list_adapters() == [1, 3, 4]


def test_without_a_list_the_least_recently_used_goes_but_none_that_is_in_use_or_pinned(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.running = [LoRAUse(1, 1.0)]
    assert rig.manager.pin_adapter(2)
    assert rig.manager.add_adapter(rig.request(4)).evicted == [3]
    assert rig.manager.pin_adapter(4)
    with pytest.raises(RequestError, match="3 adapters are in host memory, and too few of them can be evicted") as refused:
        rig.add(5)
    assert refused.value.code is ErrorCode.CAPACITY_EXCEEDED
    assert rig.manager.list_adapters() == [1, 2, 4]
    assert rig.manager.unpin_adapter(4)
    assert rig.manager.add_adapter(rig.request(5)).evicted == [4]


def test_of_the_callers_list_none_goes_that_is_in_use_or_shares_its_memory_with_another_name(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.manager.add_adapter(rig.request(4, seed=2))
    rig.running = [LoRAUse(1, 1.0)]
    assert rig.manager.add_adapter(rig.request(5), LoadOptions(evict=[1, 2, 3])).evicted == [3]
    assert rig.manager.add_adapter(rig.request(6), LoadOptions(evict=[4, 2])).evicted == [2, 4]


def test_where_nobody_may_go_a_new_version_has_room_beside_the_old_one_and_no_third(rig: Rig) -> None:
    rig.add(1, 2, 3)
    assert rig.manager.add_adapter(rig.request(4), LoadOptions(evict=[])).evicted == []
    with pytest.raises(RequestError) as refused:
        rig.manager.add_adapter(rig.request(5), LoadOptions(evict=[]))
    assert refused.value.code is ErrorCode.CAPACITY_EXCEEDED
    assert rig.manager.list_adapters() == [1, 2, 3, 4]


def test_a_copy_of_two_names_stays_until_the_pin_of_each_has_ended(rig: Rig) -> None:
    rig.add(1, 2)
    rig.manager.add_adapter(rig.request(3, seed=2))
    assert rig.manager.pin_adapter(2)
    assert not rig.manager.unpin_adapter(3)
    assert rig.manager.pin_adapter(3)
    assert rig.manager.remove_adapter(2)
    rig.running = [LoRAUse(1, 1.0)]
    assert rig.manager.add_adapter(rig.request(4)).evicted == []
    assert rig.manager.add_adapter(rig.request(5)).evicted == [4]
    assert rig.manager.unpin_adapter(3)
    assert rig.manager.add_adapter(rig.request(6)).evicted == [3]


def test_a_refused_adapter_evicts_nobody_and_leaves_nothing(rig: Rig, tmp_path: Path) -> None:
    rig.add(1, 2, 3)
    bad = LoRARequest("bad", 4, str(tmp_path / "nowhere"))
    with pytest.raises(RequestError):
        rig.manager.add_adapter(bad, LoadOptions(evict=[1]))
    with pytest.raises(RequestError) as refused:
        rig.manager.add_adapter(rig.request(4), LoadOptions(evict=[1], digest="sha256:" + "0" * 64))
    assert refused.value.code is ErrorCode.DIGEST_MISMATCH
    assert rig.manager.list_adapters() == [1, 2, 3]


def test_requests_take_slots_in_turn_and_never_that_of_a_running_one(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.running = [LoRAUse(1, 1.0), LoRAUse(2, 0.5)]
    rig.manager.activate(rig.running)
    with pytest.raises(RequestError, match="all 2 slots are in use") as refused:
        rig.manager.activate([LoRAUse(3, 1.0)])
    assert refused.value.code is ErrorCode.CAPACITY_EXCEEDED
    with pytest.raises(RequestError) as refused:
        rig.manager.activate([LoRAUse(9, 1.0)])
    assert refused.value.code is ErrorCode.ADAPTER_NOT_LOADED
    # An adapter with a scale of 0 needs no slot.
    rig.manager.activate([LoRAUse(3, 0.0)])
    rig.running = [LoRAUse(2, 0.5)]
    rig.manager.activate([LoRAUse(3, 1.0)])


def test_after_every_change_of_slots_each_adapter_makes_bit_by_bit_what_it_made_first(rig: Rig) -> None:
    rig.add(1, 2, 3)
    base = rig.made()
    first = {number: rig.made(LoRAUse(number, 0.7)) for number in (1, 2, 3)}
    for number in (3, 1, 2, 1, 3):
        assert torch.equal(rig.made(LoRAUse(number, 0.7)), first[number])
        assert torch.equal(rig.made(), base)


def test_an_adapter_of_a_larger_rank_leaves_the_active_one_as_it_is(rig: Rig) -> None:
    rig.add(1)
    before = rig.made(LoRAUse(1, 1.0))
    rig.manager.add_adapter(rig.request(2, rank=16))
    large = rig.made(LoRAUse(2, 1.0))
    assert torch.equal(rig.made(LoRAUse(1, 1.0)), before)
    # A small adapter leaves nothing of a large one in its slot.
    rig.manager.remove_adapter(1)
    rig.manager.remove_adapter(2)
    rig.add(1)
    assert torch.equal(rig.made(LoRAUse(1, 1.0)), before)
    assert not torch.allclose(large, before)


def test_removing_an_active_adapter_gives_its_rows_an_error_and_never_the_base(rig: Rig) -> None:
    rig.add(1, 2)
    rig.made(LoRAUse(1, 1.0))
    assert rig.manager.remove_adapter(1)
    with pytest.raises(RequestError) as refused, rig.manager.set_adapter_mapping("transformer", [[LoRAUse(1, 1.0)]]):
        pass
    assert refused.value.code is ErrorCode.ADAPTER_NOT_LOADED
    with pytest.raises(RequestError), rig.manager.set_adapter_mapping("transformer", [[LoRAUse(2, 1.0)]]):  # in memory, in no slot
        pass


def test_dummy_adapters_change_nothing_and_are_gone_afterwards(rig: Rig) -> None:
    with rig.manager.dummy_adapters(2) as none:
        assert none == []  # no layer has slots yet
    rig.add(1)
    base, styled = rig.made(), rig.made(LoRAUse(1, 1.0))
    with rig.manager.dummy_adapters(3) as dummies:
        assert len(dummies) == 2
        assert torch.equal(rig.made(*(LoRAUse(number, 1.0) for number in dummies)), base)
    assert rig.manager.list_adapters() == [1]
    assert torch.equal(rig.made(LoRAUse(1, 1.0)), styled)


def test_without_slots_adapters_are_refused_by_the_name_of_the_option(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=0, cached=0)
    with pytest.raises(RequestError, match="adapters are off, --max-loras is 0") as refused:
        rig.add(1)
    assert refused.value.code is ErrorCode.CAPACITY_EXCEEDED
    with rig.manager.dummy_adapters(1) as dummies:
        assert dummies == []


def test_a_model_without_a_layer_for_adapters_refuses_them_by_its_name(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    bare = DiffusionLoRAManager(
        {"transformer": nn.Sequential(nn.ReLU())}, denoiser="transformer", slots=1, cached=1, max_rank=4, device=torch.device("cpu")
    )
    with pytest.raises(RequestError, match="no layer for adapters in Sequential") as refused:
        bare.add_adapter(rig.request(1))
    assert refused.value.code is ErrorCode.NO_MATCHING_MODULES


def test_the_names_of_the_package_are_there_and_importing_it_imports_no_torch() -> None:
    names = ["DiffusionLoRAManager", "LRUCacheLoRAModelManager", "LoRAModel", "LoRAModelManager", "LoRARequest"]
    assert list(diffusion_worker.lora.__all__) == names
    assert [name for name in names if getattr(diffusion_worker.lora, name).__name__ != name] == []
    code = "import sys; from diffusion_worker.lora import LoRARequest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = diffusion_worker.lora.Nothing


# --- on several ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_is_registered_on_all_ranks_or_on_none_and_nothing_goes_for_one_that_is_not() -> None:
    first, second = rank_processes.run("support.runner.scenarios:one_rank_cannot_load")
    assert [each["listed"] for each in first] == [[1], [1], [1], [4]]
    assert [each["evicted"] for each in first] == [[], [], [], [1]]
    assert [each["code"] for each in first] == ["", "InvalidAdapter", "RankFailed", ""]
    assert "missing" in first[1]["said"]
    assert "the ranks read different files" in first[2]["said"]
    # Both ranks give the message of the rank that found the error.
    assert [{**each, "said": each["said"].split("'")[1:2]} for each in first] == [
        {**each, "said": each["said"].split("'")[1:2]} for each in second
    ]


# --- calls of the server --------------------------------------------------------------------------------------------------


def worker_around(runner: DiffusionModelRunner) -> DiffusionWorker:
    """Return a rank's worker around a runner; it has no process group and no other state."""
    made = object.__new__(DiffusionWorker)
    made.model_runner = runner
    return made


def test_a_worker_that_has_loaded_nothing_knows_no_adapters() -> None:
    config = WorkerConfig(model="(none)", served_name="none")
    worker = worker_around(DiffusionModelRunner(config, torch.device("cpu"), OneRank()))  # type: ignore[arg-type]
    assert worker.list_loras() == []
    assert not worker.remove_lora(lora_int_id=1)
    assert not worker.pin_lora(lora_int_id=1)
    assert not worker.unpin_lora(lora_int_id=1)


def test_every_method_that_the_server_may_call_takes_the_arguments_that_the_wire_has_for_it() -> None:
    for name, types in RPC_METHODS.items():
        parameters = list(inspect.signature(getattr(DiffusionWorker, name)).parameters)[1:]
        assert types is not None and parameters == list(types)
    assert {"add_lora", "remove_lora", "list_loras", "pin_lora", "unpin_lora"} <= RPC_METHODS.keys()


def test_the_calls_of_a_loaded_worker_say_what_they_did() -> None:
    worker = worker_around(RunnerRig(max_loras=1, max_cached_loras=1).runner)
    stripes, frame = (LoRARequest(name, number, str(DIGITS / "loras" / name)) for number, name in ((1, "stripes"), (2, "frame")))
    assert worker.add_lora(request=stripes, options=LoadOptions()).evicted == []
    assert worker.pin_lora(lora_int_id=1)
    with pytest.raises(RequestError, match="too few of them can be evicted"):
        worker.add_lora(request=frame, options=LoadOptions())
    assert worker.unpin_lora(lora_int_id=1)
    assert worker.add_lora(request=frame, options=LoadOptions()).evicted == [1]
    assert worker.list_loras() == [2]
    assert worker.remove_lora(lora_int_id=2)
    assert not worker.remove_lora(lora_int_id=2)


@pytest.mark.slow
def test_fewer_adapters_in_memory_than_in_slots_are_refused_at_load_by_the_name_of_the_option() -> None:
    with pytest.raises(ConfigError, match="--max-cached-loras: expected at least --max-loras 2, found 1"):
        RunnerRig(max_loras=2, max_cached_loras=1)
