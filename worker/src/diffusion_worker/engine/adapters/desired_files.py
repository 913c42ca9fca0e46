# SPDX-License-Identifier: Apache-2.0
"""The adapters of the mounted folder: compressed JSON beside the desired file. The kubelet brings both at once."""

import gzip
import zlib
from pathlib import Path

import msgspec

from diffusion_worker.engine.state.state_document import DesiredAdapter
from diffusion_worker.errors import ConfigError

FILE = "adapters.json.gz"


class AdapterFile(msgspec.Struct, frozen=True):
    """The content of the file."""

    adapters: list[DesiredAdapter]


def mounted_adapters(desired_path: str | None) -> dict[str, DesiredAdapter] | None:
    """Return the adapters of the file by name, in the order in which equally wanted ones are loaded; None without a file.

    Raises:
        ConfigError: the file is there and cannot be read.
    """
    if desired_path is None:
        return None
    path = Path(desired_path).with_name(FILE)
    try:
        content = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=AdapterFile)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: expected a compressed list of adapters, found: {error}") from None
    return {adapter.name: adapter for adapter in content.adapters}
