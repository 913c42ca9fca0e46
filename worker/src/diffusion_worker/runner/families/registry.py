# SPDX-License-Identifier: Apache-2.0
"""The records of all families by the name of their class, and those that a package of a user's own adds."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from diffusion_worker.runner.families.record import CacheRecord, ModelRecord, PipelineRecord, Record, SchedulerRecord

R = TypeVar("R", bound=Record)

_NO_MODEL, _NO_PIPELINE = ModelRecord(""), PipelineRecord("")
_by_name: dict[str, Record] = {}
# Answers by class, because a lookup walks the classes that it extends and happens at every model call.
_found: dict[tuple[Any, Any], Any] = {}


def register(*records: Record) -> None:
    """Add records. A package of yours calls it when it is imported, before its pipeline is made; equal records may come again.

    Raises:
        ValueError: there is another record for a class of this name.
    """
    for record in records:
        if _by_name.setdefault(record.name, record) != record:
            raise ValueError(f"a different record is registered already for a class named {record.name}; give your class another name")
    _found.clear()


def register_families(package: Any) -> None:
    """Import every module in a package, and add the records in its `RECORDS`, if it has any.

    A model is of diffusers unless its record names another library.
    """
    for module in pkgutil.iter_modules(package.__path__):
        for record in getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "RECORDS", ()):
            of_diffusers = isinstance(record, ModelRecord) and not record.library
            register(msgspec.structs.replace(record, library="diffusers") if of_diffusers else record)


def model_record(model_class: Any) -> ModelRecord:
    """Return the record of a model class, or of the nearest class that it extends; one without any fact where there is none."""
    return _record(ModelRecord, model_class) or _NO_MODEL


def pipeline_record(pipeline_class: Any) -> PipelineRecord:
    """Return the record of a pipeline class, or of the nearest class that it extends. Without any, return one that states no fact."""
    return _record(PipelineRecord, pipeline_class) or _NO_PIPELINE


def cache_record(kind: Any) -> CacheRecord | None:
    """Return the record of a class of caches; None for any other class."""
    return _record(CacheRecord, kind)


def looks_up_times(scheduler_class: Any) -> bool:
    """Return whether this very class is on record as a scheduler of diffusers whose steps look up their tables by the time."""
    return scheduler_class.__module__.startswith("diffusers.") and isinstance(_by_name.get(scheduler_class.__name__), SchedulerRecord)


def models() -> Iterator[ModelRecord]:
    """Yield the records of all model classes, in the order of their names."""
    return _all(ModelRecord)


def pipelines() -> Iterator[PipelineRecord]:
    """Yield the records of all pipeline classes, in the order of their names."""
    return _all(PipelineRecord)


def schedulers() -> Iterator[SchedulerRecord]:
    """Yield the records of all classes of schedulers, in the order of their names."""
    return _all(SchedulerRecord)


def _all(kind: type[R]) -> Iterator[R]:
    return (record for _, record in sorted(_by_name.items()) if isinstance(record, kind))


def _record(kind: type[R], wanted: Any) -> R | None:
    key = (kind, wanted)
    if key not in _found:
        # Names, because the classes of sharded models and of views are made at run time, and have those of the class that they extend.
        known = (_by_name.get(parent.__name__) for parent in wanted.__mro__)
        _found[key] = next((record for record in known if isinstance(record, kind)), None)
    return _found[key]  # type: ignore[no-any-return]
