# SPDX-License-Identifier: Apache-2.0
"""Names of modules in adapter files, as tables to the modules of diffusers that they change.

Real: the namings, which are those of the tools that write them. A fused projection of an original model is several modules of
diffusers, whose rows of B follow each other.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Table = dict[str, tuple[str, ...]]
# Two halves of the rows are the other way round in diffusers.
SWAPPED = "~"


def layers(module: nn.Module) -> list[str]:
    """The paths of all layers that an adapter may change."""
    return [path for path, part in module.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]


def own(
    *components: str, prefix: str = "{}.", picks: Callable[[str], bool] = bool, rename: Callable[[str], str] = str
) -> Callable[[Any], Table]:
    """Diffusers' own names of all layers of these components that are picked, in the way that `rename` writes them."""

    def table(pipeline: Any) -> Table:
        paths = [(name, path) for name in components for path in layers(pipeline.components[name]) if picks(path)]
        return {prefix.format(name) + rename(path): (f"{name}.{path}",) for name, path in paths}

    return table


def flat(component: str, prefix: str, *, picks: Callable[[str], bool] = bool) -> Callable[[Any], Table]:
    """Diffusers' own names with every dot an underscore."""
    return own(component, prefix=prefix, picks=picks, rename=lambda path: path.replace(".", "_"))


def both(*tables: Callable[[Any], Table]) -> Callable[[Any], Table]:
    """Several components in one file."""
    return lambda pipeline: {written: targets for table in tables for written, targets in table(pipeline).items()}


def clip(component: str, prefix: str) -> Callable[[Any], Table]:
    """A CLIP text encoder as Kohya names it: always with the inner module that newer ones of transformers lack."""

    def rename(path: str) -> str:
        return "text_model_" + path.removeprefix("text_model.").replace(".", "_")

    return own(component, prefix=prefix, picks=lambda path: "layers" in path, rename=rename)


def old_attention(component: str) -> Callable[[Any], Table]:
    """The first naming of diffusers: the projections of attention only, as parts of a processor."""

    def rename(path: str) -> str:
        return path.replace(".to_out.0", ".to_out").replace(".to_", ".processor.to_")

    return own(component, picks=lambda path: ".attn" in path, rename=rename)


def original(prefix: str, blocks: dict[str, list[str]], others: Iterable[str] = ()) -> Callable[[Any], Table]:
    """Names of an original model's transformer, as `theirs=ours` pairs; a prefix with an underscore at its end has them for dots.

    The keys of `blocks` are pairs too, of lists of blocks whose modules are then given.
    """
    separator = "_" if prefix.endswith("_") else "."

    def table(pipeline: Any) -> Table:
        found: Table = {}
        for names, inner in blocks.items():
            theirs, ours = names.split("=")
            for number in range(len(pipeline.transformer.get_submodule(ours))):
                found |= _table(inner, f"{theirs}.{number}.", f"{ours}.{number}.")
        found |= _table(others)
        existing = set(layers(pipeline.transformer))
        return {
            prefix + written.replace(".", separator): tuple(f"transformer.{target}" for target in targets)
            for written, targets in found.items()
            if all(target.removesuffix(SWAPPED) in existing for target in targets)
        }

    return table


def _table(pairs: Iterable[str], theirs: str = "", ours: str = "") -> Table:
    """The pairs as a table; a plus is between the targets of a fused module."""
    split = [pair.split("=") for pair in pairs]
    return {theirs + written: tuple(ours + target for target in targets.split("+")) for written, targets in split}


def _embedders(prefix: str, **names: str) -> list[str]:
    """The two layers of each embedder."""
    both_ways = itertools.product(names.items(), ((1, "in"), (2, "out")))
    return [f"{theirs}.{way}_layer={prefix}.{ours}.linear_{number}" for (theirs, ours), (number, way) in both_ways]


QKV = "attn.to_q+attn.to_k+attn.to_v"
ADDED_QKV = "attn.add_q_proj+attn.add_k_proj+attn.add_v_proj"
STREAMS = [f"img_attn.qkv={QKV}", f"txt_attn.qkv={ADDED_QKV}", "img_attn.proj=attn.to_out.0", "txt_attn.proj=attn.to_add_out"]
ENDS = ["img_in=x_embedder", "txt_in=context_embedder", "final_layer.linear=proj_out"]
FLUX = {
    "double_blocks=transformer_blocks": [
        *STREAMS, "img_mlp.0=ff.net.0.proj", "img_mlp.2=ff.net.2", "txt_mlp.0=ff_context.net.0.proj", "txt_mlp.2=ff_context.net.2",
        "img_mod.lin=norm1.linear", "txt_mod.lin=norm1_context.linear",
    ],
    "single_blocks=single_transformer_blocks": [f"linear1={QKV}+proj_mlp", "linear2=proj_out", "modulation.lin=norm.linear"],
}  # fmt: skip
FLUX_OTHERS = [
    *ENDS, f"final_layer.adaLN_modulation.1=norm_out.linear{SWAPPED}",
    *_embedders("time_text_embed", time_in="timestep_embedder", vector_in="text_embedder", guidance_in="guidance_embedder"),
]  # fmt: skip
XLABS_BLOCKS = {
    "double_blocks=transformer_blocks": [
        f"processor.qkv_lora1={QKV}", f"processor.qkv_lora2={ADDED_QKV}",
        "processor.proj_lora1=attn.to_out.0", "processor.proj_lora2=attn.to_add_out",
    ],
    "single_blocks=single_transformer_blocks": [f"processor.qkv_lora={QKV}", "processor.proj_lora=proj_out"],
}  # fmt: skip
FLUX2 = {
    "double_blocks=transformer_blocks": [
        *STREAMS, "img_mlp.0=ff.linear_in", "img_mlp.2=ff.linear_out", "txt_mlp.0=ff_context.linear_in", "txt_mlp.2=ff_context.linear_out",
    ],
    "single_blocks=single_transformer_blocks": ["linear1=attn.to_qkv_mlp_proj", "linear2=attn.to_out"],
}  # fmt: skip
FLUX2_KOHYA_OTHERS = ENDS + _embedders("time_guidance_embed", time_in="timestep_embedder")
FLUX2_OTHERS = [
    *FLUX2_KOHYA_OTHERS, *_embedders("time_guidance_embed", guidance_in="guidance_embedder"),
    "final_layer.adaLN_modulation.1=norm_out.linear", "single_stream_modulation.lin=single_stream_modulation.linear",
    "double_stream_modulation_img.lin=double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin=double_stream_modulation_txt.linear",
]  # fmt: skip
SD3_BLOCKS = {
    "joint_blocks=transformer_blocks": [
        f"x_block.attn.qkv={QKV}", "x_block.attn2.qkv=attn2.to_q+attn2.to_k+attn2.to_v", f"context_block.attn.qkv={ADDED_QKV}",
        "x_block.attn.proj=attn.to_out.0", "x_block.attn2.proj=attn2.to_out.0", "context_block.attn.proj=attn.to_add_out",
        "x_block.mlp.fc1=ff.net.0.proj", "x_block.mlp.fc2=ff.net.2", "x_block.adaLN_modulation.1=norm1.linear",
        "context_block.mlp.fc1=ff_context.net.0.proj", "context_block.mlp.fc2=ff_context.net.2",
        "context_block.adaLN_modulation.1=norm1_context.linear",
    ]
}  # fmt: skip
SD3_OTHERS = [
    # In the last block the context is only scaled and shifted, and the original has these the other way round.
    f"joint_blocks.1.context_block.adaLN_modulation.1=transformer_blocks.1.norm1_context.linear{SWAPPED}",
    f"final_layer.adaLN_modulation.1=norm_out.linear{SWAPPED}",
    "x_embedder.proj=pos_embed.proj", "context_embedder=context_embedder", "final_layer.linear=proj_out",
    "t_embedder.mlp.0=time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.2=time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0=time_text_embed.text_embedder.linear_1", "y_embedder.mlp.2=time_text_embed.text_embedder.linear_2",
]  # fmt: skip
WAN_BLOCKS = {
    "blocks=blocks": [
        "self_attn.q=attn1.to_q", "self_attn.k=attn1.to_k", "self_attn.v=attn1.to_v", "self_attn.o=attn1.to_out.0",
        "cross_attn.q=attn2.to_q", "cross_attn.k=attn2.to_k", "cross_attn.v=attn2.to_v", "cross_attn.o=attn2.to_out.0",
        "cross_attn.k_img=attn2.add_k_proj", "cross_attn.v_img=attn2.add_v_proj", "ffn.0=ffn.net.0.proj", "ffn.2=ffn.net.2",
    ]
}  # fmt: skip
WAN_OTHERS = [
    "time_embedding.0=condition_embedder.time_embedder.linear_1", "time_embedding.2=condition_embedder.time_embedder.linear_2",
    "text_embedding.0=condition_embedder.text_embedder.linear_1", "text_embedding.2=condition_embedder.text_embedder.linear_2",
    "time_projection.1=condition_embedder.time_proj", "head.head=proj_out",
    "img_emb.proj.1=condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.3=condition_embedder.image_embedder.ff.net.2",
]  # fmt: skip


def sgm(pipeline: Any) -> Table:
    """The U-Net of SDXL as the original model numbers its blocks through."""
    unet = pipeline.unet
    each = unet.config.layers_per_block + 1
    parts = {
        "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
        "conv_out": "out.2", "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
        "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1", "mid_block.resnets.1": "middle_block.2",
    }  # fmt: skip
    for block, layer in itertools.product(range(len(unet.up_blocks)), range(each)):
        number = block * each + layer
        sampler = 2 if hasattr(unet.up_blocks[block], "attentions") else 1
        parts |= {
            f"down_blocks.{block}.resnets.{layer}": f"input_blocks.{number + 1}.0",
            f"down_blocks.{block}.attentions.{layer}": f"input_blocks.{number + 1}.1",
            f"down_blocks.{block}.downsamplers.0.conv": f"input_blocks.{(block + 1) * each}.0.op",
            f"up_blocks.{block}.resnets.{layer}": f"output_blocks.{number}.0",
            f"up_blocks.{block}.attentions.{layer}": f"output_blocks.{number}.1",
            f"up_blocks.{block}.upsamplers.0.conv": f"output_blocks.{(block + 1) * each - 1}.{sampler}.conv",
        }
    inner = {"conv1": "in_layers.2", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}
    found = {}
    for path in layers(unet):
        ours = max((part for part in parts if path == part or path.startswith(f"{part}.")), key=len)
        rest = path[len(ours) :].lstrip(".")
        theirs = ".".join(filter(None, (parts[ours], inner.get(rest, rest))))
        found["lora_unet_" + theirs.replace(".", "_")] = (f"unet.{path}",)
    return found
