# SPDX-License-Identifier: Apache-2.0
"""The modules of a model folder with random weights: the architecture comes from the configs, no weights file is read.

They serve to try a deployment, its sizes and its speed before the weights are there. Modules are built without memory for their
parameters. Each parameter is filled where it is placed, on the rank's device. The same folder gives the same weights on every rank, on
every device and at every start.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from diffusers.models.modeling_utils import no_init_weights

from diffusion_worker.errors import ConfigError
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.random_weights import RandomTensor, random_tensor
from diffusion_worker.memory.weights import read_in_place
from diffusion_worker.runner.loading.component import class_of

# Around 1 for factors of norms. Elsewhere around 0, and never all 0: every output of the model would be zero, whatever the request.
SMALL = 0.02
NORM_FACTORS = ("weight", "gamma")


def build_dummy_modules(
    folder: Path, classes: Mapping[str, tuple[str, str]], dtype_of: Callable[[str], torch.dtype], unread: Placeholders | None = None
) -> dict[str, torch.nn.Module]:
    """Build those components that are torch modules from their config, with random parameters; return them by name.

    `classes` is (library, class) by component, and `dtype_of` returns a component's dtype. With `unread` the parameters are placeholders
    in it, which take no memory before `ModelWeights.place`. Otherwise they get their values here.

    Raises:
        ConfigError: a class cannot be found, or a component's folder has no config.json.
    """
    modules = {}
    for name, (library, kind) in sorted(classes.items()):
        found = class_of(name, library, kind)
        if isinstance(found, type) and issubclass(found, torch.nn.Module):
            modules[name] = _build(found, name, folder / name, dtype_of(name), unread)
    return modules


def _build(kind: Any, name: str, folder: Path, dtype: torch.dtype, unread: Placeholders | None) -> torch.nn.Module:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"component {name}: expected a file config.json in {folder}, found none")
    # Buffers are computed as the class does it, with its own random numbers if it wants any.
    with torch.random.fork_rng(devices=[]), no_init_weights(), accelerate.init_empty_weights():
        torch.manual_seed(0)
        if issubclass(kind, transformers.PreTrainedModel):
            module = kind._from_config(kind.config_class.from_pretrained(folder, local_files_only=True))
        else:
            module = kind.from_config(kind.load_config(folder, local_files_only=True))
    if issubclass(kind, transformers.PreTrainedModel):
        # Empty parameters are made one by one, so those that the class ties are not the same object yet.
        module.tie_weights()
    built: torch.nn.Module = module
    _cast(built, dtype)
    filled = Placeholders() if unread is None else unread
    _promise(built, name, filled)
    if unread is None:
        read_in_place(built, filled, lambda count: None)
    return built


def _promise(module: torch.nn.Module, component: str, unread: Placeholders) -> None:
    """Put a placeholder of random contents in the place of every parameter; tied ones stay the same object."""
    made: dict[int, torch.nn.Parameter] = {}
    for path, owner, leaf, parameter in list(_places(module)):
        if id(parameter) not in made:
            contents = _contents(f"{component}.{path}", owner, leaf, parameter)
            made[id(parameter)] = torch.nn.Parameter(unread.make(contents, parameter.dtype), requires_grad=False)
        owner._parameters[leaf] = made[id(parameter)]


def _places(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter]]:
    """Yield each parameter at each of its places, with its path and the module that has it."""
    for prefix, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, owner, leaf, parameter


def _contents(path: str, owner: torch.nn.Module, leaf: str, parameter: torch.nn.Parameter) -> RandomTensor:
    """Choose random contents as a freshly made layer has them: factors of norms around 1, matrices by their inputs, all else small."""
    if leaf in NORM_FACTORS and (parameter.dim() < 2 or leaf == "gamma"):
        return random_tensor(path, parameter, mean=1.0, spread=SMALL)
    if parameter.dim() < 2 or isinstance(owner, torch.nn.Embedding):
        return random_tensor(path, parameter, mean=0.0, spread=SMALL)
    inputs = parameter.numel() // parameter.shape[0]
    return random_tensor(path, parameter, mean=0.0, spread=max(1, inputs) ** -0.5)


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a module to a dtype, except for what its class keeps in float32 when it is loaded."""
    kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    # diffusers' own `to` warns of modules that stay in float32. Here they do.
    torch.nn.Module.to(module, dtype)
    for name, parameter in module.named_parameters():
        if any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(torch.float32)
