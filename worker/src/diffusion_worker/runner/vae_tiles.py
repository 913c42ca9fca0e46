# SPDX-License-Identifier: Apache-2.0
"""A large picture is decoded in tiles, and the tiles are spread over all ranks.

The VAE's own tiled decode runs three times with another decoder in place (`parallel.md` 6): it is asked for its tiles, each
rank decodes some, and it is given all of them to blend. So the result is bit for bit that of one rank.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.calls import ModelCall
from diffusion_worker.runner.parallel import Execute, Parallel

Shape = tuple[int, ...]


def _picture_shape(vae: Any) -> Callable[[torch.Tensor], Shape]:
    scale, channels = 2 ** (len(vae.config.block_out_channels) - 1), vae.config.out_channels
    return lambda tile: (tile.shape[0], channels, tile.shape[2] * scale, tile.shape[3] * scale)


def _frame_shape(vae: Any) -> Callable[[torch.Tensor], Shape]:
    scale = vae.spatial_compression_ratio
    return lambda tile: (tile.shape[0], vae.config.input_channels, 1, tile.shape[3] * scale, tile.shape[4] * scale)


# What comes out of the decoder of each VAE.
SHAPES: dict[str, Callable[[Any], Callable[[torch.Tensor], Shape]]] = {
    "AutoencoderKL": _picture_shape,
    "AutoencoderKLFlux2": _picture_shape,
    "AutoencoderKLQwenImage": _frame_shape,
}


def check_vae(name: str, vae: nn.Module) -> None:
    """Raises ConfigError for a VAE whose tiles cannot be spread."""
    kind = type(vae).__name__
    if kind not in SHAPES:
        raise ConfigError(f"--vae-tiling: {kind} ({name}) is not supported, expected one of {', '.join(SHAPES)}")


class TileDecoder(nn.Module):
    """In place of a VAE's decoder: decodes, or notes down what it is asked for, or hands out what was decoded elsewhere."""

    def __init__(self, real: nn.Module, shape: Callable[[torch.Tensor], Shape]) -> None:
        super().__init__()
        self.real = real
        self.shape = shape
        self.asked: list[tuple[torch.Tensor, dict[str, Any]]] | None = None
        self.answers: list[torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        """Pipelines look at a decoder's layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)

    def forward(self, tile: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.answers is not None:
            return self.answers.pop(0)
        if self.asked is not None:
            self.asked.append((tile, options))
            return tile.new_zeros(self.shape(tile))
        result: torch.Tensor = self.real(tile, **options)
        return result


class VaeTiles:
    """The tiles of one VAE over the ranks."""

    def __init__(self, vae: Any, parallel: Parallel) -> None:
        vae.enable_tiling()
        self._decoder = TileDecoder(vae.decoder, SHAPES[type(vae).__name__](vae))
        vae.decoder = self._decoder
        self._parallel = parallel

    def decode(self, call: ModelCall, execute: Execute) -> Any | None:
        """The picture of all rows; None where it is no larger than a tile, or a video: then the rows are spread."""
        if call.arguments["z"].dim() == 5 and call.arguments["z"].shape[2] > 1:
            return None
        rows = slice(0, call.rows)
        asked = self._parallel.agree(lambda: self._ask(lambda: execute(call, rows)))
        if len(asked) < 2:
            return None
        tiles = self._decode(asked)
        return self._parallel.agree(lambda: self._blend(tiles, lambda: execute(call, rows)))

    def _ask(self, decode: Callable[[], Any]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        asked: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self._decoder.asked = asked
        try:
            decode()
        finally:
            self._decoder.asked = None
        return asked

    def _decode(self, asked: list[tuple[torch.Tensor, dict[str, Any]]]) -> list[torch.Tensor]:
        """All tiles, of which this rank decodes every `world`-th."""
        everybody, dtype = self._parallel.everybody, asked[0][0].dtype
        mine = self._parallel.agree(
            lambda: [self._decoder.real(tile, **_fresh(options)).to(dtype) for tile, options in asked[everybody.index :: everybody.count]]
        )
        shapes = [self._decoder.shape(tile) for tile, _ in asked]
        sizes = [math.prod(shape) for shape in shapes]
        longest = max(sum(sizes[index :: everybody.count]) for index in range(everybody.count))
        packed = asked[0][0].new_zeros(longest)
        if mine:
            flat = torch.cat([tile.reshape(-1) for tile in mine])
            packed[: flat.numel()] = flat
        parts = everybody.gather_bytes(packed.view(torch.uint8)).view(dtype).reshape(everybody.count, -1)
        tiles: dict[int, torch.Tensor] = {}
        for index, part in enumerate(parts):
            numbers = range(index, len(asked), everybody.count)
            pieces = part[: sum(sizes[number] for number in numbers)].split([sizes[number] for number in numbers])
            # Copies, each a tensor of its own: blending writes in place.
            tiles |= {number: piece.clone().reshape(shapes[number]) for number, piece in zip(numbers, pieces, strict=True)}
        return [tiles[number] for number in range(len(asked))]

    def _blend(self, tiles: list[torch.Tensor], decode: Callable[[], Any]) -> Any:
        self._decoder.answers = tiles
        try:
            return decode()
        finally:
            self._decoder.answers = None


def _fresh(options: dict[str, Any]) -> dict[str, Any]:
    """A frame's cache as it is at the start of a tile; the VAE's own was used by nobody."""
    if "feat_cache" not in options:
        return options
    return options | {"feat_cache": [None] * len(options["feat_cache"]), "feat_idx": [0]}
