# SPDX-License-Identifier: Apache-2.0
"""The digits model on rank processes of its own: against the CPU, before its judge, with adapters, asleep, and over a killed rank."""

from __future__ import annotations

import importlib
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_worker import DiffusionEngine
from diffusion_worker.engine.state.state_document import SleepCall, WakeCall
from diffusion_worker.lora.request import LoRARequest

from . import judge
from .process import Run

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
STYLES = ("stripes", "frame", "paper")
# The settings of the exam of the model's card.
SETTINGS: dict[str, Any] = {"steps": 12, "guidance_scale": 4.0, "size": "64x64", "progress": False}
MOST_LEVELS = 2
STANDBY_S = 60.0


def start(run: Run) -> None:
    """Compare images of a spawned rank in float32, without TF32, with those of plain diffusers on the CPU.

    Raises:
        AssertionError: they differ by more than 2 of 255 levels.
    """
    # The libraries of the device read it; spawned ranks inherit it.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    exam = importlib.import_module("support.runner.digit_exam")
    _use_carried_judge()
    asked = exam.questions(1)[: 2 if run.tiny else 4]
    began = time.perf_counter()
    with _engine(run, "float32") as engine:
        run.figure("ready_s", time.perf_counter() - began)
        made = [engine.generate(each.prompt, seed=each.seed, **SETTINGS)[0].image for each in asked]
    expected = [answer.image for answer in exam.answers(exam.load_pipeline(), asked)]
    apart = max(_levels(one, other) for one, other in zip(made, expected, strict=True))
    run.figure("levels_apart", apart, f"<= {MOST_LEVELS}")
    run.require(apart <= MOST_LEVELS, f"images at most {MOST_LEVELS} levels from the CPU's, found {apart}")


def judged(run: Run) -> None:
    """Make images in bfloat16, and have the digits' judge read them.

    Raises:
        AssertionError: digit and colour are right in less than 90 % of them, or 80 % with tiny sizes.
    """
    exam = importlib.import_module("support.runner.digit_exam")
    _use_carried_judge()
    asked = exam.questions(1 if run.tiny else 4)[: 6 if run.tiny else 40]
    engine = _kept_engine(run)
    answers, seconds = [], []
    for each in asked:
        began = time.perf_counter()
        answers.append(exam.Answer(each, engine.generate(each.prompt, seed=each.seed, **SETTINGS)[0].image))
        seconds.append(time.perf_counter() - began)
    run.figure("image_s", statistics.median(seconds))
    share = sum(answer.all_right for answer in answers) / len(answers)
    run.figure("right_share", share, ">= 0.9")
    # A single miss among six is no fault of the device.
    run.require(share >= (0.8 if run.tiny else 0.9), f"digit and colour right in 0.9 of {len(asked)} images, found {share:.2f}")


def adapters(run: Run) -> None:
    """Make eight images at once, six of them with an adapter, and report their styles, and the time against one after another.

    Raises:
        AssertionError: an image does not show the style of its own adapter alone.
    """
    exam = importlib.import_module("support.runner.digit_exam")
    _use_carried_judge()
    engine = _kept_engine(run)
    styles = [None, *STYLES, None, *STYLES]
    asked = exam.questions(1)[: len(styles)]

    def make(number: int) -> Any:
        style, question = styles[number], asked[number]
        request = None if style is None else LoRARequest(style, 1 + STYLES.index(style), str(DIGITS / "loras" / style))
        return engine.generate(question.prompt, seed=question.seed, lora_request=request, **SETTINGS)[0]

    numbers = range(len(styles))
    began = time.perf_counter()
    for number in numbers[:4]:  # loads each adapter
        make(number)
    run.figure("first_four_s", time.perf_counter() - began)
    began = time.perf_counter()
    alone = [make(number).image for number in numbers]
    alone_s = time.perf_counter() - began
    began = time.perf_counter()
    with ThreadPoolExecutor(len(styles)) as pool:
        together = [image.image for image in pool.map(make, numbers)]
    together_s = time.perf_counter() - began
    answers = [exam.Answer(question, image) for question, image in zip(asked, together, strict=True)]
    styled = sum(answer.styles == ({style} if style else set()) for answer, style in zip(answers, styles, strict=True))
    run.figure("styles_right_of_8", styled, ">= 8")
    run.figure("digits_right_of_8", sum(answer.digit_right for answer in answers), ">= 7")
    run.figure("together_vs_alone", together_s / alone_s, "<= 0.5")
    run.figure("levels_apart", max(_levels(one, other) for one, other in zip(alone, together, strict=True)))
    run.require(styled == 8, f"each of 8 images in the style of its own adapter and in no other, found {styled}")


def verified(run: Run) -> None:
    """Have the rank sleep and wake, make an image again, and say how the wake was verified.

    Raises:
        AssertionError: the sleep or the wake failed, or the image is another than before.
    """
    engine = _kept_engine(run)
    question = importlib.import_module("support.runner.digit_exam").questions(1)[0]
    before = engine.generate(question.prompt, seed=1, **SETTINGS)[0].image
    server = engine._thread.engine

    async def told(call: SleepCall | WakeCall) -> Any:
        _ = server.sleep(call) if isinstance(call, SleepCall) else server.wake(call)
        return await server.operation_over(call.operation_id)

    for call in (SleepCall(operation_id="gpu-sleep"), WakeCall(operation_id="gpu-wake")):
        ended = engine._thread.run(lambda call=call: told(call), meanwhile=lambda: None)  # type: ignore[misc]
        run.require(ended is not None and ended.error is None, f"the {call.operation_id} to succeed, found {ended}")
        run.figure(f"{ended.kind}_s".lower(), ended.seconds)
    run.note(f"check of a wake: {server.state_document().wake_check}")
    after = engine.generate(question.prompt, seed=1, **SETTINGS)[0].image
    apart = run.figure("levels_apart", _levels(before, after))
    run.require(apart <= MOST_LEVELS, f"the same image after the wake, found {apart} levels between them")


def killed(run: Run) -> None:
    """Kill the rank process, and make an image again, which waits for a new one; report the seconds.

    On a GPU it first waits for the standby, which becomes the new rank.

    Raises:
        AssertionError: the rank process is the same, or the image is another than before.
    """
    engine = _kept_engine(run)
    question = importlib.import_module("support.runner.digit_exam").questions(1)[0]
    before = engine.generate(question.prompt, seed=1, **SETTINGS)[0].image
    rank = _rank_pid(engine)
    began = time.perf_counter()
    while run.on_gpu and not engine._thread.engine.state_document().standby_ranks:
        run.require(time.perf_counter() - began < STANDBY_S, f"a standby rank within {STANDBY_S:g} s")
        time.sleep(0.1)
    run.figure("waited_for_standby_s", time.perf_counter() - began)
    began = time.perf_counter()
    os.kill(rank, signal.SIGKILL)
    after = engine.generate(question.prompt, seed=1, **SETTINGS)[0].image
    run.figure("served_again_s", time.perf_counter() - began)
    run.require(_rank_pid(engine) != rank, "a new rank process")
    apart = run.figure("levels_apart", _levels(before, after))
    run.require(apart <= MOST_LEVELS, f"the same image as before, found {apart} levels between them")


def _engine(run: Run, dtype: str, *, standbys: int = 0) -> DiffusionEngine:
    options: dict[str, Any] = {
        "dtype": dtype,
        "standby_ranks": standbys,
        "start_method": "spawn",
        "max_batch_size": 8,
        "batch_window_s": 0.2,
    }
    # The runner bounds the time of an item.
    options |= {"lora_load_timeout_s": 900.0, "startup_timeout_s": 1800.0}
    return DiffusionEngine(DIGITS / "model", progress=False, device=run.device, **options)


def _kept_engine(run: Run) -> DiffusionEngine:
    """Return the engine in bfloat16 that the items of a process share; the first call starts it."""
    if "engine" not in run.kept:
        began = time.perf_counter()
        run.kept["engine"] = run.closing.enter_context(_engine(run, "bfloat16", standbys=1 if run.on_gpu else 0))
        run.figure("ready_s", time.perf_counter() - began)
    engine: DiffusionEngine = run.kept["engine"]
    return engine


def _rank_pid(engine: DiffusionEngine) -> int:
    pid = engine._thread.engine.state_document().ranks[0].pid
    assert pid is not None
    return pid


def _use_carried_judge() -> None:
    """Make the judge use the classifier in the carried file, because scikit-learn, which would train one, is not carried."""
    module: Any = importlib.import_module("support.runner.digit_judge")
    carried = judge.load(judge.carried_file())
    module.classifier = lambda: carried


def _levels(one: Any, other: Any) -> int:
    """Return the largest difference of two images in any RGB value, from 0 to 255."""
    first, second = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (one, other))
    return int(np.abs(first - second).max())
