# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 with Klein, and FLUX.3."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import (
    MOST_REFERENCES,
    ModelRecord,
    PipelineRecord,
    Record,
    SequencePlan,
    TileShape,
    TokenCount,
)

TRIED = "diffusers' own plan for --tensor was tried with this class and works"

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "Flux2Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, timestep=None, img_ids=None, txt_ids=None, guidance=None, "
                "joint_attention_kwargs=None, return_dict=True, kv_cache=None, kv_cache_mode=None, num_ref_tokens=0, "
                "ref_fixed_timestep=0.0"
            )
        },
        sequence=SequencePlan(tokens=TokenCount.PACKED, pack=2, text="encoder_hidden_states"),
        tensor=TRIED,
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "Flux3Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, img_ids, txt_ids, image_cond_hidden_states=None, "
                "image_cond_ids=None, target_timestep=None, attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "AutoencoderKLFlux2",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True, generator=None"},
        tiles=TileShape.IMAGE,
    ),
    PipelineRecord("Flux2Pipeline", references=MOST_REFERENCES),
    PipelineRecord("Flux2ModularPipeline", references=MOST_REFERENCES),
    PipelineRecord("Flux2KleinPipeline", references=MOST_REFERENCES, inpaints_by="Flux2KleinInpaintPipeline"),
    PipelineRecord("Flux2KleinModularPipeline", references=MOST_REFERENCES),
    PipelineRecord("Flux2KleinBaseModularPipeline", references=MOST_REFERENCES),
    PipelineRecord(
        "Flux2KleinKVPipeline",
        references=MOST_REFERENCES,
        unsplit="it caches keys and values of whole images, and --sequence splits each image over ranks",
    ),
    PipelineRecord("Flux3ModularPipeline", packs=2),
    PipelineRecord("Flux3DistilledModularPipeline", packs=2),
)
