# SPDX-License-Identifier: Apache-2.0
"""The untrained parts of the pipeline: sizes, vocabulary, and how they are put together and written as a diffusers folder."""

import string
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from digits_training.captions import known_words
from digits_training.images import SIZE

START, END, UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<|unknown|>"
WORD_END = "</w>"
# Neighbouring latents are much alike, so a digit shows through noise that would hide finer images. The digit's identity is decided at very
# high noise levels. So training and sampling spend more of their steps there, as SD3 does for large images.
NOISE_SHIFT = 3.0
PROMPT_TOKENS = 16
TEXT_WIDTH = 64
WIDTH = 128
LATENT_CHANNELS = 4
# Bring plain images' latents (see autoencoder.py) to mean 0 and deviation 1, as diffusers' pipelines expect.
LATENT_SHIFT = -0.68
LATENT_SCALE = 2.2
PATCH = 4
# Larger images than 64x64 are accepted up to this many patches a side (256x256).
MAX_PATCHES = 32


def build_tokenizer() -> CLIPTokenizer:
    """Every word in our captions is one token; other words fall apart into letters."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    merges = merge_words(known_words())
    tokens = [START, END, UNKNOWN, *letters, *(letter + WORD_END for letter in letters), *("".join(pair) for pair in merges)]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(dict.fromkeys(tokens))},
        merges=merges,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        model_max_length=PROMPT_TOKENS,
    )


def merge_words(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent pair first, until every word is one token. The library's trainer breaks ties at random."""
    spelled = [[*word[:-1], word[-1] + WORD_END] for word in words]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for word in spelled for pair in pairwise(word)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = [_join(word, best) for word in spelled]
    return merges


def _join(word: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for symbol in word:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] += symbol
        else:
            joined.append(symbol)
    return joined


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=PROMPT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    # CLIP starts its words so close to each other that the denoiser would need long to tell them apart.
    torch.nn.init.normal_(encoder.text_model.embeddings.token_embedding.weight, std=0.5)
    return encoder


def build_autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=SIZE,
        scaling_factor=LATENT_SCALE,
        shift_factor=LATENT_SHIFT,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def build_denoiser() -> SD3Transformer2DModel:
    denoiser = SD3Transformer2DModel(
        sample_size=SIZE // 2,
        patch_size=PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=MAX_PATCHES,
        qk_norm="rms_norm",
    )
    # Diffusers spaces the positions by sample_size / pos_embed_max_size, a quarter here: too close together for the 8x8 patches of
    # one image. The table is part of the saved weights, so ours, spaced by one, is what everybody loads.
    table = get_2d_sincos_pos_embed(WIDTH, MAX_PATCHES, base_size=MAX_PATCHES, output_type="pt")
    denoiser.pos_embed.pos_embed.copy_(table.float().unsqueeze(0))
    return denoiser


def build_pipeline(seed: int) -> StableDiffusion3Pipeline:
    """Build the whole pipeline with fresh weights from `seed`."""
    torch.manual_seed(seed)
    autoencoder = build_autoencoder()
    tokenizer = build_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=build_denoiser(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=NOISE_SHIFT),
        vae=autoencoder,
        text_encoder=build_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(tokenizer),
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def save_pipeline(pipeline: StableDiffusion3Pipeline, folder: Path) -> None:
    """Write the folder in fp16; the pipeline itself is converted too and must be loaded again to go on in float32."""
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(folder)
    let_everyone_read(folder)


def let_everyone_read(folder: Path) -> None:
    """Make weights readable: safetensors writes files for their owner only, and a container's user is somebody else."""
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)


def load_pipeline(folder: Path) -> StableDiffusion3Pipeline:
    # Diffusers fills in components that a folder names as absent only if these arguments ask for it.
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
