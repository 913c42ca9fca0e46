# SPDX-License-Identifier: Apache-2.0
"""Methods of shared modules that a request may call while others advance, each with the reason why it changes nothing for them.

A stand-in noted the methods that pipelines call in every test family. The source of all pipelines of diffusers was searched for calls of
components too. `SharedPart` itself has `to`, `eval` and their like.
"""

_READS = "returns parts of the module and changes nothing"
_COMPUTES = "computes from its arguments and from weights, and changes nothing"

HARMLESS: dict[str, str] = {
    **dict.fromkeys(("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "num_parameters"), _READS),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children"), _READS),
    **dict.fromkeys(("get_parameter", "get_buffer", "get_submodule"), _READS),
    **dict.fromkeys(("get_input_embeddings", "get_output_embeddings", "get_decoder", "get_encoder"), _READS),
    # Layers that a pipeline calls by itself: final_layer_norm of CLIP, wte of GPT-2, text_projection.
    "forward": _COMPUTES,
    # Tables of positions (LTX 2), masks of frames (AnyFlow FAR), codebooks (VQ Diffusion).
    **dict.fromkeys(("prepare_video_coords", "prepare_audio_coords", "build_attention_mask", "get_codebook_entry"), _COMPUTES),
    # Statistics of embeddings (Kandinsky's prior, Stable unCLIP), latents of clean frames (AnyFlow FAR).
    **dict.fromkeys(("post_process_latents", "scale", "unscale", "_encode"), _COMPUTES),
    # The safety checker of Cosmos, a model of its own.
    **dict.fromkeys(("check_text_safety", "check_video_safety"), _COMPUTES),
}
