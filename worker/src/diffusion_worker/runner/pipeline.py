# SPDX-License-Identifier: Apache-2.0
"""Pipelines, from a model folder to what a request's fiber runs: the one place where the rest of the runner gets them.

`pipeline_loading` makes a pipeline from a folder, `pipeline_description` looks at one, `pipeline_view` makes a request's
view of it, `request_body` calls that.
"""

from diffusion_worker.runner.pipeline_description import denoiser_of, describe
from diffusion_worker.runner.pipeline_loading import check_pipeline_class, checkpoint_folder, dtype_of, load_pipeline
from diffusion_worker.runner.pipeline_view import modules_of, view_of
from diffusion_worker.runner.request_body import call_view, make_body

__all__ = [
    "call_view", "check_pipeline_class", "checkpoint_folder", "denoiser_of", "describe", "dtype_of", "load_pipeline",
    "make_body", "modules_of", "view_of",
]  # fmt: skip
