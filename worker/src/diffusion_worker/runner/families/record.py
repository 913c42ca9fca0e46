# SPDX-License-Identifier: Apache-2.0
"""The records of classes: everything that the engine knows of a model or a pipeline by the name of its class.

Rules that go by the names of arguments, or by a class's source, are no records. They stay where they are applied.
"""

import enum

import msgspec

from diffusion_worker.config import StepCache

# The versions whose classes the records of this package were tested with.
TESTED_WITH = {"diffusers": "0.42.1", "transformers": "5.23.0"}


class Role(enum.Enum):
    """The role of an argument in a call of several rows."""

    ROW = "row"
    COLUMN = "column"  # a tensor whose second dimension is the rows
    ITEM = "item"  # a list with one entry per row
    TIME = "time"
    NESTED = "nested"
    EQUAL = "equal"


class ArgumentRole(msgspec.Struct, frozen=True):
    """The role of an argument that the rules by name and shape get wrong, and the reason."""

    argument: str
    role: Role
    why: str


class TokenCount(enum.Enum):
    """The way to count the tokens of an image in `hidden_states`."""

    PACKED = "packed"  # the second dimension
    PATCHED = "patched"  # latents by the model's patch size, along each side


class TokenSplit(msgspec.Struct, frozen=True):
    """A tensor whose tokens are split over ranks: an argument of a module, by name, or a part of its output, by position.

    `module` is the path in the model, empty for the model itself. `dim` is the dimension with the tokens, `dims` the number of dimensions.
    """

    module: str
    tensor: str | int
    dim: int
    dims: int


class SequencePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The counting and splitting of a model's tokens for `--sequence`."""

    tokens: TokenCount
    pack: int | None = None
    """Neighbouring latents, along a side, that the pipeline packs into one token; None for the model's patch size."""
    text: str | None = None
    """The argument whose tokens are split as well, a text of any length."""
    pads_text: bool = False
    """The text is padded, with a mask, to a length that can be split."""
    splits: tuple[TokenSplit, ...] = ()
    """The tensors to split, in place of diffusers' own plan. Their tokens are gathered behind `gathered`."""
    gathered: str = ""
    text_attention: str | None = None
    """Name of the attention that sees the text alone. Every rank has the whole text, so it needs no tokens of other ranks."""
    joint_processor: str | None = None
    """Class of the attention processor that our own takes the place of, because it cannot split tokens."""
    why: str = ""
    """The reason for a plan of our own."""


class TileShape(enum.Enum):
    """The output of a VAE's decoder for a tile."""

    IMAGE = "image"  # [rows, channels, height, width]
    FRAME = "frame"  # [rows, channels, 1, height, width]


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a model's position table, for models whose modules do not give its size in patches along a side."""

    side: int | None = None
    """Patches a side of a table that no module keeps."""
    by_area: bool = False
    """`pos_embed_max_size` of its modules is the area of a square."""
    one_table: bool = False
    """All axes share one table, as long as the longest of `max_size` in the model's configuration: time, height, width, in latents."""
    learned: str | None = None
    """Class of the module with learned positions, which has a `max_size` of time, height and width, in patches."""


class ModelRecord(msgspec.Struct, frozen=True):
    """The knowledge of a model class: of its calls, of its split over ranks, of its step caches, and of its positions."""

    name: str
    """The name of the class. A record holds for subclasses without one of their own."""
    library: str = ""
    """The library of the class, whose version is in `TESTED_WITH`; empty for a class of your own."""
    signatures: dict[str, str] = {}
    """Parameters of the methods whose calls are merged, with kinds and defaults, as `signature_of` writes them."""
    roles: tuple[ArgumentRole, ...] = ()
    sequence: SequencePlan | None = None
    tensor: str = ""
    """The reason why the plan of diffusers for `--tensor` serves; empty where it was not tried or does not."""
    unsharded: str = ""
    """The reason why `--shard` does not fit; empty where it fits."""
    tiles: TileShape | None = None
    """The shape of a decoded tile, for `--vae-tiling`; None where tiles cannot be spread."""
    step_caches: frozenset[StepCache] = frozenset()
    """The step caches that were shown to be right with the rows of several requests."""
    mag_ratios: str = ""
    """Name of the magnitudes of this model's residuals, which diffusers has measured, in `diffusers.hooks.mag_cache`."""
    positions: Positions | None = None

    def role(self, argument: str) -> Role | None:
        """Return the role of an argument that the rules get wrong; None where they hold."""
        return next((item.role for item in self.roles if item.argument == argument), None)


class Workaround(enum.Enum):
    """A workaround for a fault of diffusers' class, by `pipelines/diffusers_workarounds.py`."""

    HOOK_BEHIND_STAND_IN = enum.auto()
    SD3_INPAINTING = enum.auto()


class PipelineRecord(msgspec.Struct, frozen=True):
    """The knowledge of a pipeline class: of its images, its companions and its faults."""

    name: str
    """The name of the class. A record holds for subclasses without one of their own."""
    references: int = 0
    """The most images that it takes as references of any size, beside the one that is made."""
    needs_reference: bool = False
    """It fails without a reference, although its call has a default for it."""
    no_edit: str = ""
    """The reason why it serves no edit although it takes an image."""
    image_or_words: bool = False
    """It takes an image in place of words, not beside them."""
    packs: int = 1
    """Latents along a side that it packs into one token, where neither a patch size nor a processor says so."""
    edits_by: str = ""
    """The class for edits with the same components, where diffusers has it but not in its own lists."""
    inpaints_by: str = ""
    """The class for inpainting with the same components, where diffusers has it but not in its own lists."""
    in_float32: tuple[str, ...] = ()
    """Components that diffusers' own example of the class loads in float32, also where the others are in 16 bits."""
    masked_channels: int = 0
    """Input channels of a denoiser that gets a mask beside the latents. A denoiser with another number has to have the VAE's."""
    harmless: str = ""
    """The reason why it may run beside others, although its source has a word for changing the model."""
    impossible: str = ""
    """The reason why it cannot run at all."""
    unsplit: str = ""
    """The reason why `--sequence` does not fit."""
    cuts_arrays: bool = False
    """It cuts its images out of the decoded result after the conversion to an array, so that has to be one."""
    workarounds: frozenset[Workaround] = frozenset()


class CacheRecord(msgspec.Struct, frozen=True):
    """A class of caches of keys and values that a pipeline passes at every step, also where the model ignores it."""

    name: str
    layers: str
    """The attribute with the cache of each layer."""
    mode: str
    """The attribute of a layer's cache that is None while the model ignores it."""
    why: str


class SchedulerRecord(msgspec.Struct, frozen=True):
    """A class of schedulers whose step looks up its tables by the time, so that it would wait for a time on an accelerator.

    Others count their steps, or compute tensors of the accelerator from the time. A record does not hold for subclasses.
    """

    name: str


Record = ModelRecord | PipelineRecord | CacheRecord | SchedulerRecord

# The same limit of references as OpenAI's.
MOST_REFERENCES = 16
