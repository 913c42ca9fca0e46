# SPDX-License-Identifier: Apache-2.0
"""The load of a pipeline from a model folder into host memory: diffusers' own classes, one of yours, or random weights.

Weights are read from safetensors in the folder and nothing is ever downloaded. A failed load is a `ConfigError` that names the option or
the component.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from diffusion_worker.config import LoadFormat, WorkerConfig, read_model_index, split_import_path
from diffusion_worker.errors import ConfigError
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.runner.loading.component import class_of, is_loadable, load_component
from diffusion_worker.runner.loading.component_dtypes import ComponentDtypes
from diffusion_worker.runner.loading.dummy_weights import build_dummy_modules
from diffusion_worker.runner.loading.quantization import quantization_options, require_quantizable
from diffusion_worker.runner.pipelines.step_support import missing_libraries
from diffusion_worker.runner.pipelines.view import modules_of, silence


def checkpoint_folder(config: WorkerConfig, component: str) -> Path:
    """Return the folder of a component's safetensors files."""
    return Path(config.model) / component


def load_pipeline(config: WorkerConfig, dtype: torch.dtype, *, unread: Placeholders | None = None) -> Any:
    """Load the pipeline of the model folder into host memory, in the way of `config.load_format`.

    Weights get this dtype, except for those of components with one of their own. With `unread` most weights stay in their files, and
    `unread` has their placeholders. They must be placed before anything is computed.

    Raises:
        ConfigError: no such pipeline class, it cannot be made from this folder, or it lacks a component whose dtype is asked for.
    """
    index = read_model_index(config.model)
    pipeline_class = _pipeline_class(config, index)
    diffusers.logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    # Guiders are made again for each request, and each would log that it is experimental.
    diffusers.logging.get_logger("diffusers.guiders.guider_utils").setLevel(diffusers.logging.ERROR)
    dtypes = ComponentDtypes(dtype, config, pipeline_class)
    load = _load_modular if issubclass(pipeline_class, diffusers.ModularPipeline) else _load_classic
    try:
        pipeline = load(config, pipeline_class, index, dtypes, unread)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, ImportError) as error:
        raise ConfigError(f"model {config.model!r}: {pipeline_class.__name__} cannot be loaded: {error}") from error
    _check_components(config, pipeline)
    dtypes.outcome(modules_of(pipeline))
    silence(pipeline)
    return pipeline


def check_pipeline_class(config: WorkerConfig) -> None:
    """Raise ConfigError if the configured pipeline class does not exist, is no pipeline, or lacks a library; load no weights.

    Callers ask this before they give up a loaded pipeline.
    """
    _pipeline_class(config, read_model_index(config.model))


def _pipeline_class(config: WorkerConfig, index: dict[str, Any]) -> Any:
    if config.load_format is LoadFormat.CUSTOM_PIPELINE:
        found = _import_class(config.pipeline)
        if not _is_pipeline(found):
            raise ConfigError(f"--pipeline {config.pipeline!r}: expected a DiffusionPipeline or ModularPipeline class, found {found!r}")
        return found
    name = str(index["_class_name"] if config.pipeline == "auto" else config.pipeline)
    found = getattr(diffusers, name, None)
    if missing := missing_libraries(found):
        raise ConfigError(f"--pipeline: {name} needs Python packages that the worker does not have: {', '.join(missing)}")
    if not _is_pipeline(found):
        raise ConfigError(f"model {config.model!r}: {name!r} is not a pipeline of diffusers {diffusers.__version__}")
    return found


def _is_pipeline(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, diffusers.DiffusionPipeline | diffusers.ModularPipeline)


def _import_class(path: str) -> Any:
    """Import the object at `module:Class` or `module.Class`; raise ConfigError with the error of an import that fails."""
    module, name = split_import_path(path, "--pipeline")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ConfigError(f"--pipeline {path!r}: module {module} has no {name}") from None
    except Exception as error:
        raise ConfigError(f"--pipeline {path!r}: module {module} cannot be imported: {type(error).__name__}: {error}") from error


def _load_classic(
    config: WorkerConfig, pipeline_class: Any, index: dict[str, Any], dtypes: ComponentDtypes, unread: Placeholders | None
) -> Any:
    # Optional components are [null, null] in the index; the classes that know them want them passed.
    known = inspect.signature(pipeline_class.__init__).parameters
    given: dict[str, Any] = {name: None for name, value in index.items() if value == [None, None] and name in known}
    classes = {name: kind for name, kind in _classes_of(index).items() if name in known}
    given |= _modules(config, classes, dtypes, unread)
    return pipeline_class.from_pretrained(config.model, dtype=dtypes.for_diffusers(), use_safetensors=True, local_files_only=True, **given)


def _load_modular(
    config: WorkerConfig, pipeline_class: Any, index: dict[str, Any], dtypes: ComponentDtypes, unread: Placeholders | None
) -> Any:
    """Load a modular pipeline from a folder with an index of either kind: the components its blocks want and the folder has."""
    pipeline = pipeline_class(pretrained_model_name_or_path=config.model, local_files_only=True)
    here = {name for name in pipeline.pretrained_component_names if (Path(config.model) / name).is_dir()}
    modules = _modules(config, {name: kind for name, kind in _classes_of(index).items() if name in here}, dtypes, unread)
    pipeline.update_components(**modules)
    here -= modules.keys()
    # Load them singly: asked for several, the loader logs failures and continues without them.
    for name in sorted(here):
        spec = pipeline.get_component_spec(name)
        weights = {"dtype": dtypes.of(name), "use_safetensors": True} if _holds_weights(spec.type_hint) else {}
        place = {"pretrained_model_name_or_path": config.model, "subfolder": name, "revision": None}
        pipeline.update_components(**{name: spec.load(local_files_only=True, **place, **weights)})
    return pipeline


def _modules(
    config: WorkerConfig, classes: dict[str, tuple[str, str]], dtypes: ComponentDtypes, unread: Placeholders | None
) -> dict[str, torch.nn.Module]:
    """Return modules by component name: random ones for the format `dummy`, otherwise those of classes that `load_component` can load.

    Diffusers itself loads the components that are missing in the result. For other formats without `unread` that is every one. Raises
    ConfigError.
    """
    folder = Path(config.model)
    if config.load_format is LoadFormat.DUMMY:
        return build_dummy_modules(folder, classes, dtypes.of, unread)
    if unread is None:
        return {}
    found = {name: class_of(name, library, kind) for name, (library, kind) in sorted(classes.items())}
    require_quantizable(config, [name for name, kind in found.items() if is_loadable(kind)])
    return {
        name: load_component(
            name, kind, folder / name, dtypes.of(name), unread=unread, **quantization_options(config, name, dtypes.of(name))
        )
        for name, kind in found.items()
        if is_loadable(kind)
    }


def _holds_weights(kind: Any) -> bool:
    return kind is None or issubclass(kind, torch.nn.Module)


def _classes_of(index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class by component of an index, whose entries are pairs, with a third item in a modular index.

    Entries without a library or a class, such as those of absent components, are left out.
    """
    entries = {name: value for name, value in index.items() if isinstance(value, list) and len(value) in (2, 3)}
    classes = {}
    for name, (library, kind, *spec) in entries.items():
        hint = spec[0].get("type_hint") if spec and isinstance(spec[0], dict) else None
        library, kind = (library, kind) if kind else (hint or (None, None))
        if isinstance(library, str) and isinstance(kind, str):
            classes[name] = (library, kind)
    return classes


def _check_components(config: WorkerConfig, pipeline: Any) -> None:
    """Raise ConfigError where a component's class does not fit a pipeline chosen by name; diffusers only warns of it."""
    if config.pipeline == "auto" or not hasattr(type(pipeline), "_get_signature_types"):
        return
    expected = type(pipeline)._get_signature_types()
    for name, module in modules_of(pipeline).items():
        classes = tuple(kind for kind in expected.get(name, ()) if inspect.isclass(kind) and kind is not inspect.Parameter.empty)
        if classes and not isinstance(module, classes):
            expected, found = " or ".join(kind.__name__ for kind in classes), type(module).__name__
            component = f"component {name} of {config.model!r}"
            raise ConfigError(f"--pipeline {config.pipeline}: {component}: expected a {expected}, found a {found}")
