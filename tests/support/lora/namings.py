# SPDX-License-Identifier: Apache-2.0
"""The namings of modules in adapter files, as tables to the modules of diffusers.

Real: the namings, which are those of the tools that write them. A fused projection of an original model is several modules of diffusers,
whose rows of B follow each other.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Table = dict[str, tuple[str, ...]]
# Diffusers has the two halves of the rows in the other order.
SWAPPED = "~"


def layers(module: nn.Module) -> list[str]:
    """List the paths of a module's linear and 2D convolution layers, the types to which adapters apply, in the order of `named_modules`."""
    return [path for path, part in module.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]


def own(
    *components: str, prefix: str = "{}.", picks: Callable[[str], bool] = bool, rename: Callable[[str], str] = str
) -> Callable[[Any], Table]:
    """Return the naming of diffusers for the layers of these components that `picks` selects, with paths changed by `rename`.

    Each name begins with `prefix`, in which `{}` stands for the component.
    """

    def table(pipeline: Any) -> Table:
        paths = [(name, path) for name in components for path in layers(pipeline.components[name]) if picks(path)]
        return {prefix.format(name) + rename(path): (f"{name}.{path}",) for name, path in paths}

    return table


def flat(component: str, prefix: str, *, picks: Callable[[str], bool] = bool, drops: str = "") -> Callable[[Any], Table]:
    """Return the naming of diffusers with underscores for dots, and without the prefix `drops` of each path."""
    return own(component, prefix=prefix, picks=picks, rename=lambda path: path.removeprefix(drops).replace(".", "_"))


def both(*tables: Callable[[Any], Table]) -> Callable[[Any], Table]:
    """Return a naming with the entries of all these namings, such as one for each component."""
    return lambda pipeline: {written: targets for table in tables for written, targets in table(pipeline).items()}


def clip(component: str, prefix: str) -> Callable[[Any], Table]:
    """Return Kohya's naming of a CLIP text encoder: always with the inner module that newer versions of transformers lack."""
    return flat(component, f"{prefix}text_model_", picks=lambda path: "layers" in path, drops="text_model.")


def old_attention(component: str) -> Callable[[Any], Table]:
    """Return diffusers' first naming, which covers attention alone: `to_q` is `processor.to_q`, and `to_out.0` is `processor.to_out`."""
    return own(component, picks=lambda path: ".attn" in path, rename=lambda path: re.sub(r"\.(to_\w+)(\.0)?", r".processor.\1", path))


def original(prefix: str, blocks: dict[str, list[str]], others: Iterable[str] = ()) -> Callable[[Any], Table]:
    """Return the naming of an original model's transformer, from `theirs=ours` pairs. A prefix that ends with an underscore replaces dots.

    The keys of `blocks` are such pairs of lists of blocks, and the values are pairs of modules in each block.
    Pairs whose modules the transformer lacks are left out.
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
    """Return `theirs=ours` pairs as a table, with these prefixes before the names; a plus separates the targets of a fused module."""
    split = [each.split("=") for pair in pairs for each in _expanded(pair)]
    return {theirs + written: tuple(ours + target for target in targets.split("+")) for written, targets in split}


def _expanded(pair: str) -> list[str]:
    """Expand the braces of a pair in step: `a.{q,k}=b.{0,1}` gives `a.q=b.0` and `a.k=b.1`.

    All must have equally many choices; a pair without braces is kept.
    """
    alternatives = [group.split(",") for group in re.findall("{(.*?)}", pair)]
    return [re.sub("{.*?}", "{}", pair).format(*chosen) for chosen in zip(*alternatives, strict=True)] or [pair]


QKV = "attn.to_q+attn.to_k+attn.to_v"
ADDED_QKV = "attn.add_q_proj+attn.add_k_proj+attn.add_v_proj"
STREAMS = [f"img_attn.qkv={QKV}", f"txt_attn.qkv={ADDED_QKV}", "{img,txt}_attn.proj=attn.to_{out.0,add_out}"]
ENDS = ["{img,txt}_in={x,context}_embedder", "final_layer.linear=proj_out"]
FLUX = {
    "double_blocks=transformer_blocks": [
        *STREAMS, "img_mlp.{0,2}=ff.net.{0.proj,2}", "txt_mlp.{0,2}=ff_context.net.{0.proj,2}", "{img,txt}_mod.lin=norm1{,_context}.linear",
    ],
    "single_blocks=single_transformer_blocks": [f"linear1={QKV}+proj_mlp", "linear2=proj_out", "modulation.lin=norm.linear"],
}  # fmt: skip
FLUX_OTHERS = [
    *ENDS, f"final_layer.adaLN_modulation.1=norm_out.linear{SWAPPED}",
    "{time,vector,guidance}_in.in_layer=time_text_embed.{timestep,text,guidance}_embedder.linear_1",
    "{time,vector,guidance}_in.out_layer=time_text_embed.{timestep,text,guidance}_embedder.linear_2",
]  # fmt: skip
XLABS_BLOCKS = {
    "double_blocks=transformer_blocks": [
        f"processor.qkv_lora1={QKV}", f"processor.qkv_lora2={ADDED_QKV}", "processor.proj_lora{1,2}=attn.to_{out.0,add_out}",
    ],
    "single_blocks=single_transformer_blocks": [f"processor.qkv_lora={QKV}", "processor.proj_lora=proj_out"],
}  # fmt: skip
FLUX2 = {
    "double_blocks=transformer_blocks": [*STREAMS, "img_mlp.{0,2}=ff.linear_{in,out}", "txt_mlp.{0,2}=ff_context.linear_{in,out}"],
    "single_blocks=single_transformer_blocks": ["linear{1,2}=attn.to_{qkv_mlp_proj,out}"],
}
FLUX2_KOHYA_OTHERS = [*ENDS, "time_in.{in,out}_layer=time_guidance_embed.timestep_embedder.linear_{1,2}"]
FLUX2_OTHERS = [
    *FLUX2_KOHYA_OTHERS, "guidance_in.{in,out}_layer=time_guidance_embed.guidance_embedder.linear_{1,2}",
    "final_layer.adaLN_modulation.1=norm_out.linear", "single_stream_modulation.lin=single_stream_modulation.linear",
    "double_stream_modulation_{img,txt}.lin=double_stream_modulation_{img,txt}.linear",
]  # fmt: skip
SD3_BLOCKS = {
    "joint_blocks=transformer_blocks": [
        f"x_block.attn.qkv={QKV}", "x_block.attn2.qkv=attn2.to_q+attn2.to_k+attn2.to_v", f"context_block.attn.qkv={ADDED_QKV}",
        "x_block.{attn,attn2}.proj={attn,attn2}.to_out.0", "context_block.attn.proj=attn.to_add_out",
        "x_block.mlp.fc{1,2}=ff.net.{0.proj,2}", "context_block.mlp.fc{1,2}=ff_context.net.{0.proj,2}",
        "{x,context}_block.adaLN_modulation.1=norm1{,_context}.linear",
    ]
}  # fmt: skip
SD3_OTHERS = [
    # In the last block the context is only scaled and shifted, and the original has these two in the other order.
    f"joint_blocks.1.context_block.adaLN_modulation.1=transformer_blocks.1.norm1_context.linear{SWAPPED}",
    f"final_layer.adaLN_modulation.1=norm_out.linear{SWAPPED}",
    "x_embedder.proj=pos_embed.proj", "context_embedder=context_embedder", "final_layer.linear=proj_out",
    "{t,y}_embedder.mlp.0=time_text_embed.{timestep,text}_embedder.linear_1",
    "{t,y}_embedder.mlp.2=time_text_embed.{timestep,text}_embedder.linear_2",
]  # fmt: skip
WAN_BLOCKS = {
    "blocks=blocks": [
        "self_attn.{q,k,v,o}=attn1.to_{q,k,v,out.0}", "cross_attn.{q,k,v,o}=attn2.to_{q,k,v,out.0}",
        "cross_attn.{k,v}_img=attn2.add_{k,v}_proj", "ffn.{0,2}=ffn.net.{0.proj,2}",
    ]
}  # fmt: skip
WAN_OTHERS = [
    "{time,text}_embedding.0=condition_embedder.{time,text}_embedder.linear_1", "time_projection.1=condition_embedder.time_proj",
    "{time,text}_embedding.2=condition_embedder.{time,text}_embedder.linear_2", "head.head=proj_out",
    "img_emb.proj.{1,3}=condition_embedder.image_embedder.ff.net.{0.proj,2}",
]  # fmt: skip


def sgm(pipeline: Any) -> Table:
    """Return Kohya's table for SDXL's U-Net: the original model's names, which number the blocks consecutively, after `lora_unet_`."""
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
