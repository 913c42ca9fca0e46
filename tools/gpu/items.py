# SPDX-License-Identifier: Apache-2.0
"""Every item of `make gpu`, most telling first. Items of one process follow each other and share its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """An item of `make gpu`: its function as `module:name`, the process that runs it, and the seconds that it may take on a GPU.

    Items in a row with the same process share it.
    """

    name: str
    process: str
    function: str
    limit_s: float
    what: str


# Processes that have a model of real size each.
MODELS = ("sd3", "flux", "wan")
ITEMS = (
    Item("device", "device", "device:tell", 40, "torch finds the device, and says which"),
    Item("start", "digits", "digits:start", 60, "a spawned rank makes digits in float32 as the CPU does"),
    Item("bfloat16", "digits-bfloat16", "digits:judged", 60, "digits in bfloat16, read by the judge"),
    Item("adapters", "digits-bfloat16", "digits:adapters", 40, "eight images in a batch, with three adapters and without"),
    Item("verified", "digits-bfloat16", "digits:verified", 20, "a rank sleeps and wakes; its wake is verified"),
    Item("killed", "digits-bfloat16", "digits:killed", 70, "a rank is killed; images are made again"),
    Item("sleep", "sd3", "memory:sleep", 90, "SD3.5-medium sleeps and wakes; memory as the driver says"),
    Item("flux-load", "flux", "steps:load", 60, "FLUX.1-dev, 12 billion random weights, made on the device"),
    Item("flux-alone", "flux", "steps:alone", 40, "4 steps alone, against diffusers' own loop (P1)"),
    Item("flux-batch", "flux", "steps:batch", 60, "4 images in a batch, against diffusers' own batch (P8)"),
    Item("flux-adapters", "flux", "steps:adapters", 60, "the batch with 4 adapters, against the batch without (P2)"),
    Item("flux-profile", "flux", "kernels:profile", 30, "three steady steps: gaps, waits, kernels, share of the GEMM roof (P13)"),
    Item("flux-attention", "flux", "kernels:attention", 20, "attention backends of diffusers"),
    Item("flux-fp8", "flux", "kernels:fp8", 20, "a block in fp8, where torchao is there"),
    Item("flux-compile", "flux", "kernels:compiled", 60, "blocks compiled, a single row, default mode"),
    Item("wan-load", "wan", "steps:load", 40, "Wan 2.1 1.3B with random weights"),
    Item("wan-alone", "wan", "steps:alone", 40, "4 steps alone, against diffusers' own loop (P1)"),
    Item("tests", "tests", "marked:run_tests", 60, "the tests marked gpu"),
    Item("benchmarks", "benchmarks", "marked:run_benchmarks", 120, "the benchmarks that take --device (P2 at 8 adapters)"),
)
