# SPDX-License-Identifier: Apache-2.0
"""Adapter files for tiny pipelines of every family, in every naming, with the update of each module known.

A naming is a table from the modules as a file names them to the modules of diffusers that they change; one of the original
model may be several of diffusers' (a fused projection: the rows of B follow each other).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from diffusion_worker.lora.conversion import converter_of
from diffusion_worker.lora.naming import AdaptedModel
from support.families.images import flux2, qwen, stable_diffusion, stable_diffusion_3, stable_diffusion_xl, z_image
from support.families.rig.family import build_seeded
from support.families.videos import wan

Table = dict[str, tuple[str, ...]]
# Two halves of the rows are the other way round in diffusers.
SWAPPED = "~"


@dataclass(frozen=True)
class Style:
    """How a naming ends: the names of the two factors, and whether each module has an alpha."""

    a: str
    b: str
    alpha: bool = False


PEFT = Style(".lora_A.weight", ".lora_B.weight")
PEFT_ALPHA = Style(".lora_A.weight", ".lora_B.weight", alpha=True)
PEFT_DEFAULT = Style(".lora_A.default.weight", ".lora_B.default.weight")
KOHYA = Style(".lora_down.weight", ".lora_up.weight", alpha=True)
KOHYA_PLAIN = Style(".lora_down.weight", ".lora_up.weight")
DOTS = Style(".lora.down.weight", ".lora.up.weight")
OLD_ATTENTION = Style("_lora.down.weight", "_lora.up.weight")
XLABS = Style(".down.weight", ".up.weight")


@dataclass(frozen=True)
class Case:
    """One naming of one family, and what diffusers 0.42.1 makes of it.

    `lost` are modules that it drops without a word; with `one_alpha` it mixes up alphas that differ between modules, by their
    names; `diffusers_refuses` says why nothing is loaded there at all.
    """

    family: str
    naming: str
    build: Callable[[], Any]
    table: Callable[[Any], Table]
    style: Style
    format: str
    lost: Callable[[str], bool] = lambda module: False
    one_alpha: bool = False
    diffusers_refuses: str = ""

    @property
    def name(self) -> str:
        """For the test's name."""
        return f"{self.family}, {self.naming}"


@dataclass
class Update:
    """The update of one module: `scaling * b @ a` of matrices."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The update applied to columns of inputs."""
        return self.scaling * (self.b @ (self.a @ inputs))


@dataclass
class MadeFile:
    """A written adapter: its path, what it changes by `component.path`, and the tensors as written."""

    path: Path
    updates: dict[str, Update]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def make_file(case: Case, pipeline: Any, folder: Path, *, one_alpha: bool = False, rank: int = 2, seed: int = 1) -> MadeFile:
    """Write random factors for every module of the naming's table; alphas differ from module to module unless one is asked for."""
    generator = torch.Generator().manual_seed(seed)
    made = MadeFile(folder / "adapter.safetensors", {})
    for number, (written, targets) in enumerate(case.table(pipeline).items()):
        shapes = [_weight(pipeline, target).shape for target in targets]
        rows, alpha = sum(shape[0] for shape in shapes), 1.0 + (0 if one_alpha else number % 3)
        a = torch.randn(rank, *shapes[0][1:], generator=generator)
        b = torch.randn(rows, rank, generator=generator)
        made.tensors[written + case.style.a] = a
        made.tensors[written + case.style.b] = b.reshape(rows, rank, *[1] * (a.dim() - 2))
        if case.style.alpha:
            made.tensors[f"{written}.alpha"] = torch.tensor(alpha)
        scaling = alpha / rank if case.style.alpha else 1.0
        for target, part in zip(targets, b.split([shape[0] for shape in shapes]), strict=True):
            part = torch.cat(part.chunk(2)[::-1]) if target.endswith(SWAPPED) else part
            made.updates[target.removesuffix(SWAPPED)] = Update(a.flatten(1), part, scaling)
    save_file({name: tensor.contiguous() for name, tensor in made.tensors.items()}, made.path)
    return made


def model_of(pipeline: Any) -> AdaptedModel:
    """Return what a runner knows of its pipeline when it reads an adapter."""
    components = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module) and name != "vae"}
    return AdaptedModel(components, "unet" if "unet" in components else "transformer", converter_of(pipeline))


def of_diffusers(pipeline: Any) -> dict[str, Update]:
    """The updates that diffusers loaded, by `component.path`."""
    found = {}
    for component, module in pipeline.components.items():
        for path, layer in module.named_modules() if isinstance(module, nn.Module) else ():
            if getattr(layer, "lora_A", None):
                (name,) = layer.lora_A
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                found[f"{component}.{path}"] = Update(a.detach().flatten(1), b.detach().flatten(1), layer.scaling[name])
    return found


def layers(module: nn.Module, kinds: tuple[type, ...] = (nn.Linear, nn.Conv2d)) -> list[str]:
    """The paths of all layers that an adapter may change."""
    return [path for path, part in module.named_modules() if isinstance(part, kinds)]


def _weight(pipeline: Any, target: str) -> torch.Tensor:
    component, _, path = target.removesuffix(SWAPPED).partition(".")
    weight: torch.Tensor = pipeline.components[component].get_submodule(path).weight
    return weight


# --- tables ---------------------------------------------------------------------------------------------------------------


def own(*components: str, prefix: Callable[[str], str] = lambda component: f"{component}.") -> Callable[[Any], Table]:
    """Diffusers' own names of all layers of these components."""

    def table(pipeline: Any) -> Table:
        return {prefix(name) + path: (f"{name}.{path}",) for name in components for path in layers(pipeline.components[name])}

    return table


def flat(component: str, prefix: str) -> Callable[[Any], Table]:
    """Diffusers' own names with every dot an underscore."""

    def table(pipeline: Any) -> Table:
        paths = layers(pipeline.components[component])
        return {prefix + path.replace(".", "_"): (f"{component}.{path}",) for path in paths}

    return table


def both(*tables: Callable[[Any], Table]) -> Callable[[Any], Table]:
    """Several components in one file."""
    return lambda pipeline: {written: targets for table in tables for written, targets in table(pipeline).items()}


def without(part: str, table: Callable[[Any], Table]) -> Callable[[Any], Table]:
    """A table without the modules whose names have this part."""
    return lambda pipeline: {written: targets for written, targets in table(pipeline).items() if part not in written}


def clip(component: str, prefix: str) -> Callable[[Any], Table]:
    """A CLIP text encoder as Kohya names it: always with the inner module that newer ones of transformers lack."""

    def table(pipeline: Any) -> Table:
        encoder = pipeline.components[component]
        paths = [path for path in layers(encoder) if "layers" in path]
        inner = "" if hasattr(encoder, "text_model") else "text_model."
        return {prefix + (inner + path).replace(".", "_"): (f"{component}.{path}",) for path in paths}

    return table


def old_attention(component: str) -> Callable[[Any], Table]:
    """The first naming of diffusers: the projections of attention only, as parts of a processor."""

    def table(pipeline: Any) -> Table:
        paths = [path for path in layers(pipeline.components[component]) if ".attn" in path]
        named = {path: path.replace(".to_out.0", ".to_out").replace(".to_", ".processor.to_") for path in paths}
        return {f"{component}.{written}": (f"{component}.{path}",) for path, written in named.items()}

    return table


def original(
    blocks: dict[str, Table], others: Table | None = None, *, separator: str = ".", prefix: str = "", component: str = "transformer"
) -> Callable[[Any], Table]:
    """Names of an original model; the keys of `blocks` are `theirs=ours` names of a list of blocks."""

    def table(pipeline: Any) -> Table:
        found: Table = {}
        module = pipeline.components[component]
        for names, inner in blocks.items():
            theirs, ours = names.split("=")
            for number in range(len(module.get_submodule(ours))):
                for written, targets in inner.items():
                    found[f"{theirs}.{number}.{written}"] = tuple(f"{ours}.{number}.{target}" for target in targets)
        found |= others or {}
        existing = set(layers(module))
        return {
            prefix + written.replace(".", separator): tuple(f"{component}.{target}" for target in targets)
            for written, targets in found.items()
            if all(target.removesuffix(SWAPPED) in existing for target in targets)
        }

    return table


def _one_to_one(pairs: Iterable[str]) -> Table:
    return {theirs: (ours,) for theirs, _, ours in (pair.partition("=") for pair in pairs)}


def _embedders(prefix: str, **names: str) -> Table:
    """The two layers of each embedder."""
    return {
        f"{theirs}.{way}_layer": (f"{prefix}.{ours}.linear_{n}",) for theirs, ours in names.items() for n, way in ((1, "in"), (2, "out"))
    }


QKV = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
} | _one_to_one(["img_attn.proj=attn.to_out.0", "txt_attn.proj=attn.to_add_out"])
FLUX = {
    "double_blocks=transformer_blocks": QKV
    | _one_to_one(
        [
            "img_mlp.0=ff.net.0.proj", "img_mlp.2=ff.net.2", "txt_mlp.0=ff_context.net.0.proj", "txt_mlp.2=ff_context.net.2",
            "img_mod.lin=norm1.linear", "txt_mod.lin=norm1_context.linear",
        ]
    ),
    "single_blocks=single_transformer_blocks": {"linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")}
    | _one_to_one(["linear2=proj_out", "modulation.lin=norm.linear"]),
}  # fmt: skip
ENDS = _one_to_one(["img_in=x_embedder", "txt_in=context_embedder", "final_layer.linear=proj_out"])
FLUX_OTHERS = (
    ENDS
    | {"final_layer.adaLN_modulation.1": (f"norm_out.linear{SWAPPED}",)}
    | _embedders("time_text_embed", time_in="timestep_embedder", vector_in="text_embedder", guidance_in="guidance_embedder")
)
XLABS_BLOCKS = {
    "double_blocks=transformer_blocks": {
        "processor.qkv_lora1": QKV["img_attn.qkv"],
        "processor.qkv_lora2": QKV["txt_attn.qkv"],
        "processor.proj_lora1": ("attn.to_out.0",),
        "processor.proj_lora2": ("attn.to_add_out",),
    },
    "single_blocks=single_transformer_blocks": {
        "processor.qkv_lora": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "processor.proj_lora": ("proj_out",),
    },
}
FLUX2 = {
    "double_blocks=transformer_blocks": QKV
    | _one_to_one(
        ["img_mlp.0=ff.linear_in", "img_mlp.2=ff.linear_out", "txt_mlp.0=ff_context.linear_in", "txt_mlp.2=ff_context.linear_out"]
    ),
    "single_blocks=single_transformer_blocks": _one_to_one(["linear1=attn.to_qkv_mlp_proj", "linear2=attn.to_out"]),
}
FLUX2_KOHYA_OTHERS = ENDS | _embedders("time_guidance_embed", time_in="timestep_embedder")
FLUX2_OTHERS = (
    FLUX2_KOHYA_OTHERS
    | _embedders("time_guidance_embed", guidance_in="guidance_embedder")
    | {"final_layer.adaLN_modulation.1": ("norm_out.linear",)}
    | {
        f"{name}.lin": (f"{name}.linear",)
        for name in ("single_stream_modulation", "double_stream_modulation_img", "double_stream_modulation_txt")
    }
)
SD3_BLOCKS = {
    "joint_blocks=transformer_blocks": {
        "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
        "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    }
    | _one_to_one(
        [
            "x_block.attn.proj=attn.to_out.0", "x_block.attn2.proj=attn2.to_out.0", "context_block.attn.proj=attn.to_add_out",
            "x_block.mlp.fc1=ff.net.0.proj", "x_block.mlp.fc2=ff.net.2", "x_block.adaLN_modulation.1=norm1.linear",
            "context_block.mlp.fc1=ff_context.net.0.proj", "context_block.mlp.fc2=ff_context.net.2",
            "context_block.adaLN_modulation.1=norm1_context.linear",
        ]
    )
}  # fmt: skip
SD3_OTHERS = {
    # In the last block the context is only scaled and shifted, and the original has these the other way round.
    "joint_blocks.1.context_block.adaLN_modulation.1": (f"transformer_blocks.1.norm1_context.linear{SWAPPED}",),
    "final_layer.adaLN_modulation.1": (f"norm_out.linear{SWAPPED}",),
} | _one_to_one(
    [
        "x_embedder.proj=pos_embed.proj", "context_embedder=context_embedder", "final_layer.linear=proj_out",
        "t_embedder.mlp.0=time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.2=time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0=time_text_embed.text_embedder.linear_1", "y_embedder.mlp.2=time_text_embed.text_embedder.linear_2",
    ]
)  # fmt: skip
WAN_BLOCKS = {
    "blocks=blocks": _one_to_one(
        [f"{theirs}.{one}={ours}.{other}" for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
         for one, other in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))]
        + ["cross_attn.k_img=attn2.add_k_proj", "cross_attn.v_img=attn2.add_v_proj", "ffn.0=ffn.net.0.proj", "ffn.2=ffn.net.2"]
    )
}  # fmt: skip
WAN_OTHERS = _one_to_one(
    [
        "time_embedding.0=condition_embedder.time_embedder.linear_1", "time_embedding.2=condition_embedder.time_embedder.linear_2",
        "text_embedding.0=condition_embedder.text_embedder.linear_1", "text_embedding.2=condition_embedder.text_embedder.linear_2",
        "time_projection.1=condition_embedder.time_proj", "head.head=proj_out",
        "img_emb.proj.1=condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.3=condition_embedder.image_embedder.ff.net.2",
    ]
)  # fmt: skip


def sgm(pipeline: Any) -> Table:
    """The U-Net of SDXL as the original model numbers its blocks through."""
    unet = pipeline.unet
    each = unet.config.layers_per_block
    down, up = len(unet.down_blocks), len(unet.up_blocks)
    parts = {"conv_in": "input_blocks.0.0", "conv_out": "out.2"}
    parts |= {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2"}
    parts |= {"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
    for block in range(down):
        for layer in range(each):
            number = 1 + block * (each + 1) + layer
            parts |= {f"down_blocks.{block}.resnets.{layer}": f"input_blocks.{number}.0"}
            parts |= {f"down_blocks.{block}.attentions.{layer}": f"input_blocks.{number}.1"}
        parts |= {f"down_blocks.{block}.downsamplers.0.conv": f"input_blocks.{(block + 1) * (each + 1)}.0.op"}
    parts |= {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1", "mid_block.resnets.1": "middle_block.2"}
    for block in range(up):
        for layer in range(each + 1):
            number = block * (each + 1) + layer
            parts |= {f"up_blocks.{block}.resnets.{layer}": f"output_blocks.{number}.0"}
            parts |= {f"up_blocks.{block}.attentions.{layer}": f"output_blocks.{number}.1"}
        sampler = 2 if hasattr(unet.up_blocks[block], "attentions") else 1
        parts |= {f"up_blocks.{block}.upsamplers.0.conv": f"output_blocks.{block * (each + 1) + each}.{sampler}.conv"}
    inner = {"conv1": "in_layers.2", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}
    found = {}
    for path in layers(unet):
        ours = max((part for part in parts if path == part or path.startswith(f"{part}.")), key=len)
        rest = path[len(ours) :].lstrip(".")
        theirs = ".".join(filter(None, (parts[ours], inner.get(rest, rest))))
        found["lora_unet_" + theirs.replace(".", "_")] = (f"unet.{path}",)
    return found


# --- pipelines ------------------------------------------------------------------------------------------------------------


def tiny_clip(*, projection: bool = False) -> Any:
    """A CLIP text encoder of two layers, 32 wide."""
    config = transformers.CLIPTextConfig(
        vocab_size=99, bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, projection_dim=32, max_position_embeddings=16,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config)


def sd15() -> Any:
    """Stable Diffusion with a text encoder."""
    pipeline = stable_diffusion.pipeline(diffusers.StableDiffusionPipeline)
    pipeline.register_modules(text_encoder=tiny_clip())
    return pipeline


def sdxl() -> Any:
    """SDXL with both of its text encoders."""
    pipeline = stable_diffusion_xl._pipeline(diffusers.StableDiffusionXLPipeline)
    pipeline.register_modules(text_encoder=tiny_clip(), text_encoder_2=tiny_clip(projection=True))
    return pipeline


def sd3() -> Any:
    """Stable Diffusion 3 with its two CLIP text encoders."""
    pipeline = stable_diffusion_3._pipeline(diffusers.StableDiffusion3Pipeline)
    pipeline.register_modules(text_encoder=tiny_clip(projection=True), text_encoder_2=tiny_clip(projection=True))
    return pipeline


def sd35() -> Any:
    """Stable Diffusion 3.5: its first block has a second attention."""
    pipeline = stable_diffusion_3._pipeline(diffusers.StableDiffusion3Pipeline)
    shape = stable_diffusion_3.SIZES | {"num_layers": 2, "dual_attention_layers": (0,)}
    pipeline.register_modules(transformer=diffusers.SD3Transformer2DModel(**shape))
    return pipeline


def flux_of_real_width() -> Any:
    """Flux with one block of each kind, as wide as it is (diffusers' conversion knows that number), and whatever weights."""
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    # Memory that nobody touches is no memory.
    transformer.to_empty(device="cpu")
    pipeline = diffusers.FluxPipeline(
        transformer=transformer, vae=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip
    pipeline.register_modules(text_encoder=tiny_clip())
    return pipeline


def _built(make: Callable[[], Any]) -> Callable[[], Any]:
    return build_seeded(make)


SD15, SDXL, SD3, SD35 = map(_built, (sd15, sdxl, sd3, sd35))
FLUX_PIPELINE = flux_of_real_width
FLUX2_PIPELINE, QWEN, Z_IMAGE = (family.FAMILIES[0].build for family in (flux2, qwen, z_image))
WAN = wan.FAMILIES[1].build
TO_IMAGE = wan.FAMILIES[0].build


def bare(component: str) -> str:
    """No component in the name: it is the denoiser's."""
    return ""


def peft_prefix(component: str) -> str:
    """As peft writes them."""
    return "base_model.model."


# What its conversion names without a component, diffusers then does not find.
def _outside_of_blocks(module: str) -> bool:
    return "_blocks." not in module and module.startswith("transformer.")


CASES = [
    Case("SD 1.5", "diffusers", SD15, own("unet", "text_encoder"), PEFT, "diffusers"),
    Case("SD 1.5", "diffusers, old", SD15, old_attention("unet"), OLD_ATTENTION, "diffusers"),
    Case("SD 1.5", "peft", SD15, own("unet", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("SD 1.5", "Kohya", SD15, both(flat("unet", "lora_unet_"), clip("text_encoder", "lora_te_")), KOHYA, "kohya", one_alpha=True),
    Case("SDXL", "diffusers", SDXL, own("unet", "text_encoder", "text_encoder_2"), PEFT, "diffusers"),
    Case("SDXL", "diffusers, lora.down", SDXL, own("unet"), DOTS, "diffusers"),
    Case("SDXL", "peft", SDXL, own("unet", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case(
        "SDXL", "Kohya", SDXL,
        both(sgm, clip("text_encoder", "lora_te1_"), clip("text_encoder_2", "lora_te2_")), KOHYA, "kohya", one_alpha=True,
    ),
    Case("SDXL", "Kohya, names of diffusers", SDXL, without("add_embedding", flat("unet", "lora_unet_")), KOHYA, "kohya", one_alpha=True),
    Case("SD3", "diffusers", SD3, own("transformer", "text_encoder", "text_encoder_2"), PEFT, "diffusers"),
    Case("SD3", "peft", SD3, own("transformer", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case(
        "SD3", "Kohya", SD3,
        both(
            original(SD3_BLOCKS, SD3_OTHERS, separator="_", prefix="lora_unet_"),
            clip("text_encoder", "lora_te1_"), clip("text_encoder_2", "lora_te2_"),
        ),
        KOHYA, "kohya", diffusers_refuses="no conversion",
    ),
    Case(
        "SD3", "original, 3.5", SD35, original(SD3_BLOCKS, SD3_OTHERS, prefix="diffusion_model."), PEFT, "kohya",
        diffusers_refuses="no conversion",
    ),
    Case("Flux", "diffusers", FLUX_PIPELINE, own("transformer"), PEFT, "diffusers"),
    Case("Flux", "diffusers with alphas", FLUX_PIPELINE, own("transformer"), PEFT_ALPHA, "diffusers", one_alpha=True),
    Case("Flux", "peft", FLUX_PIPELINE, own("transformer", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="other names"),
    Case(
        "Flux", "Kohya", FLUX_PIPELINE,
        both(original(FLUX, FLUX_OTHERS, separator="_", prefix="lora_unet_"), clip("text_encoder", "lora_te1_")),
        KOHYA, "kohya", lost=_outside_of_blocks,
    ),
    Case("Flux", "original", FLUX_PIPELINE, original(FLUX, prefix="diffusion_model."), KOHYA, "kohya"),
    Case("Flux", "XLabs", FLUX_PIPELINE, original(XLABS_BLOCKS), XLABS, "kohya"),
    Case("Flux 2", "diffusers", FLUX2_PIPELINE, own("transformer"), PEFT, "diffusers"),
    Case("Flux 2", "peft", FLUX2_PIPELINE, own("transformer", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="original names only"),
    Case("Flux 2", "peft, original names", FLUX2_PIPELINE, original(FLUX2, FLUX2_OTHERS, prefix="base_model.model."), PEFT, "peft"),
    Case("Flux 2", "original", FLUX2_PIPELINE, original(FLUX2, FLUX2_OTHERS, prefix="diffusion_model."), PEFT, "kohya"),
    Case("Flux 2", "original with alphas", FLUX2_PIPELINE, original(FLUX2, FLUX2_OTHERS, prefix="diffusion_model."), PEFT_ALPHA, "kohya",
         diffusers_refuses="alphas"),
    Case("Flux 2", "Kohya", FLUX2_PIPELINE, original(FLUX2, FLUX2_KOHYA_OTHERS, separator="_", prefix="lora_unet_"), KOHYA, "kohya"),
    Case("Qwen-Image", "diffusers", QWEN, own("transformer"), PEFT, "diffusers"),
    Case("Qwen-Image", "peft", QWEN, own("transformer", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("Qwen-Image", "peft's default adapter", QWEN, own("transformer", prefix=bare), PEFT_DEFAULT, "diffusers"),
    Case("Qwen-Image", "original", QWEN, own("transformer", prefix=lambda component: "diffusion_model."), PEFT_ALPHA, "kohya"),
    Case("Qwen-Image", "Kohya", QWEN, flat("transformer", "lora_unet_"), KOHYA, "kohya"),
    Case("Z-Image", "diffusers", Z_IMAGE, own("transformer"), PEFT, "diffusers"),
    Case("Z-Image", "peft", Z_IMAGE, own("transformer", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("Z-Image", "original", Z_IMAGE, own("transformer", prefix=lambda component: "diffusion_model."), KOHYA, "kohya"),
    Case("Z-Image", "Kohya", Z_IMAGE, flat("transformer", "lora_unet_"), KOHYA, "kohya"),
    Case("Wan", "diffusers", WAN, own("transformer"), PEFT, "diffusers"),
    Case("Wan", "peft", WAN, own("transformer", prefix=peft_prefix), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("Wan", "original", WAN, original(WAN_BLOCKS, WAN_OTHERS, prefix="diffusion_model."), PEFT, "kohya"),
    Case("Wan", "original, text to video", TO_IMAGE, original(WAN_BLOCKS, prefix="diffusion_model."), KOHYA, "kohya"),
    Case("Wan", "Kohya", WAN, original(WAN_BLOCKS, separator="_", prefix="lora_unet_"), KOHYA, "kohya"),
]  # fmt: skip
