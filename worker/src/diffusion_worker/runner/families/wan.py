# SPDX-License-Identifier: Apache-2.0
"""Wan, and the models that were made of it: VACE, SkyReels V2, ChronoEdit, AnyFlow. Lucy Edit and Helios have its VAE."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Record, SequencePlan, TokenCount

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "WanTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, return_dict=True, attention_kwargs=None"
            )
        },
        sequence=SequencePlan(tokens=TokenCount.PATCHED),
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "WanVACETransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "control_hidden_states=None, control_hidden_states_scale=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "SkyReelsV2Transformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "enable_diffusion_forcing=False, fps=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "ChronoEditTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "AnyFlowTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, r_timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "AutoencoderKLWan",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    PipelineRecord("WanPipeline", in_float32=("vae",)),
    PipelineRecord("WanVideoToVideoPipeline", in_float32=("vae",)),
    PipelineRecord("WanVACEPipeline", in_float32=("vae",)),
    PipelineRecord("WanAnimatePipeline", in_float32=("vae",)),
    PipelineRecord("LucyEditPipeline", in_float32=("vae",)),
    PipelineRecord("HeliosPipeline", in_float32=("vae",)),
    PipelineRecord("HeliosPyramidPipeline", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2Pipeline", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2ImageToVideoPipeline", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2DiffusionForcingPipeline", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2DiffusionForcingImageToVideoPipeline", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2DiffusionForcingVideoToVideoPipeline", in_float32=("vae",)),
    PipelineRecord("WanImageToVideoPipeline", in_float32=("vae", "image_encoder")),
    PipelineRecord("ChronoEditPipeline", in_float32=("vae", "image_encoder")),
    # The modular classes have no example. They run the models of the classic ones.
    PipelineRecord("WanModularPipeline", in_float32=("vae",)),
    PipelineRecord("Wan22ModularPipeline", in_float32=("vae",)),
    PipelineRecord("HeliosModularPipeline", in_float32=("vae",)),
    PipelineRecord("HeliosPyramidModularPipeline", in_float32=("vae",)),
    PipelineRecord("HeliosPyramidDistilledModularPipeline", in_float32=("vae",)),
    PipelineRecord("WanImage2VideoModularPipeline", in_float32=("vae", "image_encoder")),
    PipelineRecord("Wan22Image2VideoModularPipeline", in_float32=("vae",)),
    PipelineRecord("Wan22VaceModularPipeline", in_float32=("vae",)),
)
