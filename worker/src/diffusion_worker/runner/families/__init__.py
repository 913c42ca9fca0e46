# SPDX-License-Identifier: Apache-2.0
"""The records of model and pipeline classes, a file for each family or group of them."""

import sys

from diffusion_worker.runner.families.facts import PipelineFacts, facts_of
from diffusion_worker.runner.families.record import (
    TESTED_WITH,
    ArgumentRole,
    CacheRecord,
    ModelRecord,
    PipelineRecord,
    Positions,
    Role,
    SchedulerRecord,
    SequencePlan,
    TileShape,
    TokenCount,
    TokenSplit,
    Workaround,
)
from diffusion_worker.runner.families.registry import (
    cache_record,
    looks_up_times,
    model_record,
    models,
    pipeline_record,
    pipelines,
    register,
    register_families,
    schedulers,
)
from diffusion_worker.runner.families.signature import merged_methods, signature_of

__all__ = [
    "TESTED_WITH",
    "ArgumentRole",
    "CacheRecord",
    "ModelRecord",
    "PipelineFacts",
    "PipelineRecord",
    "Positions",
    "Role",
    "SchedulerRecord",
    "SequencePlan",
    "TileShape",
    "TokenCount",
    "TokenSplit",
    "Workaround",
    "cache_record",
    "facts_of",
    "looks_up_times",
    "merged_methods",
    "model_record",
    "models",
    "pipeline_record",
    "pipelines",
    "register",
    "schedulers",
    "signature_of",
]

register_families(sys.modules[__name__])
