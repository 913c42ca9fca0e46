# SPDX-License-Identifier: Apache-2.0
"""Decoding of a large image in tiles that are spread over all ranks.

The VAE's own tiled decode runs twice, with another decoder in place. First it records its tiles, of which each rank then decodes some. The
second time it is given all decoded tiles to blend. So the result is bit for bit that of one rank.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.families import TileShape, model_record, models
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.parallel.agreement import same_on_all
from diffusion_worker.runner.parallel.rows import CallFailed, Execute, Parallel

Shape = tuple[int, ...]
# A tile, and the options it is decoded with.
Asked = tuple[torch.Tensor, dict[str, Any]]


def _image_shape(vae: Any) -> Callable[[torch.Tensor], Shape]:
    scale, channels = 2 ** (len(vae.config.block_out_channels) - 1), vae.config.out_channels
    return lambda tile: (tile.shape[0], channels, tile.shape[2] * scale, tile.shape[3] * scale)


def _frame_shape(vae: Any) -> Callable[[torch.Tensor], Shape]:
    scale = vae.spatial_compression_ratio
    return lambda tile: (tile.shape[0], vae.config.input_channels, 1, tile.shape[3] * scale, tile.shape[4] * scale)


SHAPES: dict[TileShape, Callable[[Any], Callable[[torch.Tensor], Shape]]] = {TileShape.IMAGE: _image_shape, TileShape.FRAME: _frame_shape}


def check_vae(component: str, vae: nn.Module) -> None:
    """Refuse a VAE for which the size of a decoded tile is not on record; `component` is its name in the pipeline.

    Raises:
        ConfigError: the class and the classes that would do, with the option `--vae-tiling`.
    """
    if model_record(type(vae)).tiles is None:
        known = ", ".join(record.name for record in models() if record.tiles is not None)
        raise ConfigError(f"--vae-tiling: {type(vae).__name__} ({component}) is not supported, expected one of {known}")


class TileDecoder:
    """Replacement for a VAE decoder's forward: it decodes, records the tiles asked for, or returns tiles decoded elsewhere.

    A copy of the VAE, which some pipelines make to decode in float32, has its own, bound to the copy's forward.
    """

    def __init__(self, decoder: nn.Module, shape: Callable[[torch.Tensor], Shape]) -> None:
        self.real = decoder.forward
        self.shape = shape
        self.asked: list[Asked] | None = None
        self.answers: list[torch.Tensor] | None = None
        decoder.forward = self.forward

    def forward(self, tile: torch.Tensor, **options: Any) -> torch.Tensor:
        """Stand in for the decoder on a tile of [rows, channels, height, width], or one with frames before the height.

        While recording it notes the tile and returns zeros of the decoded shape. While handing out it returns the next finished tile.
        Otherwise it decodes.
        """
        if self.answers is not None:
            return self.answers.pop(0)
        if self.asked is not None:
            self.asked.append((tile, options))
            return tile.new_zeros(self.shape(tile))
        result: torch.Tensor = self.real(tile, **options)
        return result

    def record_tiles(self, decode: Callable[[], Any]) -> list[Asked]:
        """Call `decode` with a decoder that returns zeros; list each tile and its options, in the order of the VAE's own calls."""
        self.asked = asked = list[Asked]()
        try:
            decode()
        finally:
            self.asked = None
        return asked

    def hand_out(self, tiles: list[torch.Tensor], decode: Callable[[], Any]) -> Any:
        """Run a decode that is given these decoded tiles; return its result."""
        self.answers = tiles
        try:
            return decode()
        finally:
            self.answers = None


class VaeTiles:
    """Tiled decoding by a VAE, with each rank decoding a share of the tiles.

    The constructor enables the VAE's own tiling, and puts a `TileDecoder` into it. Only a VAE that `check_vae` accepts may be used.
    """

    def __init__(self, vae: Any, parallel: Parallel) -> None:
        shape = model_record(type(vae)).tiles
        assert shape is not None, "check_vae refuses others"
        vae.enable_tiling()
        TileDecoder(vae.decoder, SHAPES[shape](vae))
        self._vae = vae
        self._parallel = parallel

    def decode(self, call: ModelCall, execute: Execute) -> Any | None:
        """Return the image of all rows; None for a single tile or a video, whose rows are spread instead.

        Raises:
            CallFailed: on all ranks, where a pipeline made the tiles of one of them different.
        """
        if call.arguments["z"].dim() == 5 and call.arguments["z"].shape[2] > 1:
            return None
        vae = self._vae if call.module is None else call.module
        decoder: TileDecoder = vae.decoder.forward.__self__
        rows = slice(0, call.rows)
        asked = self._parallel.agree(lambda: decoder.record_tiles(lambda: execute(call, rows)))
        # Shares of other sizes would leave the ranks in different collectives.
        if not same_on_all(self._parallel, str([tuple(tile.shape) for tile, _ in asked])):
            raise CallFailed(f"{call.component}.decode: expected the same tiles on all ranks, found others on one of them")
        if len(asked) < 2:
            return None
        tiles = self._spread(decoder, asked)
        return self._parallel.agree(lambda: decoder.hand_out(tiles, lambda: execute(call, rows)))

    def _spread(self, decoder: TileDecoder, asked: list[Asked]) -> list[torch.Tensor]:
        """Decode a share of the tiles, gather the shares of the other ranks, and return every decoded tile in the order of `asked`.

        Tile i belongs to rank i modulo the number of ranks. Shares travel as bytes, padded to the longest.
        """
        everybody, dtype = self._parallel.everybody, asked[0][0].dtype
        mine = self._parallel.agree(
            lambda: [decoder.real(tile, **_fresh(options)).to(dtype) for tile, options in asked[everybody.index :: everybody.count]]
        )
        shapes = [decoder.shape(tile) for tile, _ in asked]
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
            pieces = torch.split(part[: sum(sizes[number] for number in numbers)], [sizes[number] for number in numbers])
            # Each tile is copied to a tensor of its own, because blending writes in place.
            tiles |= {number: piece.clone().reshape(shapes[number]) for number, piece in zip(numbers, pieces, strict=True)}
        return [tiles[number] for number in range(len(asked))]


def _fresh(options: dict[str, Any]) -> dict[str, Any]:
    """Return a tile's options with an empty cache of frames, as at the start of a tile; unchanged if they have no such cache."""
    if "feat_cache" not in options:
        return options
    return options | {"feat_cache": [None] * len(options["feat_cache"]), "feat_idx": [0]}
