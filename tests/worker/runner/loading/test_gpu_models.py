# SPDX-License-Identifier: Apache-2.0
"""The committed configurations of real models: their sizes, and that nothing of their weights is made before it is placed."""

from pathlib import Path

import pytest
import torch

from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.runner.loading.dummy_weights import build_dummy_modules
from tools.gpu.models import MODEL_NAMES, description, write_model

# Parameters as the models' authors count them, in billions.
BILLIONS = {
    ("flux", "transformer"): 11.90,
    ("flux", "text_encoder"): 0.123,
    ("flux", "text_encoder_2"): 4.76,
    ("flux", "vae"): 0.084,
    ("sd3", "transformer"): 2.24,
    ("sd3", "text_encoder"): 0.124,
    ("sd3", "text_encoder_2"): 0.695,
    ("sd3", "text_encoder_3"): 4.76,
    ("sd3", "vae"): 0.084,
    ("wan", "transformer"): 1.42,
    ("wan", "text_encoder"): 5.68,
    ("wan", "vae"): 0.127,
}
PARTS = [(name, part) for name in MODEL_NAMES for part in description(name, tiny=False)["parts"]]


def test_every_part_of_every_model_is_counted() -> None:
    assert set(PARTS) == set(BILLIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_model_has_as_many_parameters_as_the_real_one_and_none_takes_memory_before_it_is_placed(name: str, tmp_path: Path) -> None:
    described = write_model(name, tmp_path / name, tiny=False)
    classes = {part: (library, kind) for part, (library, kind, _) in described["parts"].items()}
    modules = build_dummy_modules(tmp_path / name, classes, lambda _: torch.bfloat16, Placeholders())
    counts = {part: sum(each.numel() for each in module.parameters()) / 1e9 for part, module in modules.items()}
    assert counts == {part: pytest.approx(BILLIONS[name, part], rel=0.01) for part in modules}
    assert all(each.untyped_storage().nbytes() <= 4 for module in modules.values() for each in module.parameters())
