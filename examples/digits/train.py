# SPDX-License-Identifier: Apache-2.0
"""Trains the digits model and its adapters again, from scikit-learn's digits alone: `python examples/digits/train.py`.

Everything is seeded, so the same machine gives the same weights; another processor may round differently and give others as good.
README.md beside this file says what it costs. `evaluate.py` then measures the result.
"""

import argparse
import os
import time
from pathlib import Path

# Threads that wait for each other without sleeping starve on a machine that has other work; has to be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from digits_training.adapters import RECIPES, train_adapter
from digits_training.architecture import build_pipeline, load_pipeline, save_pipeline
from digits_training.autoencoder import train_autoencoder
from digits_training.denoiser import train_denoiser
from digits_training.images import load_scans

HERE = Path(__file__).parent
SEED = 0


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    scans = load_scans()
    started = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)

    model: Path = options.output / "model"
    if not options.adapters_only:
        pipeline = build_pipeline(SEED)
        train_autoencoder(pipeline.vae, scans, seed=SEED + 1, report=report)
        train_denoiser(pipeline, scans, seed=SEED + 2, report=report)
        save_pipeline(pipeline, model)
    for style in RECIPES:
        # Loaded again each time: an adapter is trained on the fp16 weights that it will be used with.
        train_adapter(load_pipeline(model), scans, options.output / "loras" / style, style=style, seed=SEED + 3, report=report)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="where model/ and loras/ are written (default: beside this script)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: 2)")
    parser.add_argument("--adapters-only", action="store_true", help="keep the model that is there and train only the adapters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
