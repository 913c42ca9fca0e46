# SPDX-License-Identifier: Apache-2.0
"""Options of the worker that exclude each other, with the reason; they are checked at start, before any request. Pure."""

import math

from diffusion_worker.config import Compile, LoadFormat, Offload, Quantization, StepCache, WorkerConfig
from diffusion_worker.errors import ConfigError

# Pairs of options that exclude each other, each with a value if only that value matters, and the reason.
EXCLUSIVE = (
    ("--tensor", "--sequence", "each splits the computation of one image between ranks, choose one"),
    ("--tensor", "--shard", "each of the two cuts the weights into parts"),
    ("--compile", "--exact", "compiled code differs in its last bits from what diffusers computes"),
    ("--compile", "--tensor", "ranks exchange tensors inside the code that would be compiled"),
    ("--compile", "--sequence", "ranks exchange tensors inside the code that would be compiled"),
    ("--compile", "--shard", "ranks collect the weights of a block inside the code that would be compiled"),
    ("--compile", "--step-cache", "both decide how a block is called"),
    ("--compile", "--offload group", "the weights of a block are moved inside the code that would be compiled"),
    ("--offload", "--tensor", "each is for a model that is too large for one GPU, choose one"),
    ("--offload", "--sequence", "never tried: ranks that compute a row together would need the same weights at the same time"),
    ("--offload", "--shard", "each is for a model that is too large for one GPU, choose one"),
    ("--offload", "--quantization", "quantised weights are made on the device and stay there"),
    ("--offload group", "--step-cache", "a skipped block would not load the weights of the next block"),
    ("--quantization", "--tensor", "quantised weights cannot be cut into parts"),
    ("--quantization", "--shard", "quantised weights cannot be cut into parts"),
    ("--quantization", "--load-format dummy", "there are no weights to quantise"),
    ("--step-cache", "--exact", "an exact request leaves nothing out, so it would have no effect"),
    ("--step-cache", "--sequence", "a rank sees only its part of the tokens, so ranks would decide differently"),
    ("--step-cache", "--shard", "ranks collect the weights of each block together, so none can skip one"),
)
# Options that exclude sleep: their weights are in memory that the worker cannot give back, or are not on the device anyway.
NO_SLEEP = ("--shard", "--offload")


def check_together(config: WorkerConfig) -> None:
    """Raise ConfigError for the first given pair of EXCLUSIVE, or if the product of the group sizes does not divide `--ranks`."""
    given = given_options(config)
    for option, other, why in EXCLUSIVE:
        if option in given and other in given:
            first, second = given[option], given[other]
            raise ConfigError(f"{first} with {second}: not supported together: {why}")
    sizes = {option: size for option, size in _sizes(config).items() if size > 1}
    if config.ranks % (product := math.prod(sizes.values())):
        options = " x ".join(given[option] for option in sizes)
        raise ConfigError(f"{options}: expected a divisor of --ranks {config.ranks}, found {product}")


def sleep_blocker(config: WorkerConfig) -> str | None:
    """Return `--shard` or `--offload` with its value, if one is in use, because neither lets the worker sleep; None if it can sleep."""
    given = given_options(config)
    return next((given[option] for option in NO_SLEEP if option in given), None)


def given_options(config: WorkerConfig) -> dict[str, str]:
    """Return the options that may exclude others and are not at their defaults, each as a text such as `--tensor 2`, keyed by name.

    An option with a kind is there twice: under its name, `--offload`, and under name and kind, `--offload group`.
    """
    kinds = (
        ("--compile", config.compile, Compile.NONE),
        ("--offload", config.offload, Offload.NONE),
        ("--quantization", config.quantization, Quantization.NONE),
        ("--step-cache", config.step_cache, StepCache.NONE),
        ("--load-format", config.load_format, LoadFormat.DEFAULT),
    )
    given = {name: f"{option} {kind}" for option, kind, none in kinds if kind is not none for name in (option, f"{option} {kind}")}
    given |= {option: f"{option} {size}" for option, size in _sizes(config).items() if size > 1}
    return given | ({"--exact": "--exact"} if config.exact else {})


def _sizes(config: WorkerConfig) -> dict[str, int]:
    """Return the size of each parallel kind by its option; their product must divide the ranks."""
    return {"--tensor": config.tensor, "--sequence": config.sequence, "--shard": config.shard}
