# SPDX-License-Identifier: Apache-2.0
"""Which options of the worker cannot be used together, and why: known at start, never found out by a request. Pure."""

from diffusion_worker.config import Compile, Offload, Quantization, StepCache, WorkerConfig
from diffusion_worker.errors import ConfigError

# An option as it is given, with its value where that matters, and another that does not go with it.
EXCLUSIVE = (
    ("--compile", "--exact", "compiled code differs in its last bits from what diffusers computes"),
    ("--compile", "--tensor", "ranks exchange what they have inside of what would be compiled"),
    ("--compile", "--sequence", "ranks exchange what they have inside of what would be compiled"),
    ("--compile", "--shard", "ranks collect the weights of a block as it begins, inside of what would be compiled"),
    ("--compile", "--step-cache", "both decide how a block is called"),
    ("--compile", "--offload group", "the weights of a block come inside of what would be compiled"),
    ("--offload", "--tensor", "each is an answer to a model that is too large for a GPU, choose one"),
    ("--offload", "--sequence", "never tried: ranks that compute a row together would have to have its weights together"),
    ("--offload", "--shard", "each is an answer to a model that is too large for a GPU, choose one"),
    ("--offload", "--quantization", "quantised weights are made on the device and stay there"),
    ("--offload group", "--step-cache", "what a step leaves out would not bring the weights of what comes after it"),
)
# Their weights are in no memory of ours that could be given back, or are not on the device anyway.
NO_SLEEP = ("--shard", "--offload")


def check_together(config: WorkerConfig) -> None:
    """Whether the options go together; raises ConfigError with the names of two that do not."""
    given = given_options(config)
    for option, other, why in EXCLUSIVE:
        if option in given and other in given:
            raise ConfigError(f"{given[option]} with {given[other]}: not supported together: {why}")


def why_awake(config: WorkerConfig) -> str | None:
    """The option, as it is given, with which a worker does not sleep; None where it does."""
    given = given_options(config)
    return next((given[option] for option in NO_SLEEP if option in given), None)


def given_options(config: WorkerConfig) -> dict[str, str]:
    """The options in use by their names, and where they have a kind by name and kind, each as it is given."""
    kinds = (
        ("--compile", config.compile, Compile.NONE),
        ("--offload", config.offload, Offload.NONE),
        ("--quantization", config.quantization, Quantization.NONE),
        ("--step-cache", config.step_cache, StepCache.NONE),
    )
    given = {name: f"{option} {kind}" for option, kind, none in kinds if kind is not none for name in (option, f"{option} {kind}")}
    sizes = (("--tensor", config.tensor), ("--sequence", config.sequence), ("--shard", config.shard))
    given |= {option: f"{option} {size}" for option, size in sizes if size > 1}
    return given | ({"--exact": "--exact"} if config.exact else {})
