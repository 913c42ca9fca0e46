# SPDX-License-Identifier: Apache-2.0
"""`DiffusionEngine`: images in a script, by the engine, the scheduler and the rank processes of the server, without HTTP."""

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

import msgspec
from PIL.Image import Image

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.state.request_events import Generation, RequestEvent
from diffusion_worker.engine.state.state_document import AdapterState
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError, refused
from diffusion_worker.offline.arguments import (
    AdapterArgument,
    Scales,
    WantedAdapter,
    described,
    image_fields,
    load_adapters,
    wanted_adapters,
    worker_config,
)
from diffusion_worker.offline.engine_thread import EngineThread
from diffusion_worker.offline.generated_image import GeneratedImage
from diffusion_worker.offline.progress import StepCounts, load_bar, step_bar
from diffusion_worker.options import parse_size
from diffusion_worker.ranks.executor import RankExecutor


class DiffusionEngine:
    """The server's engine in a script, with a model on rank processes that it starts.

        with DiffusionEngine("models/digits") as engine:
            stripes = LoRARequest("stripes", 1, "loras/stripes")
            image, = engine.generate("a red digit seven", seed=1, lora_request=stripes, lora_scale=0.8)
            image.save("seven.png")

    Several threads may use it at once; their images are made in the same batches. The end of the `with` block, `close`, garbage collection
    and the interpreter's exit stop it. The ranks never outlive this process.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        ranks: int = 1,
        loras: Mapping[str, str | PathLike[str]] | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> None:
        """Start the rank processes, and return once the model and all `loras` are loaded.

        Each name in `loras` stands for a folder, a file or another source. `options` are the command line's except those for a server
        alone, by their names in `WorkerConfig` (`dtype="bfloat16"`, `max_batch_size=4`, `limits={"max_steps": 50}`). `progress` switches
        bars on or off, for the load and as the default of `generate`; None shows them only on a terminal.

        Raises:
            ConfigError: an option is unknown or out of range, or the model or an adapter cannot be loaded. GroupFailed: a rank died, or
                they were not ready in time.
        """
        config = worker_config(model, ranks, loras or {}, options)
        self._progress = progress
        self._thread = EngineThread(config, lambda: RankExecutor(config))
        # The finalizer must not refer to `self`. It also runs when the interpreter ends.
        weakref.finalize(self, self._thread.close)
        try:
            with load_bar(config.served_name, self._thread.load_progress, progress) as draw:
                self._thread.start(meanwhile=draw)
            _require_adapters(self._thread.engine)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "DiffusionEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the ranks, after at most `drain_timeout_s` for calls in other threads.

        A second `close` does nothing; `generate` then raises RequestError (Terminating).
        """
        self._thread.close()

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        n: int = 1,
        seed: int | None = None,
        size: str | None = None,
        steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
        lora_request: AdapterArgument = None,
        lora_scale: Scales = None,
        image: Image | Sequence[Image] | None = None,
        mask: Image | None = None,
        strength: float | None = None,
        exact: bool = False,
        accelerated: bool | None = None,
        progress: bool | None = None,
    ) -> list[GeneratedImage]:
        """Make `n` images of each prompt, in the prompts' order; several share the model's steps as far as that pays.

        Their seeds are `seed`, `seed + 1`, … for every prompt, or random. Missing values are the engine's or the model's defaults.
        `size` is `"WIDTHxHEIGHT"` in pixels. `lora_request` is an adapter or a list of them: a name from `loras`, or a `LoRARequest`,
        loaded from its path at its first use. `lora_scale` is its strength, or a list with one for each. With `image` they start from that
        image, or those, if the model supports it. `mask` is white in the part to repaint, `strength` the distance from the image, up to 1.
        A call that is interrupted makes nothing more.

        Raises:
            RequestError: a value is wrong (InvalidRequest, which names it), there is no such adapter (model_not_found), or it cannot be
                loaded (InvalidAdapter and the like). The engine is closed (Terminating), or an image failed.
                GroupFailed: the ranks are lost.
        """
        prompts = _prompts(prompt)
        width, height = _sides(size)
        fields = image_fields(image, mask, strength) | {"n": n, "seed": seed, "height": height, "width": width, "steps": steps}
        adapters = wanted_adapters(lora_request, lora_scale)
        fields |= {"guidance_scale": guidance_scale, "negative_prompt": negative_prompt, "exact": exact, "accelerated": accelerated}
        fields |= {"loras": [{"name": each.name, "scale": each.scale} for each in adapters]}
        fields |= {"lora_scale": None if isinstance(lora_scale, Sequence) else lora_scale}
        wanted = [_params({**fields, "prompt": text}) for text in prompts]
        return self._generate(wanted, adapters, self._progress if progress is None else progress)

    def _generate(self, wanted: list[GenerationParams], adapters: list[WantedAdapter], progress: bool | None) -> list[GeneratedImage]:
        engine = self._thread.engine
        counts = StepCounts(sum(params.n for params in wanted))

        async def make() -> list[Generation]:
            await load_adapters(engine, adapters)
            return await _make(engine, wanted, counts.listener)

        with step_bar(counts, progress) as draw:
            made = self._thread.run(make, meanwhile=draw)
        return [
            GeneratedImage(params.prompt, generation.provenance, image)
            for params, generation in zip(wanted, made, strict=True)
            for image in generation.images
        ]


async def _make(
    engine: Engine, wanted: list[GenerationParams], listener: Callable[[int], Callable[[RequestEvent], None]]
) -> list[Generation]:
    """Make the images of all requests at once, and return them in order; the first error cancels the other requests and is raised."""
    tasks = [asyncio.create_task(engine.generate(params, on_event=listener(index))) for index, params in enumerate(wanted)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _require_adapters(engine: Engine) -> None:
    """Raise ConfigError for an adapter that was not loaded. A server reports it and serves on; a script has no operator to mend it."""
    for adapter in engine.state_document().adapters:
        if adapter.state not in (AdapterState.LOADED, AdapterState.CACHED):
            why = adapter.error.message if adapter.error else f"it is {adapter.state}"
            raise ConfigError(f"loras: adapter {adapter.name!r} was not loaded: {why}")


def _prompts(prompt: str | Sequence[str]) -> list[str]:
    if not isinstance(prompt, Sequence):
        raise refused("prompt", "a text or a list of texts", type(prompt).__name__)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        raise refused("prompt", "a text or a list of texts", "an empty list")
    return prompts


def _sides(size: str | None) -> tuple[int, int] | tuple[None, None]:
    try:
        return (None, None) if size is None else parse_size(size, "size")
    except ConfigError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, str(error), details={"field": "size"}) from None


def _params(fields: dict[str, object]) -> GenerationParams:
    """Convert a call's fields to a request; raise RequestError (InvalidRequest) for a wrong type. The error does not repeat a prompt."""
    try:
        return msgspec.convert(fields, GenerationParams)
    except msgspec.ValidationError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, described(error)) from None
