# SPDX-License-Identifier: Apache-2.0
"""A diffusion transformer of 0.4 million random parameters on the real model runner, for benchmarks of the engine.

On a CPU it has both regimes of a large model on a GPU. At 32 pixels a step is bound by launches, and several images cost little more than
one. At 256 pixels arithmetic binds, and costs add up.
"""

import time
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch._C._distributed_c10d import HashStore

from diffusion_worker.config import WorkerConfig
from diffusion_worker.messages import Failed, Finished, RequestSpec, Tick, TickDone
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel.rows import Execute, Parallel
from diffusion_worker.runner.pipelines.view import view_of

CPU = torch.device("cpu")
WIDTH = 96
TEXT_TOKENS = 4


class MeteredRank(Parallel):
    """A rank group of one that meters its denoiser: `denoise_s` sums the CPU seconds that the calling thread spent there."""

    def __init__(self) -> None:
        super().__init__(rank=0, world=1, device=CPU, store=HashStore(), timeout_s=60)
        self.denoise_s = 0.0

    def run(self, calls: list[ModelCall], execute: Execute) -> Any:
        """Run the calls in one call of the model, and add its seconds to `denoise_s` if it is the denoiser's.

        Raises as `Parallel.run` does.
        """
        started = time.thread_time()
        try:
            return super().run(calls, execute)
        finally:
            if calls[0].component == "transformer":
                self.denoise_s += time.thread_time() - started


class TinyDevice:
    """Executes ticks on a model runner, one thread, and reports them as rank 0 does. A context manager: there is one in a process.

    Seconds are those that the thread computed: what else runs on the machine does not count.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = WorkerConfig(model="tiny", served_name="tiny")
        self._rank = MeteredRank()
        self.runner = DiffusionModelRunner(config, CPU, self._rank)
        self.runner.adopt(_pipeline(), torch.float32, lambda done, total: None)
        self._number = 0
        # Requests end with an image if set, else with the latents.
        self.decodes = True

    def __enter__(self) -> "TinyDevice":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._rank.close()

    def execute(self, tick: Tick) -> TickDone:
        """Join the tick's new requests, run its steps, and report it. An image is reported with a placeholder shape, without its pixels.

        Raises:
            RuntimeError: a request failed, which is unexpected here.
        """
        self._rank.denoise_s = 0.0
        started = time.thread_time()
        for spec in tick.join:
            self.runner.join(spec, self._body(spec))
        output = self.runner.execute_stepwise(Tick(tick.number, [], tick.leave, tick.advance))
        if output.errors:
            raise RuntimeError(f"a request failed: {next(iter(output.errors.values())).message}")
        return TickDone(
            tick.number,
            [Finished(name, 0, (1, 1, 3)) for name in output.images],
            [Failed(name, error) for name, error in output.errors.items()],
            output.rows,
            output.calls,
            time.thread_time() - started,
            self._rank.denoise_s,
        )

    def run_together(self, specs: list[RequestSpec]) -> list[TickDone]:
        """Join all requests in the first tick, and tick until each has finished; return a report for each tick, in order."""
        reports: list[TickDone] = []
        names = [spec.request_id for spec in specs]
        left = set(names)
        while left:
            self._number += 1
            reports.append(self.execute(Tick(self._number, specs if not reports else [], [], names)))
            left -= {finished.request_id for finished in reports[-1].finished}
        return reports

    def _body(self, spec: RequestSpec) -> Any:
        view = view_of(self.runner.pipeline)
        generator = torch.Generator().manual_seed(spec.seed)
        text = torch.randn(1, TEXT_TOKENS, WIDTH, generator=generator)
        pooled = torch.randn(1, WIDTH, generator=generator)

        def body() -> Any:
            return view(
                prompt_embeds=text,
                pooled_prompt_embeds=pooled,
                guidance_scale=1.0,
                num_inference_steps=spec.steps,
                height=spec.height,
                width=spec.width,
                generator=generator,
                output_type="pt" if self.decodes else "latent",
                return_dict=False,
            )[0]

        return body


def request(name: str, *, side: int, steps: int, seed: int = 0) -> RequestSpec:
    """Specify a square image of `side` pixels, with guidance off.

    The prompt is empty, because the device draws embeddings from the seed.
    """
    return RequestSpec(request_id=name, prompt="", seed=seed, height=side, width=side, steps=steps, guidance_scale=1.0)


def _pipeline() -> StableDiffusion3Pipeline:
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=64,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"))
    pipeline = StableDiffusion3Pipeline(transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(), **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
