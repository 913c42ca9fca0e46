# SPDX-License-Identifier: Apache-2.0
"""Images that adapters made alone, and what names of adapters stood for while another image was made: two ways to judge that image."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from support.soak.clients import difference, pixels
from support.worker.process import DIGITS_MODEL, WorkerProcess

# Levels of 255: a batch of another size rounds its sums in another order.
TOLERANCE = 2


@dataclass
class Spell:
    """A time in which a name may have stood for a content; None: for nothing."""

    content: int | None
    begins: float
    ends: float = float("inf")


def write_contents(folder: Path, count: int, seed: int) -> list[Path]:
    """Adapters of the digits model, each with an effect of its own."""
    # Here, as the tests of how answers are judged need none of it, and it takes seconds.
    import torch
    from diffusers import SD3Transformer2DModel

    from support.lora.peft_adapters import write_adapter

    model = SD3Transformer2DModel.from_pretrained(DIGITS_MODEL, subfolder="transformer")
    wanted = ("to_q", "to_v", "to_out.0", "ff.net.2")
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("transformer_blocks") and name.endswith(wanted)
    }
    folders = [folder / f"content-{number}" for number in range(count)]
    for number, content in enumerate(folders):
        content.mkdir()
        write_adapter(content, linears, rank=2 + number % 3 * 2, seed=seed * 1000 + number)
    return folders


class References:
    """A worker's adapters: contents by digest, spells by name, and images made alone by body and contents.

    Real: the worker that makes the images. Without one it only judges.
    """

    def __init__(self, worker: WorkerProcess | None, contents: list[Path], bodies: tuple[dict[str, Any], ...]) -> None:
        self.worker = worker
        self.contents = contents
        self.bodies = bodies
        self.digests = {
            f"sha256:{hashlib.sha256((path / 'adapter_model.safetensors').read_bytes()).hexdigest()}": number
            for number, path in enumerate(contents)
        }
        self.spells: dict[str, list[Spell]] = {}
        self.alone: dict[tuple[int, tuple[int, ...]], Any] = {}
        self.worst_difference = 0

    def make_references(self) -> None:
        """Make every image of one adapter or none alone."""
        for content, path in enumerate(self.contents):
            self.require(self.worker.put_adapter("reference", path))
            self.make_alone((content,), ["reference"])
        self.require(self.worker.delete_adapter("reference"))
        self.make_alone((), [])

    def make_alone(self, contents: tuple[int, ...], names: list[str]) -> None:
        """Make every body's image with these adapters."""
        for number, body in enumerate(self.bodies):
            answer = self.worker.request_images(**body, lora=[{"name": name} for name in names])
            self.require(answer)
            self.alone[number, contents] = pixels(answer.json())

    def require(self, answer: httpx2.Response) -> None:
        """Raise on any answer but 200."""
        assert answer.status_code == 200, answer.text

    def put_all(self, names: list[str] | tuple[str, ...]) -> None:
        """Have each name stand for the content of its number."""
        for number, name in enumerate(names):
            self.require(self.worker.put_adapter(name, self.contents[number]))
            self.spells[name] = [Spell(number, time.monotonic())]

    def change(self, name: str, content: int | None, *, drain_s: float = 10, **put: Any) -> httpx2.Response:
        """Put another content, or take it away. Until that is done, and where it is refused, the name may stand for either."""
        spells = self.spells[name]
        spells.append(Spell(content, time.monotonic()))
        if content is None:
            answer = self.worker.delete_adapter(name, drainSeconds=drain_s)
        else:
            answer = self.worker.put_adapter(name, self.contents[content], **put)
        if answer.status_code == 200:
            for spell in spells[:-1]:
                spell.ends = min(spell.ends, time.monotonic())
        return answer

    def could_be(self, name: str, begun: float, ended: float = float("inf")) -> set[int | None]:
        """Return what a name may have stood for in a time."""
        return {spell.content for spell in self.spells[name] if spell.ends >= begun and spell.begins <= ended}

    def why_wrong(self, body: int, names: list[str], document: dict[str, Any], begun: float, ended: float) -> str | None:
        """Say why an image cannot be of these names; None where it is right."""
        used = document["data"][0]["provenance"]["adapters"]
        contents = [self.digests.get(adapter["digest"], -1) for adapter in used]
        could_be = [self.could_be(name, begun, ended) for name in names]
        if [adapter["name"] for adapter in used] != names or any(
            content not in could for content, could in zip(contents, could_be, strict=True)
        ):
            return f"{names} were {could_be}: made with {contents}"
        found = pixels(document)
        off = difference(found, self.alone[body, tuple(sorted(contents))])
        self.worst_difference = max(self.worst_difference, off)
        if off <= TOLERANCE:
            return None
        near = [key for key, alone in self.alone.items() if difference(found, alone) <= TOLERANCE]
        return f"{names} {contents} body {body}: {off} levels off, the image of {near}, spread {int(np.ptp(found))}"
