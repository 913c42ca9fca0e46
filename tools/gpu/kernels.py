# SPDX-License-Identifier: Apache-2.0
"""Three steady steps under torch's profiler, and the denoiser alone: the GEMM roof, attention backends, fp8, compiled blocks."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler
from torch.utils.flop_counter import FlopCounterMode

from diffusion_worker.config import Compile
from diffusion_worker.runner.loading.compilation import Compilation

from .device import seconds_of, synchronize
from .process import Run, Skip
from .steps import Loaded, begin, image, load_named

STEADY = 3
TERA = 1e12
# Calls of the host that wait until the device is through, and copies, which may.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync", "aten::_local_scalar_dense")
BACKENDS = ("native", "_native_cudnn", "_native_flash", "flash", "_flash_3", "sage")
TIMES = 5


def profile(run: Run) -> None:
    """Profile three steady steps of an image, and report their time, the kernels, and the denoiser's rate against a matrix product."""
    loaded = load_named(run, run.subject)
    # The first step encodes the prompt and the last one decodes the image.
    step = begin(loaded, steps=STEADY + 3)
    step()
    synchronize(run.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.on_gpu else [])]
    with profiler(activities=activities) as seen:
        began = time.perf_counter()
        for _ in range(STEADY):
            step()
        synchronize(run.device)
        wall_s = time.perf_counter() - began
    loaded.runner.drop_all()
    found = seen.key_averages()
    on_device = [event for event in found if event.device_type.name != "CPU"]
    busy_s = sum(event.self_device_time_total for event in on_device) / 1e6
    run.figure("step_ms", wall_s / STEADY * 1000)
    if run.on_gpu:
        run.figure("device_busy_share", busy_s / wall_s, ">= 0.95")
    for name in WAITS:
        if count := sum(event.count for event in found if event.key == name):
            run.figure(f"{name}_a_step", count / STEADY)
    cost = "self_device_time_total" if run.on_gpu else "self_cpu_time_total"
    for event in sorted(on_device if run.on_gpu else found, key=lambda event: float(getattr(event, cost)), reverse=True)[:8]:
        run.note(f"{getattr(event, cost) / STEADY / 1000:8.3f} ms a step, {event.count // STEADY:5} calls: {event.key[:90]}")
    _against_the_roof(run, loaded)


def _against_the_roof(run: Run, loaded: Loaded) -> None:
    call = _denoiser_call(loaded)
    counted: Any = FlopCounterMode(display=False)
    with torch.inference_mode(), counted:
        call()
    flops = counted.get_total_flops()
    side, dtype = (8192, torch.bfloat16) if run.on_gpu and not run.tiny else (256, torch.float32)
    one = torch.randn(side, side, device=run.device, dtype=dtype)
    roof = 2 * side**3 / seconds_of(lambda: one @ one, run.device, times=20)
    rate = flops / _seconds(call, run)
    run.figure("gemm_tflops", roof / TERA)
    run.figure("denoiser_tflops", rate / TERA)
    run.figure("step_vs_gemm", rate / roof, ">= 0.75")


def attention(run: Run) -> None:
    """Time the denoiser with each attention backend of diffusers; one that refuses is noted and left out.

    Raises:
        AssertionError: the native backend does not run.
    """
    loaded = load_named(run, run.subject)
    call, model = _denoiser_call(loaded), loaded.transformer
    found: dict[str, float] = {}
    for name in BACKENDS if run.on_gpu else BACKENDS[:1]:
        try:
            model.set_attention_backend(name)
            found[name] = run.figure(f"{name.strip('_')}_ms", _seconds(call, run) * 1000)
        except Exception as error:  # a backend may refuse in many ways, and the next one is tried
            run.note(f"{name}: not used: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}")
    model.set_attention_backend("native")
    run.require("native" in found, "the native backend to run")
    run.figure("best_vs_native", min(found.values()) / found["native"])


def fp8(run: Run) -> None:
    """Time one block in fp8, with dynamic scales, against the same block in bfloat16.

    Raises:
        Skip: torchao is not there, or the device is no GPU.
    """
    if importlib.util.find_spec("torchao") is None:
        raise Skip("torchao is not there")
    if not run.on_gpu:
        raise Skip("fp8 needs a GPU")
    quantization = importlib.import_module("torchao.quantization")
    loaded = load_named(run, run.subject)
    block = loaded.transformer.single_transformer_blocks[0]
    args, kwargs = _arguments(loaded, block)
    quantized = copy.deepcopy(block)
    quantization.quantize_(quantized, quantization.Float8DynamicActivationFloat8WeightConfig())
    plain_s = _seconds(lambda: block(*args, **kwargs), run)
    run.figure("fp8_vs_bfloat16", _seconds(lambda: quantized(*args, **kwargs), run) / plain_s)


def compiled(run: Run) -> None:
    """Compile the repeated blocks in the default mode, and time the denoiser with a single row, compiled and before.

    Raises:
        AssertionError: the blocks were not compiled by regions.
    """
    loaded = load_named(run, run.subject)
    call = _denoiser_call(loaded)
    eager_s = _seconds(call, run)
    compilation = Compilation(Compile.DEFAULT, {"transformer": loaded.transformer})
    began = time.perf_counter()
    with torch.inference_mode():
        call()
    run.figure("compile_s", time.perf_counter() - began)
    features = compilation.features["compile"]
    run.require("regional" in features, f"blocks compiled by regions, found {features}")
    run.figure("compiled_vs_eager", _seconds(call, run) / eager_s, "<= 0.75")


def _denoiser_call(loaded: Loaded) -> Callable[[], Any]:
    """Return a function that calls the denoiser with the arguments that it had in the last step of a real image."""
    args, kwargs = _arguments(loaded, loaded.transformer)
    return lambda: loaded.transformer(*args, **kwargs)


def _arguments(loaded: Loaded, module: Any) -> tuple[Any, Any]:
    """Make an image of two steps, and return the positional and named arguments of the module's last call in it."""
    seen: list[tuple[Any, Any]] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, dict(kwargs))), with_kwargs=True)
    try:
        image(loaded, "arguments", steps=2)
    finally:
        hook.remove()
    return seen[-1]


def _seconds(call: Callable[[], Any], run: Run) -> float:
    with torch.inference_mode():
        return seconds_of(call, run.device, times=1 if run.tiny else TIMES)
