# SPDX-License-Identifier: Apache-2.0
"""Names in an adapter's file: the module and the factor of each tensor, the format, and kinds of adapters that are no plain LoRA.

Names of peft and diffusers are read here; those of the original models (Kohya's and other trainers') become diffusers' names
in `conversion`.
"""

import enum
import re
from collections.abc import Iterable

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.located import shown


class Format(enum.StrEnum):
    """The naming of a file's tensors.

    `PEFT` is that of peft's folders, and `DIFFUSERS` begins with a component's name or nothing. `KOHYA` uses modules of the original
    model, as Kohya's and other trainers do.
    """

    PEFT = "peft"
    DIFFUSERS = "diffusers"
    KOHYA = "kohya"


class Part(enum.StrEnum):
    """The role of a tensor in its module: one of the factors, or alpha."""

    A = "A"
    B = "B"
    ALPHA = "alpha"


class TensorName(msgspec.Struct, frozen=True, gc=False):
    """A tensor's name, split into module and part; `module` is as in the file."""

    module: str
    part: Part


PEFT_PREFIX = "base_model.model."
# No module of a diffusers model begins like this: without a model at hand, these mark a file that has to be converted.
ORIGINAL_PREFIXES = (
    "diffusion_model.",
    "lora_unet_",
    "lora_te",
    "lora_transformer_",
    "lycoris_",
    "text_encoders.",
    "double_blocks.",
    "single_blocks.",
)
_FACTOR = re.compile(
    r"(?P<module>.+?)\.(?:lora_(?P<letter>[AB])(?:\.[A-Za-z0-9_-]+)?|(?:lora_|lora\.|lora_linear_layer\.)?(?P<way>down|up))\.weight"
)
# Nearly all names end like this, and a comparison is faster than a pattern.
_COMMON_ENDS = (".lora_A.weight", ".lora_B.weight")
_COMMON_LENGTH = len(_COMMON_ENDS[0])
_COMMON_PARTS = {"A": Part.A, "B": Part.B}
_ALPHA = re.compile(r"(?P<module>.+)\.alpha")
_COMPONENT = re.compile(r"(?:transformer|unet|text_encoder)(?:_\d+)?")
# Modules of diffusers' first attention processors, which are named for their role in the attention.
_OLD_ATTENTION = {"to_q_lora": "to_q", "to_k_lora": "to_k", "to_v_lora": "to_v", "to_out_lora": "to_out.0"}
_OLD_TEXT_ATTENTION = {"to_q_lora": "q_proj", "to_k_lora": "k_proj", "to_v_lora": "v_proj", "to_out_lora": "out_proj"}
# Patterns in names of adapters that would not be applied exactly, and their kinds; the first match is reported.
_OTHER_KINDS = (
    (re.compile(r"dora_scale|lora_magnitude_vector"), "DoRA"),
    (re.compile(r"\.lokr_"), "LoKr"),
    (re.compile(r"\.hada_"), "LoHa"),
    (re.compile(r"\.lora_mid\b"), "LoCon with a middle factor (Tucker)"),
    (re.compile(r"\.b?oft_|\.oft_blocks|\.oft_diag"), "OFT"),
    (re.compile(r"\.on_input$"), "IA3"),
    (re.compile(r"\.[ab][12]\.weight$"), "GLoRA"),
    (re.compile(r"\.lora_E$|\.ranknum$"), "AdaLoRA"),
    (re.compile(r"vera_lambda"), "VeRA"),
    (re.compile(r"lora_embedding_[AB]"), "LoRA of an embedding"),
    (re.compile(r"lora_controlnet"), "Control-LoRA"),
    (re.compile(r"\.diff_b$|\.b_norm$"), "a full difference of a bias (diff_b)"),
    (re.compile(r"\.diff$|\.w_norm$|\.set_weight$"), "a full difference of a weight (diff)"),
    (re.compile(r"\.lora_[AB](?:\.[A-Za-z0-9_-]+)?\.bias$|\.lora_(?:up|down)\.bias$|\.lora_bias$"), "LoRA with biases"),
    (re.compile(r"emb_params|bundle_emb"), "textual inversion"),
)


def refuse_other_kinds(names: Iterable[str], label: str) -> None:
    """Raise RequestError (UnsupportedFormat) with the kind of an adapter, if a name shows that it is no plain LoRA."""
    for name in names:
        for pattern, kind in _OTHER_KINDS:
            if pattern.search(name):
                raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected a plain LoRA, found {kind}: tensor {shown(name)}")


def take_apart(name: str) -> TensorName | None:
    """Split a tensor's name into module and part; return None if the name does not end like a factor or an alpha."""
    if name.endswith(_COMMON_ENDS) and len(name) > _COMMON_LENGTH:
        return TensorName(name[:-_COMMON_LENGTH], _COMMON_PARTS[name[-8]])
    match = _FACTOR.fullmatch(name)
    if match is not None:
        return TensorName(match["module"], Part(match["letter"] or {"down": "A", "up": "B"}[match["way"]]))
    match = _ALPHA.fullmatch(name)
    return TensorName(match["module"], Part.ALPHA) if match is not None else None


def module_path(module: str, *, denoiser: str) -> str:
    """Return `component.path` of a module in peft's or diffusers' naming; a name without a component is the denoiser's.

    Names of diffusers' old attention processors (`attn1.processor.to_q_lora`) become those of the layers (`attn1.to_q`).
    """
    if module.startswith(PEFT_PREFIX):
        return f"{denoiser}.{module.removeprefix(PEFT_PREFIX)}"
    component, _, path = module.partition(".")
    if not path or not is_component(component, denoiser=denoiser):
        component, path = denoiser, module
    if path.endswith("_lora"):
        parent, _, attention = path.rpartition(".")
        table = _OLD_TEXT_ATTENTION if component.startswith("text_encoder") else _OLD_ATTENTION
        path = f"{parent}.{table.get(attention, attention)}"
    return f"{component}.{path.replace('.processor.', '.')}"


def is_component(name: str, *, denoiser: str) -> bool:
    """Return whether a name is `denoiser`, or one of `transformer`, `unet` and `text_encoder`, with or without a number (`_2`)."""
    return name == denoiser or _COMPONENT.fullmatch(name) is not None


def format_of(modules: Iterable[str], *, converted: bool) -> Format:
    """Return the format of a file, from the names of its modules in it and from `converted`: they had to be renamed for diffusers."""
    if any(module.startswith(PEFT_PREFIX) for module in modules):
        return Format.PEFT
    return Format.KOHYA if converted else Format.DIFFUSERS
