# SPDX-License-Identifier: Apache-2.0
"""Wan, and the models that were made of it: VACE, SkyReels V2, ChronoEdit, AnyFlow. Lucy Edit and Helios have its VAE."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Record, SequencePlan, TokenCount

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "WanTransformer3DModel",
        version="diffusers 0.42.1",
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
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "control_hidden_states=None, control_hidden_states_scale=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "SkyReelsV2Transformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "enable_diffusion_forcing=False, fps=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "ChronoEditTransformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "AnyFlowTransformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, r_timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "AutoencoderKLWan",
        version="diffusers 0.42.1",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    PipelineRecord("WanPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("WanVideoToVideoPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("WanVACEPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("WanAnimatePipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("LucyEditPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("HeliosPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("HeliosPyramidPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2Pipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2ImageToVideoPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2DiffusionForcingPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2DiffusionForcingImageToVideoPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("SkyReelsV2DiffusionForcingVideoToVideoPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("WanImageToVideoPipeline", version="diffusers 0.42.1", in_float32=("vae", "image_encoder")),
    PipelineRecord("ChronoEditPipeline", version="diffusers 0.42.1", in_float32=("vae", "image_encoder")),
    # The modular classes have no example. They run the models of the classic ones.
    PipelineRecord("WanModularPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("Wan22ModularPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("HeliosModularPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("HeliosPyramidModularPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("HeliosPyramidDistilledModularPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("WanImage2VideoModularPipeline", version="diffusers 0.42.1", in_float32=("vae", "image_encoder")),
    PipelineRecord("Wan22Image2VideoModularPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
    PipelineRecord("Wan22VaceModularPipeline", version="diffusers 0.42.1", in_float32=("vae",)),
)
