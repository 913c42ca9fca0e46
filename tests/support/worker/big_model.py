# SPDX-License-Identifier: Apache-2.0
"""The digits pipeline with a transformer of over a gigabyte, for effects that only show with size.

Real: the pipeline and all that the digits have of it. Not real: the transformer's weights, which are random.
"""

import json
import shutil
from pathlib import Path

from support.worker.process import DIGITS_MODEL

# 44 heads of 32: a width of 1,408, where four joint blocks have about 285 million parameters, 1.1 GB in float32.
HEADS = 44


def make_big_model(folder: Path) -> Path:
    """Write the model (0.6 GB on disk, in float16) and return its folder."""
    # Late: a test session that makes no big model need not import torch.
    import torch
    from diffusers import SD3Transformer2DModel

    shutil.copytree(DIGITS_MODEL, folder, ignore=lambda path, names: [name for name in names if Path(path).name == "transformer"])
    config = json.loads((DIGITS_MODEL / "transformer" / "config.json").read_text())
    config |= {"num_attention_heads": HEADS, "caption_projection_dim": HEADS * config["attention_head_dim"]}
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel.from_config(config).to(torch.float16)
    transformer.save_pretrained(folder / "transformer")
    return folder
