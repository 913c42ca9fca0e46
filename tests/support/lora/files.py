# SPDX-License-Identifier: Apache-2.0
"""Adapter files for tiny pipelines of every family, in every naming; the update of each module is known.

Real: the pipelines' classes, the namings and the files. Not real: all weights and factors, which are random.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from diffusion_worker.lora.conversion import converter_of
from diffusion_worker.lora.naming import AdaptedModel
from support.families.images import flux2, qwen, stable_diffusion, stable_diffusion_3, z_image
from support.families.rig.family import build_seeded
from support.families.rig.tables import assemble
from support.families.videos import wan
from support.lora import namings
from support.lora.namings import SWAPPED, Table, both, clip, flat, old_attention, original, own, sgm


class Style(NamedTuple):
    """The suffixes of a naming: the names of the two factors, and the presence of alphas."""

    a: str
    b: str
    alpha: bool = False


PEFT = Style(".lora_A.weight", ".lora_B.weight")
PEFT_ALPHA = PEFT._replace(alpha=True)
PEFT_DEFAULT = Style(".lora_A.default.weight", ".lora_B.default.weight")
KOHYA = Style(".lora_down.weight", ".lora_up.weight", alpha=True)
DOTS = Style(".lora.down.weight", ".lora.up.weight")
OLD_ATTENTION = Style("_lora.down.weight", "_lora.up.weight")
XLABS = Style(".down.weight", ".up.weight")


@dataclass(frozen=True)
class Case:
    """A way to name the tensors of adapter files for a family of pipelines, and what diffusers 0.42.1 makes of such a file.

    `lost` says of a module's name whether diffusers silently drops that module. With `one_alpha` the file has one alpha for all modules,
    because diffusers mixes up different ones. `diffusers_refuses` is the reason why diffusers loads nothing.
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
        """Family and naming, by which pytest's output identifies the case."""
        return f"{self.family}, {self.naming}"


@dataclass
class Update:
    """The update of one module's weight, with matrices as factors: `scaling * b @ a`."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the change of a layer's output, `scaling * b @ a @ inputs`; each column is an input."""
        return self.scaling * (self.b @ (self.a @ inputs))


@dataclass
class MadeFile:
    """A written adapter: its path, its updates by `component.path`, and the tensors as written."""

    path: Path
    updates: dict[str, Update]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def make_file(case: Case, pipeline: Any, folder: Path, *, one_alpha: bool = False, rank: int = 2) -> MadeFile:
    """Write `adapter.safetensors` with random factors for every module of the naming's table, and return it with the updates.

    If the naming has alphas, they differ between modules unless `one_alpha` is set.
    """
    generator = torch.Generator().manual_seed(1)
    made = MadeFile(folder / "adapter.safetensors", {})
    for number, (written, targets) in enumerate(case.table(pipeline).items()):
        paths = [target.removesuffix(SWAPPED).partition(".") for target in targets]
        shapes = [pipeline.components[component].get_submodule(path).weight.shape for component, _, path in paths]
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
    """Return the model as a runner describes it to the reader of an adapter: all modules of the pipeline but its VAE."""
    components = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module) and name != "vae"}
    return AdaptedModel(components, "unet" if "unet" in components else "transformer", converter_of(pipeline))


def of_diffusers(pipeline: Any) -> dict[str, Update]:
    """Collect the only adapter that diffusers has in a pipeline, by `component.path`; factors of convolutions are flattened to matrices."""
    found = {}
    for component, module in pipeline.components.items():
        for path, layer in module.named_modules() if isinstance(module, nn.Module) else ():
            if getattr(layer, "lora_A", None):
                (name,) = layer.lora_A
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                found[f"{component}.{path}"] = Update(a.detach().flatten(1), b.detach().flatten(1), layer.scaling[name])
    return found


def tiny_clip(*, projection: bool = False) -> Any:
    """Build a CLIP text model with random weights and states of width 32; `projection` chooses the class with an output projection."""
    config = transformers.CLIPTextConfig(
        vocab_size=99, bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, projection_dim=32, max_position_embeddings=16,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config)


def with_clips(pipeline: Any, *projections: bool) -> Any:
    """Register a `tiny_clip` as `text_encoder`, and with two `projections` another as `text_encoder_2`; return the pipeline.

    Each projection is True for the class with an output projection.
    """
    names = zip(("text_encoder", "text_encoder_2"), projections, strict=False)
    pipeline.register_modules(**{name: tiny_clip(projection=each) for name, each in names})
    return pipeline


def sd35() -> Any:
    """Build a tiny Stable Diffusion 3.5: it adds dual attention to 3.0, here in the first of two blocks."""
    pipeline = stable_diffusion_3._pipeline(diffusers.StableDiffusion3Pipeline)
    shape = stable_diffusion_3.SIZES | {"num_layers": 2, "dual_attention_layers": (0,)}
    pipeline.register_modules(transformer=diffusers.SD3Transformer2DModel(**shape))
    return pipeline


def flux_of_real_width() -> Any:
    """Build Flux with one block of each kind and uninitialised weights, in real width, which diffusers' conversion assumes."""
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    # Memory that is never touched is not allocated.
    transformer.to_empty(device="cpu")
    parts = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "text_encoder": tiny_clip()}
    return assemble("FluxPipeline", transformer=transformer, **parts)


SD15 = build_seeded(lambda: with_clips(stable_diffusion.pipeline(diffusers.StableDiffusionPipeline), False))
SDXL = build_seeded(lambda: with_clips(stable_diffusion.xl_pipeline(diffusers.StableDiffusionXLPipeline), False, True))
SD3 = build_seeded(lambda: with_clips(stable_diffusion_3._pipeline(diffusers.StableDiffusion3Pipeline), True, True))
SD35, FLUX = build_seeded(sd35), flux_of_real_width
FLUX2, QWEN, Z_IMAGE = (family.FAMILIES[0].build for family in (flux2, qwen, z_image))
TO_IMAGE, WAN = (family.build for family in wan.FAMILIES[:2])
XL_CLIPS = (clip("text_encoder", "lora_te1_"), clip("text_encoder_2", "lora_te2_"))
IN_PEFT = own("transformer", prefix="base_model.model.")
IN_OTHERS = own("transformer", prefix="diffusion_model.")
SD3_NAMES, FLUX2_NAMES = (namings.SD3_BLOCKS, namings.SD3_OTHERS), (namings.FLUX2, namings.FLUX2_OTHERS)
FLUX2_ORIGINAL = original("diffusion_model.", *FLUX2_NAMES)

CASES = [
    Case("SD 1.5", "diffusers", SD15, own("unet", "text_encoder"), PEFT, "diffusers"),
    Case("SD 1.5", "diffusers, old", SD15, old_attention("unet"), OLD_ATTENTION, "diffusers"),
    Case("SD 1.5", "peft", SD15, own("unet", prefix="base_model.model."), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("SD 1.5", "Kohya", SD15, both(flat("unet", "lora_unet_"), clip("text_encoder", "lora_te_")), KOHYA, "kohya", one_alpha=True),
    Case("SDXL", "diffusers", SDXL, own("unet", "text_encoder", "text_encoder_2"), PEFT, "diffusers"),
    Case("SDXL", "diffusers, lora.down", SDXL, own("unet"), DOTS, "diffusers"),
    Case("SDXL", "peft", SDXL, own("unet", prefix="base_model.model."), PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("SDXL", "Kohya", SDXL, both(sgm, *XL_CLIPS), KOHYA, "kohya", one_alpha=True),
    Case("SDXL", "Kohya, names of diffusers", SDXL, flat("unet", "lora_unet_", picks=lambda path: "add_embedding" not in path), KOHYA,
         "kohya", one_alpha=True),
    Case("SD3", "diffusers", SD3, own("transformer", "text_encoder", "text_encoder_2"), PEFT, "diffusers"),
    Case("SD3", "peft", SD3, IN_PEFT, PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("SD3", "Kohya", SD3, both(original("lora_unet_", *SD3_NAMES), *XL_CLIPS), KOHYA, "kohya", diffusers_refuses="no conversion"),
    Case("SD3", "original, 3.5", SD35, original("diffusion_model.", *SD3_NAMES), PEFT, "kohya", diffusers_refuses="no conversion"),
    Case("Flux", "diffusers", FLUX, own("transformer"), PEFT, "diffusers"),
    Case("Flux", "diffusers with alphas", FLUX, own("transformer"), PEFT_ALPHA, "diffusers", one_alpha=True),
    Case("Flux", "peft", FLUX, IN_PEFT, PEFT, "peft", diffusers_refuses="other names"),
    Case("Flux", "Kohya", FLUX, both(original("lora_unet_", namings.FLUX, namings.FLUX_OTHERS), XL_CLIPS[0]), KOHYA, "kohya",
         # Diffusers' conversion names these without a component, so diffusers does not find them.
         lost=lambda module: module.startswith("transformer.") and "_blocks." not in module),
    Case("Flux", "original", FLUX, original("diffusion_model.", namings.FLUX), KOHYA, "kohya"),
    Case("Flux", "XLabs", FLUX, original("", namings.XLABS_BLOCKS), XLABS, "kohya"),
    Case("Flux 2", "diffusers", FLUX2, own("transformer"), PEFT, "diffusers"),
    Case("Flux 2", "peft", FLUX2, IN_PEFT, PEFT, "peft", diffusers_refuses="original names only"),
    Case("Flux 2", "peft, original names", FLUX2, original("base_model.model.", *FLUX2_NAMES), PEFT, "peft"),
    Case("Flux 2", "original", FLUX2, FLUX2_ORIGINAL, PEFT, "kohya"),
    Case("Flux 2", "original with alphas", FLUX2, FLUX2_ORIGINAL, PEFT_ALPHA, "kohya", diffusers_refuses="alphas"),
    Case("Flux 2", "Kohya", FLUX2, original("lora_unet_", namings.FLUX2, namings.FLUX2_KOHYA_OTHERS), KOHYA, "kohya"),
    Case("Qwen-Image", "diffusers", QWEN, own("transformer"), PEFT, "diffusers"),
    Case("Qwen-Image", "peft", QWEN, IN_PEFT, PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("Qwen-Image", "peft's default adapter", QWEN, own("transformer", prefix=""), PEFT_DEFAULT, "diffusers"),
    Case("Qwen-Image", "original", QWEN, IN_OTHERS, PEFT_ALPHA, "kohya"),
    Case("Qwen-Image", "Kohya", QWEN, flat("transformer", "lora_unet_"), KOHYA, "kohya"),
    Case("Z-Image", "diffusers", Z_IMAGE, own("transformer"), PEFT, "diffusers"),
    Case("Z-Image", "peft", Z_IMAGE, IN_PEFT, PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("Z-Image", "original", Z_IMAGE, IN_OTHERS, KOHYA, "kohya"),
    Case("Z-Image", "Kohya", Z_IMAGE, flat("transformer", "lora_unet_"), KOHYA, "kohya"),
    Case("Wan", "diffusers", WAN, own("transformer"), PEFT, "diffusers"),
    Case("Wan", "peft", WAN, IN_PEFT, PEFT, "peft", diffusers_refuses="loads nothing"),
    Case("Wan", "original", WAN, original("diffusion_model.", namings.WAN_BLOCKS, namings.WAN_OTHERS), PEFT, "kohya"),
    Case("Wan", "original, text to video", TO_IMAGE, original("diffusion_model.", namings.WAN_BLOCKS), KOHYA, "kohya"),
    Case("Wan", "Kohya", WAN, original("lora_unet_", namings.WAN_BLOCKS), KOHYA, "kohya"),
]  # fmt: skip
