# SPDX-License-Identifier: Apache-2.0
"""The requests of one loaded pipeline: all advance by one step a tick, and share model calls wherever they can."""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch

from diffusion_worker.config import Compile, LoadFormat, Offload, Quantization, WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.conversion import converter_of, converter_table
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.lora.slot_bank import PIECE_BYTES
from diffusion_worker.memory.checksum import checksum
from diffusion_worker.memory.heap import give_back_heap, unfreeze_gc
from diffusion_worker.memory.module_tensors import weights_bytes
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.weights import NOTHING_UNREAD, ModelWeights
from diffusion_worker.messages import (
    Fingerprint,
    LoadedLoRA,
    LoRAUse,
    MemoryReport,
    MemoryTag,
    ModelInfo,
    PreparedPart,
    RequestSpec,
    SleepLevel,
    Tick,
    WarmedUp,
)
from diffusion_worker.runner.fingerprint import Probe, adapter_contents
from diffusion_worker.runner.loading.adapter_layers import TEXT_ENCODER, add_on_all_ranks, create_lora_manager
from diffusion_worker.runner.loading.compilation import Compilation
from diffusion_worker.runner.loading.component_dtypes import ComponentDtypes, dtype_of
from diffusion_worker.runner.loading.offloading import Offloading, home_of
from diffusion_worker.runner.loading.pipeline import check_pipeline_class, checkpoint_folder, load_pipeline
from diffusion_worker.runner.loading.progress import LoadingProgress, ReportProgress
from diffusion_worker.runner.loading.replace_weights import replace_weights
from diffusion_worker.runner.loading.step_cache import make_step_cache
from diffusion_worker.runner.merging import Merging
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.prompt_cache import PromptCache
from diffusion_worker.runner.parallel.agreement import failures_of_all
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.parallel.setup import ParallelKinds
from diffusion_worker.runner.pipelines.description import describe, with_deployments_size
from diffusion_worker.runner.pipelines.tasks import TaskPipelines
from diffusion_worker.runner.pipelines.view import compute_on, modules_of
from diffusion_worker.runner.rank_memory import RankMemory
from diffusion_worker.runner.step_cache.cache import PipelineStepCache
from diffusion_worker.runner.stepping.pixels import Pixels, pixels_of
from diffusion_worker.runner.stepping.request_state import Body, DiffusionRequestState
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.stepper import Stepper, report_of
from diffusion_worker.runner.stepping.suspending_module import forget_copies
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from diffusion_worker.runner.warm_up import PLAIN, Variant, compiled_variants, plain_variants, task_of, warm_up

__all__ = ["DiffusionModelRunner", "DuplicateRequest", "ReportProgress", "StepOutput"]


class DuplicateRequest(ValueError):
    """Raised when a request joins under an id that runs already, which would make two requests indistinguishable."""


class DiffusionModelRunner:
    """The model side of one rank: a loaded pipeline, its weights and adapters, and running requests. The constructor loads nothing."""

    def __init__(self, config: WorkerConfig, device: torch.device, parallel: Parallel) -> None:
        self._config = config
        self._device = device
        self._parallel = parallel
        self._states: dict[str, DiffusionRequestState] = {}
        self._prompts = PromptCache(config.prompt_cache_size) if config.prompt_cache_size else None
        self._stepper = Stepper(self._states, parallel, self._prompts)
        self._weights_bytes = 0
        self._compilation = Compilation(Compile.NONE, {})
        self.pipeline: Any = None
        self._model: ModelInfo | None = None
        self._tasks: TaskPipelines | None = None
        self._offloading = Offloading(Offload.NONE, device)
        self.weights = ModelWeights(home_of(config.offload, device))
        self.loras: DiffusionLoRAManager | None = None
        self._cache: PipelineStepCache | None = None
        self._merging = Merging({})
        self._kinds: ParallelKinds | None = None
        self._memory = RankMemory(device, ranks=config.ranks, prompts=self._prompts)

    def load_model(self, report: ReportProgress, *, asleep: bool = False) -> ModelInfo:
        """Load the configured pipeline, fill its weights into slabs, and return the model's description.

        `report` gets bytes loaded and the total. Asleep, slabs take no memory and files stay unread until `restore`.

        Raises:
            ConfigError: the model cannot be loaded, or an option does not fit it.
        """
        dtype, unread = dtype_of(self._config.dtype, self._device), Placeholders(wanted_soon=not asleep)
        return self.adopt(load_pipeline(self._config, dtype, unread=unread), dtype, report, unread=unread, asleep=asleep)

    def adopt(
        self,
        pipeline: Any,
        dtype: torch.dtype,
        report: ReportProgress,
        *,
        unread: Placeholders = NOTHING_UNREAD,
        asleep: bool = False,
    ) -> ModelInfo:
        """Place a pipeline's weights as the options want them, serve it from now on, and return its description.

        The pipeline is in host memory, and replaces a former one with its adapters; no request may run. Contents of its `unread`
        placeholders are read now, or by `restore` if `asleep`. `report` gets bytes placed and the total.

        Raises:
            ConfigError: the pipeline cannot be served, or an option does not fit it.
        """
        self.pipeline = pipeline
        self.loras = None
        self.weights = ModelWeights(home_of(self._config.offload, self._device), asleep=asleep)
        modules = modules_of(pipeline)
        total = sum(map(weights_bytes, modules.values()))
        self._kinds = kinds = ParallelKinds(self._config, self._parallel, pipeline, modules)
        self._tasks = TaskPipelines(pipeline)
        info = self._tasks.describe(kinds.describe(describe(pipeline, dtype, total)))
        info = with_deployments_size(info, self._config.defaults, self._config.limits)
        progress = LoadingProgress(total, report)
        # Text encoders come first: a wake restores modules in this order, and requests begin with them.
        for name, module in sorted(modules.items(), key=lambda item: not item[0].startswith(TEXT_ENCODER)):
            module.eval().requires_grad_(False)
            kinds.place(name, self.weights, checkpoint_folder(self._config, name), unread=unread, report=progress.add)
        progress.finish()
        own = ComponentDtypes(dtype, self._config, type(pipeline)).outcome(modules)
        features = info.features | own | self._accelerate(pipeline, modules)
        self._merging = Merging(modules)
        self._model = info = msgspec.structs.replace(info, features=features, merging=self._merging.described())
        self._memory.begin(asleep=asleep)
        self.init_lora_manager()
        self._measure_weights()
        self.clear_prompt_embed_cache()
        return info

    def _measure_weights(self) -> None:
        self._weights_bytes = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _accelerate(self, pipeline: Any, modules: dict[str, torch.nn.Module]) -> dict[str, str]:
        """Set up offloading, compilation and the step cache for placed modules; return the outcome by option."""
        self._offloading = Offloading(self._config.offload, self._device)
        self._offloading.manage(modules)
        if self._config.offload is not Offload.NONE and self._tasks is not None:
            for task in self._tasks.served:
                compute_on(self._tasks.pipeline_of(task), self._device)
        self._compilation = Compilation(self._config.compile, modules)
        # The cache comes after compilation, so that its hooks stay outside of compiled code.
        self._cache = make_step_cache(self._config.step_cache, pipeline, modules, self._parallel)
        features = self._compilation.features | self._offloading.features
        if self._cache is not None:
            features["step_cache"] = str(self._config.step_cache)
        if self._config.quantization is not Quantization.NONE:
            features["quantization"] = str(self._config.quantization)
        return features

    def init_lora_manager(self) -> None:
        """Connect a manager without adapters to the pipeline, its compiled regions, the memory reports and the steps.

        Without a pipeline return at once. `adopt` calls it for every load. A later call first removes all adapters and unwraps the layers,
        for which the model must be idle.

        Raises:
            ConfigError: an option for adapters does not fit the model. RequestError: Busy while requests run; Asleep.
        """
        if self.pipeline is None or self._kinds is None:
            return
        if self.loras is not None:
            self._have_own_weights("the adapters cannot be set up again")
            self.loras.unregister_modules()
            forget_copies()
        modules = modules_of(self.pipeline)
        self.loras = create_lora_manager(
            self._config,
            modules,
            self._device,
            part_of=self._kinds.part_of,
            in_use=self._adapters_in_use,
            convert=converter_of(self.pipeline),
            converter=converter_table(self.pipeline),
            asleep=bool(self._memory.asleep),
        )
        self._memory.serve(self.weights, self.loras)
        self.loras.make_static(self._compilation.regions)
        self._stepper.serve(modules, self.loras, cache=self._cache, compute=self._compute, may_merge=self._merging.allows)

    def warm_up(self) -> WarmedUp:
        """Run the warm-up's requests of few steps; return the outcome of the options and the measured times of each run.

        Compiled code stays. At the end, also after an error, all requests are dropped, and the prompt cache is emptied with its counts.

        Raises:
            RequestError: a warm-up request failed; Asleep, and then nothing is dropped.
        """
        self._memory.require_awake("warm-up")
        assert self._model is not None and self.loras is not None
        try:
            with self.loras.dummy_adapters(1) as dummies:
                variants = self._warm_up_variants(next(iter(dummies), None))
                ticks = warm_up(self._config, self._model, self.execute_stepwise, variants=variants)
        finally:
            self.drop_all()
            if self._prompts is not None:
                self._prompts.reset()
        return WarmedUp(self._model.features, ticks)

    def _warm_up_variants(self, adapter: int | None) -> Sequence[Variant]:
        assert self._model is not None and self._tasks is not None
        if (task := task_of(self._model)) is None:
            return PLAIN
        pipeline = self._tasks.pipeline_of(task)
        if not self._compilation.regions:
            return plain_variants(pipeline, task)
        most_images = self._config.max_batch_size
        return compiled_variants(pipeline, task, most_images=most_images, ranks=self._config.ranks, adapter=adapter)

    def _compute(self, module: torch.nn.Module, call: ModelCall, plain: bool) -> Any:
        """Call a module; if `plain`, without compiled code, as diffusers itself does."""
        with self._compilation.off() if plain else nullcontext():
            return self._offloading.execute(module, call)

    def _new_features(self) -> dict[str, str] | None:
        """Return the outcome of the options if it has changed since the load or the last call, and keep it in `_model`; otherwise None."""
        assert self._model is not None
        features = self._model.features | self._compilation.features
        if features == self._model.features:
            return None
        self._model = msgspec.structs.replace(self._model, features=features)
        return features

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Overwrite tensors, named like `transformer.proj_out.weight`, with whole ones; return the names.

        A later sleep keeps the new values. Results that depend on the old values, in the prompt cache and in copies of modules, are
        forgotten.

        Raises:
            RequestError: Asleep; Busy, because running requests would see old and new weights; InvalidRequest if a name or a shape does not
                fit. No tensor was written then.
        """
        self._have_own_weights("weights cannot be replaced")
        names = replace_weights(modules_of(self.pipeline), self.weights, weights)
        self.clear_prompt_embed_cache()
        forget_copies()
        return names

    @torch.inference_mode()
    def fingerprint(self, *, probe: bool, contents: bool = True) -> Fingerprint:
        """Return a checksum of all weights, a line for each adapter and, with `probe`, digest and cells of a small image from a fixed seed.

        An adapter's line has its identity, the checksum of its copy in host memory, and `misapplied` if its slot differs from that copy. A
        model that cannot make the image has no digest. With `probe`, all ranks call this together.

        Without `contents` no weights are read: the checksum is empty, and no adapter has a line.

        Raises:
            RequestError: Busy while requests run; Asleep; InsufficientMemory.
        """
        self._have_own_weights("no fingerprint can be taken")
        assert self._model is not None and self._tasks is not None and self.loras is not None
        # The probe comes first, because ranks make it together: one that fails later keeps no other waiting.
        made = Probe(self._tasks, self._parallel, modules_of(self.pipeline), self._compute).make(self._model) if probe else None
        found = Fingerprint("")
        if contents:
            found = Fingerprint(checksum(self.weights.tensors()), adapter_contents(self.loras.host_copies(), self.loras.misapplied()))
        return found if made is None else msgspec.structs.replace(found, probe=made.digest, cells=made.cells)

    def _without_gradients(self) -> AbstractContextManager[Any]:
        # Torch gathers sharded weights without gradients. It does so in inference mode too on a CPU, but does not promise it.
        return torch.no_grad() if self._config.shard > 1 else torch.inference_mode()

    def _have_own_weights(self, consequence: str) -> None:
        """Bring offloaded weights home, before work on the weights.

        Raises:
            RequestError: Asleep; Busy while requests run. The message begins with `consequence`.
        """
        self._memory.require_awake(consequence)
        if running := len(self._states):
            raise RequestError(ErrorCode.BUSY, f"{consequence} while requests run, found {running}")
        self._offloading.send_home()

    def re_init_pipeline(self, pipeline: str, report: ReportProgress = lambda done, total: None) -> ModelInfo:
        """Replace the pipeline by another class for the same folder: a name in diffusers, or `module:Class`. Return the new description.

        A class that does not exist is refused while the old pipeline still serves. Otherwise the old one is freed first, with all requests
        and adapters. If the new one then fails to load, the old class is loaded again, without these. `report` gets bytes loaded and the
        total.

        Raises:
            RequestError: Asleep; InvalidRequest with the reason why the new class cannot serve, or an import path with dummy weights.
        """
        self._memory.require_awake("pipeline")
        before, freed = self._config, False
        by_path, dummy = ":" in pipeline or "." in pipeline, before.load_format is LoadFormat.DUMMY
        if by_path and dummy:
            expected = "expected the name of a class in diffusers, as this worker has dummy weights (--load-format dummy)"
            raise RequestError(ErrorCode.INVALID_REQUEST, f"pipeline: {expected}, found the import path {pipeline!r}")
        load_format = LoadFormat.CUSTOM_PIPELINE if by_path else LoadFormat.DUMMY if dummy else LoadFormat.DEFAULT
        try:
            self._config = msgspec.structs.replace(before, pipeline=pipeline, load_format=load_format)
            check_pipeline_class(self._config)
            freed = True
            self._free_pipeline()
            return self.load_model(report)
        except ConfigError as error:
            self._config = before
            if freed:
                self._free_pipeline()
                self.load_model(report)
            raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from error

    def _free_pipeline(self) -> None:
        self.drop_all()
        self.clear_prompt_embed_cache()
        forget_copies()
        self.pipeline = self.loras = self._tasks = self._cache = self._kinds = None
        self._stepper.serve({}, None)
        self._offloading = Offloading(Offload.NONE, self._device)
        self._compilation = Compilation(Compile.NONE, {})
        self.weights = ModelWeights(home_of(self._config.offload, self._device))
        self._memory = RankMemory(self._device, ranks=self._config.ranks, prompts=self._prompts)
        unfreeze_gc()
        give_back_heap(self._device)

    def execute_stepwise(self, tick: Tick, frames: Sequence[bytes] = ()) -> StepOutput:
        """Drop the requests in `tick.leave`, start those in `tick.join`, then advance those in `tick.advance` (None: all) by one step.

        `frames` are the images of the requests that join. These run up to their first step and take it. A request waits while its adapters
        are not in their slots, or while another has the model for itself. An error of one request ends that request only.

        Raises:
            DuplicateRequest: a request joins that runs already; then nothing was changed. After any other exception the requests that join
                are gone, and the others are as they were.
        """
        with self._without_gradients():
            return self._advance(tick, frames)

    def _advance(self, tick: Tick, frames: Sequence[bytes]) -> StepOutput:
        for spec in tick.join:
            if spec.request_id in self._states and spec.request_id not in tick.leave:
                raise DuplicateRequest(
                    f"tick {tick.number}: request {spec.request_id!r}: "
                    "expected an id that is new to this rank, found one that runs there already"
                )
        output, meter = StepOutput(), TickMeter(self._device)
        for request_id in tick.leave:
            self._drop(request_id)
        try:
            self._admit(tick, frames, output)
            # A tick may name requests that are gone: it may have been sent before the server knew which ones the last tick ended.
            chosen = [state for name, state in self._states.items() if tick.advance is None or name in tick.advance]
            chosen = self._with_adapters(chosen)
            self._stepper.advance(chosen, output, meter)
        except BaseException:
            for spec in tick.join:
                self._drop(spec.request_id)
            raise
        output.features = self._new_features()
        output.denoise_seconds = meter.denoise_seconds()
        output.prompt_cache = None if self._prompts is None else self._prompts.news()
        output.peak_bytes = meter.peak_bytes(self._weights_bytes)
        for state in chosen:
            state.clock.peak_bytes = max(state.clock.peak_bytes, output.peak_bytes)
        return output

    def _with_adapters(self, chosen: list[DiffusionRequestState]) -> list[DiffusionRequestState]:
        """Return the requests whose adapters are in their slots, after copying more of the missing ones.

        While others can run, a tick copies one piece at most. All ranks copy the same.
        """
        loras = self.loras
        if loras is None or all(loras.is_ready(state.spec.loras) for state in chosen):
            return chosen
        others = any(loras.is_ready(state.spec.loras) for state in self._states.values())
        loras.fill(at_most=PIECE_BYTES if others else None)
        return [state for state in chosen if loras.is_ready(state.spec.loras)]

    def _admit(self, tick: Tick, frames: Sequence[bytes], output: StepOutput) -> None:
        """Add the requests that join, each with its share of `frames`, except those that any rank refuses: their errors go to `output`."""
        if not tick.join:
            return
        assert self._tasks is not None
        refused = {}
        left = iter(frames)
        for spec, count in zip(tick.join, tick.frames or [0] * len(tick.join), strict=True):
            own = list(itertools.islice(left, count))
            try:
                self.join(spec, self._tasks.body(spec, own))
            except Exception as error:
                refused[spec.request_id] = report_of(error, asked=False)
        output.errors |= failures_of_all(self._parallel, refused)
        for request_id in output.errors:
            self._drop(request_id)

    def execute_model(self, spec: RequestSpec, frames: Sequence[bytes] = ()) -> Pixels:
        """Run one request from start to end, with its adapters; running requests wait. `frames` are its images.

        Raises:
            RequestError: InvalidRequest without a prompt; Busy while another request has the model for itself; the request's own error;
                RequestFailed where the pipeline returned no image.
        """
        if not spec.prompt:
            raise RequestError(ErrorCode.INVALID_REQUEST, "prompt: expected some text, found none", details={"field": "prompt"})
        if (other := self._stepper.running_alone()) is not None:
            # It would not advance in the ticks of this one, and this one waits for its end.
            has_it = f"request {other.spec.request_id!r} has the model for itself until it ends"
            raise RequestError(ErrorCode.BUSY, f"request {spec.request_id!r} cannot run: {has_it}")
        join = [spec]
        for number in itertools.count(1):
            tick = Tick(number, join, advance=[spec.request_id], frames=[len(frames)] * len(join) if frames else [])
            output = self.execute_stepwise(tick, frames if join else ())
            join = [msgspec.structs.replace(spec, whole=True)] if output.replays else []
            if (error := output.errors.get(spec.request_id)) is not None:
                raise RequestError(ErrorCode(error.code), error.message)
            if spec.request_id in output.images:
                return self._checked(pixels_of(output.images[spec.request_id]))
        raise AssertionError("unreachable")

    def _checked(self, image: Any) -> Pixels:
        if isinstance(image, np.ndarray) and image.dtype == np.uint8:
            return image
        made = f"{type(self.pipeline).__name__} returned {type(image).__name__}"
        raise RequestError(ErrorCode.REQUEST_FAILED, f"{made}, expected an image as an array of uint8")

    def supports_step_mode(self) -> bool:
        """Return whether some component of the pipeline has a `step`, so that requests advance by it; False while nothing is loaded.

        Requests of other pipelines advance by one denoiser call a tick.
        """
        return self.pipeline is not None and any(hasattr(part, "step") for part in self.pipeline.components.values())

    def add_lora(self, request: LoRARequest, options: LoadOptions, parts: Sequence[PreparedPart] = ()) -> LoadedLoRA:
        """Take over this rank's entry of `parts`, an adapter that the process of a load prepared, and register it.

        Without such an entry all ranks read the files themselves, and register it only if all of them can.

        Raises:
            RequestError: the errors of `DiffusionLoRAManager.adopt`, or of `read` without such an entry.
        """
        assert self.loras is not None
        mine = next((part for part in parts if self._parallel.rank in part.ranks), None)
        if mine is not None:
            return self.loras.adopt(request, options, mine)
        return add_on_all_ranks(self.loras, self._parallel, request, options)

    def _adapters_in_use(self) -> list[LoRAUse]:
        return [use for state in self._states.values() for use in state.spec.loras]

    def join(self, spec: RequestSpec, body: Body) -> None:
        """Create a request's state and activate its adapters; `body` starts in the first tick that advances the request.

        After an error nothing is added.

        Raises:
            DuplicateRequest: a request has this id already. RequestError: Asleep; AdapterNotLoaded; CapacityExceeded, running requests use
                all slots.
        """
        self._memory.require_awake(f"request {spec.request_id!r}")
        if spec.request_id in self._states:
            raise DuplicateRequest(
                f"request {spec.request_id!r}: expected an id that is new to this rank, found one that runs there already"
            )
        self._states[spec.request_id] = DiffusionRequestState(
            spec, body, exact=self._config.exact, check_sharing=self._config.check_sharing
        )
        try:
            # The request's adapters are in use from here on, so none of them can be evicted for another.
            if self.loras is not None:
                self.loras.activate(spec.loras)
        except BaseException:
            self._drop(spec.request_id)
            raise

    def drop_all(self) -> None:
        """End every request without a result. Adapters and caches stay."""
        for request_id in list(self._states):
            self._drop(request_id)

    def clear_prompt_embed_cache(self) -> None:
        """Forget the results of text encoders, and keep the cache's counts; do nothing where the cache is off."""
        if self._prompts is not None:
            self._prompts.clear()

    def get_prompt_embed_cache_stats(self) -> dict[str, int] | None:
        """Return the fields of `PromptCacheStats` as a dict, counted since the warm-up; None if `prompt_cache_size` is 0."""
        return None if self._prompts is None else msgspec.structs.asdict(self._prompts.stats())

    def memory(self) -> MemoryReport:
        """Report the bytes of weights, adapters and the prompt cache on this rank by place, and the tags that are asleep."""
        return self._memory.report()

    def release(self, level: SleepLevel = SleepLevel.HOST_MEMORY) -> None:
        """Drop all requests, then free weights, adapter slots and caches. `level` decides what stays in host memory for a wake.

        Raises:
            RequestError: InvalidRequest if weights are outside of slabs, as with --shard; then all requests run on. InsufficientMemory if
                the copies in host memory do not fit; then the requests are gone, and all memory is kept.
        """
        self.weights.require_sleep()
        self.drop_all()
        self._memory.release(level)

    def restore(self, tags: Sequence[MemoryTag] = tuple(MemoryTag)) -> None:
        """Restore the memory of these tags; tags that are awake stay as they are. No step is taken before all memory is back.

        Raises:
            RequestError: InsufficientMemory; EngineFailed, a weights file has changed. All of these tags sleep as before then.
        """
        self._memory.restore(tags)
        self._measure_weights()

    def _drop(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            state.drop()
