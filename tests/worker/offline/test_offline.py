# SPDX-License-Identifier: Apache-2.0
"""The engine as a library, over a fake rank group: calls that wait, their errors, their progress and their end."""

import asyncio
import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import diffusion_worker
from diffusion_worker import ConfigError, DiffusionEngine, ErrorCode, GroupFailed, LoRARequest, RequestError
from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.state.request_events import AppliedAdapter
from diffusion_worker.messages import ErrorReport, Task
from diffusion_worker.offline import engine as offline_engine
from diffusion_worker.offline.arguments import image_fields, worker_config
from diffusion_worker.offline.progress import StepCounts
from support.worker.fake_rank_group import FakeRankGroup, fake_digest, fake_identity
from support.worker.process import DIGITS, DIGITS_MODEL

STRIPES = DIGITS / "loras" / "stripes"


class Groups:
    """A factory that makes a fake rank group for each engine and keeps all in `made`; `settings` are for the next one."""

    def __init__(self) -> None:
        self.made: list[FakeRankGroup] = []
        self.settings: dict[str, Any] = {}
        self.broken_adapter: str | None = None

    def make(self, config: WorkerConfig) -> FakeRankGroup:
        group = FakeRankGroup(config.ranks, **self.settings)
        group.max_cached = config.max_cached_loras
        if self.broken_adapter is not None:
            group.adapter_errors[self.broken_adapter] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no adapter_config.json")
        self.made.append(group)
        return group


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    groups = Groups()
    monkeypatch.setattr(offline_engine, "RankExecutor", groups.make)
    return groups


@pytest.fixture
def engine(groups: Groups) -> Iterator[DiffusionEngine]:
    with DiffusionEngine(DIGITS_MODEL, served_name="digits", loras={"stripes": STRIPES}) as engine:
        yield engine


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    """Make four adapter folders, each with a weights file that has only the name in it; return the folder with all.

    Fake ranks never open the files.
    """
    for name in ("style", "one", "two", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    return tmp_path


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "diffusion-engine"]


async def nothing_runs(engine: DiffusionEngine) -> None:
    """Wait until the engine's step loop has no request left, by the event inside it."""
    await engine._thread.engine._steps._idle.wait()


def test_the_public_names_are_sorted_and_all_there() -> None:
    assert list(diffusion_worker.__all__) == [
        "ConfigError",
        "DiffusionEngine",
        "ErrorCode",
        "GeneratedImage",
        "GroupFailed",
        "LoRARequest",
        "RequestError",
        "WorkerError",
    ]
    assert [name for name in diffusion_worker.__all__ if getattr(diffusion_worker, name).__name__ != name] == []
    assert set(diffusion_worker.__all__) <= set(dir(diffusion_worker))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = diffusion_worker.Nothing


def test_importing_the_package_imports_neither_torch_nor_asyncio() -> None:
    heavy = "{'torch', 'numpy', 'diffusers', 'asyncio', 'fastapi', 'click', 'msgspec'}"
    probe = f"import sys, diffusion_worker; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_the_public_names_bring_no_torch_into_the_script() -> None:
    probe = "import sys; from diffusion_worker import DiffusionEngine, LoRARequest; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_images_come_in_the_order_of_their_prompts_with_seeds_that_follow_each_other(engine: DiffusionEngine) -> None:
    images = engine.generate(["a red digit seven", "a blue digit one"], n=2, seed=5, size="48x64", steps=2)
    assert [(image.prompt[:5], image.seed) for image in images] == [("a red", 5), ("a red", 6), ("a blu", 5), ("a blu", 6)]
    assert {image.image.size for image in images} == {(48, 64)}
    again = engine.generate("a blue digit one", seed=6, size="48x64", steps=2)
    assert again[0].image.tobytes() == images[3].image.tobytes()


def test_an_adapter_that_a_call_brings_is_loaded_once_and_used_at_its_strength(
    engine: DiffusionEngine, groups: Groups, loras: Path
) -> None:
    style = LoRARequest("style", 7, str(loras / "style"))
    for _ in range(2):
        (image,) = engine.generate("a red digit seven", seed=5, steps=2, lora_request=style, lora_scale=0.8)
        assert image.provenance.adapters == [AppliedAdapter("style", fake_digest(style.lora_path), 0.8, fake_identity(style.lora_path))]
    assert groups.made[0].calls.count("add_lora") == 2  # once at the construction, and once for the calls
    (base,) = engine.generate("a red digit seven", seed=5, steps=2)
    assert base.provenance.adapters == [] and base.image.tobytes() != image.image.tobytes()


def test_another_path_under_a_name_replaces_its_adapter_and_another_id_does_not(
    engine: DiffusionEngine, groups: Groups, loras: Path
) -> None:
    digests = []
    for number, name in ((1, "one"), (2, "one"), (1, "two"), (1, "two")):
        (image,) = engine.generate("a red digit seven", steps=1, lora_request=LoRARequest("style", number, str(loras / name)))
        digests += [adapter.digest for adapter in image.provenance.adapters]
    one, two = fake_digest(str(loras / "one")), fake_digest(str(loras / "two"))
    assert digests == [one, one, two, two] and groups.made[0].calls.count("add_lora") == 3


def test_an_adapter_that_a_call_brings_and_that_cannot_be_loaded_is_an_error_with_its_code(
    engine: DiffusionEngine, groups: Groups, loras: Path
) -> None:
    path = str(loras / "broken")
    groups.made[0].adapter_errors[path] = ErrorReport(ErrorCode.INVALID_ADAPTER, "tensor x has no layer")
    with pytest.raises(RequestError, match="tensor x has no layer") as raised:
        engine.generate("a red digit seven", lora_request=LoRARequest("broken", 1, path))
    assert raised.value.code is ErrorCode.INVALID_ADAPTER
    # The file is repaired, and the next call loads the adapter.
    del groups.made[0].adapter_errors[path]
    assert len(engine.generate("a red digit seven", steps=1, lora_request=LoRARequest("broken", 1, path))) == 1


def test_adapters_that_went_from_memory_are_loaded_again_for_the_call_that_needs_them(groups: Groups, loras: Path) -> None:
    with DiffusionEngine(DIGITS_MODEL, served_name="digits", loras={"stripes": STRIPES}, max_loras=1, max_cached_loras=1) as engine:
        for name in ("one", "two"):
            engine.generate("a red digit seven", steps=1, lora_request=LoRARequest(name, 1, str(loras / name)))
        (image,) = engine.generate("a red digit seven", steps=1, lora_request="stripes")
        assert image.provenance.adapters[0].digest == fake_digest(str(STRIPES))


def test_an_image_says_what_made_it(engine: DiffusionEngine) -> None:
    (image,) = engine.generate("a red digit seven", seed=5, steps=2, lora_request="stripes", guidance_scale=3.0)
    assert (image.provenance.model, image.provenance.steps, image.provenance.guidance_scale) == ("digits", 2, 3.0)
    assert [adapter.name for adapter in image.provenance.adapters] == ["stripes"]
    assert image.metadata["seed"] == 5 and "seven" not in repr(image.metadata)
    assert image.timings.total > 0


@pytest.mark.parametrize("name", ["seven.png", "seven.JPG", "seven.webp"])
def test_a_saved_image_has_its_metadata_in_it(engine: DiffusionEngine, tmp_path: Path, name: str) -> None:
    (image,) = engine.generate("a red digit seven", seed=5, steps=1)
    saved = image.save(tmp_path / name)
    assert b'"seed": 5' in saved.read_bytes().replace(b'"seed":5', b'"seed": 5')


def test_a_name_or_quality_that_cannot_be_saved_is_refused(engine: DiffusionEngine, tmp_path: Path) -> None:
    (image,) = engine.generate("a red digit seven", steps=1)
    with pytest.raises(RequestError, match=r"path: expected a name that ends in \.png"):
        image.save(tmp_path / "seven.gif")
    with pytest.raises(RequestError, match="quality: expected 0 to 100"):
        image.save(tmp_path / "seven.jpg", quality=101)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "prompt: expected a text or a list of texts, found an empty list"),
        ({"prompt": 7}, "prompt: expected a text or a list of texts, found int"),
        ({"prompt": ["a", 7]}, "prompt: expected `str`, got `int`"),
        ({"prompt": " "}, "prompt: expected a text"),
        ({"n": "two"}, "n: expected `int`, got `str`"),
        ({"size": "big"}, "size: expected WIDTHxHEIGHT"),
        ({"size": "60x60"}, "size: expected width and height that are multiples of 8"),
        ({"steps": 0}, "num_inference_steps: expected 1 to 200"),
        ({"lora_request": "nobody"}, "nobody"),
        ({"lora_request": 7}, "lora_request: expected the name of an adapter"),
        ({"lora_request": [7]}, "lora_request: expected the name of an adapter, a LoRARequest, or a list of them, found int"),
        ({"lora_request": LoRARequest("Style", 1, "/x")}, "lora_request: expected a lora_name of a-z.*, found 'Style'"),
        (
            {"lora_request": LoRARequest("style", 1, None)},
            "lora_request: expected a path or source as lora_path of 'style', found NoneType",
        ),
        (
            {"lora_request": LoRARequest("style", 1, "ftp://x/y")},
            "lora_request: expected a lora_path that is a path or a source, found .*'ftp'",
        ),
        ({"lora_request": "stripes", "lora_scale": 5}, "lora_scale: expected a number from -4 to 4, found 5"),
        ({"lora_request": "stripes", "lora_scale": "1"}, "lora_scale: expected"),
        ({"lora_request": "stripes", "lora_scale": [1, 2]}, "lora_scale: expected a number for each of the 1 adapters, found 2 numbers"),
        ({"lora_scale": 0.5}, "lora_scale: expected"),
        ({"image": "seven.png"}, "image: expected a PIL image, found str"),
        ({"image": []}, "model: expected a pipeline that serves edit"),
        ({"image": Image.new("RGB", (8, 8)), "mask": 7}, "mask: expected a PIL image, found int"),
        ({"image": Image.new("RGB", (8, 8))}, "model: expected a pipeline that serves edit"),
        ({"mask": Image.new("L", (8, 8))}, "mask: expected an image with it, found none"),
        ({"strength": 0.5}, "strength: expected an image with it, found none"),
    ],
)
def test_a_wrong_value_is_refused_by_name(engine: DiffusionEngine, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(**{"prompt": "a red digit seven", **wrong})


def test_images_to_start_from_are_taken_as_they_are_seen() -> None:
    turned = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    turned.getexif()[0x0112] = 6
    fields: Any = image_fields(turned, Image.new("1", (1, 2), 1), 0.5)
    (image,) = fields["images"]
    assert (image.width, image.height, image.channels, image.pixels) == (1, 2, 3, b"\xff" * 6)
    assert (fields["mask"].pixels, fields["mask"].channels, fields["task"], fields["strength"]) == (b"\xff\xff", 1, Task.INPAINT, 0.5)


def test_a_refused_prompt_ends_the_whole_call_and_the_next_one_works(engine: DiffusionEngine) -> None:
    with pytest.raises(RequestError, match="prompt: expected at most"):
        engine.generate(["a red digit seven", "x" * 10_000])
    assert len(engine.generate("a red digit seven", steps=1)) == 1


def test_a_script_has_no_standbys_unless_it_asks_for_them() -> None:
    assert worker_config(DIGITS_MODEL, 2, {}, {"device": "cuda"}).standby_ranks == 0
    assert worker_config(DIGITS_MODEL, 2, {}, {"device": "cuda", "standby_ranks": 2}).standby_ranks == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "/nowhere"}, "--model"),
        ({"ranks": 0}, "ranks: 0 is not in the range 1<=x<=64"),
        ({"ranks": "two"}, "ranks: expected `int`, got `str`"),
        ({"rank": 2}, "rank: unknown option of the engine"),
        ({"ui": True}, "ui: unknown option of the engine"),
        ({"dtype": "float8"}, "dtype: Invalid enum value 'float8'"),
        ({"component_dtypes": {"vae": "auto"}}, "component_dtypes: vae: expected one of float32, float16, bfloat16, found auto"),
        ({"limits": {"max_steps": "many"}}, "limits.max_steps: expected `int`"),
        ({"batch_window_s": 2}, "batch_window_s: expected 0 to 1"),
        ({"loras": {"Stripes": STRIPES}}, "a name of a-z"),
        ({"loras": {"stripes": "/nowhere"}}, "found nothing there"),
        ({"tensor": 3, "ranks": 2}, "--tensor 3"),
    ],
)
def test_a_wrong_option_is_refused_by_name_before_anything_starts(groups: Groups, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiffusionEngine(**{"model": DIGITS_MODEL, **wrong})
    assert groups.made == [] and engine_threads() == []


def test_a_model_that_does_not_load_is_an_error_and_leaves_nothing(groups: Groups) -> None:
    groups.settings = {"config_error": "the weights are not there"}
    with pytest.raises(ConfigError, match="the weights are not there"):
        DiffusionEngine(DIGITS_MODEL)
    assert groups.made[0].stopped and engine_threads() == []


def test_an_adapter_that_does_not_load_is_an_error_and_not_a_warning(groups: Groups) -> None:
    groups.broken_adapter = str(STRIPES)
    with pytest.raises(ConfigError, match=r"loras: adapter 'stripes' was not loaded: .*no adapter_config\.json"):
        DiffusionEngine(DIGITS_MODEL, loras={"stripes": STRIPES})
    assert groups.made[0].stopped


def test_closing_ends_the_ranks_and_closing_again_is_harmless(groups: Groups) -> None:
    engine = DiffusionEngine(DIGITS_MODEL)
    engine.close()
    engine.close()
    assert groups.made[0].stopped and engine_threads() == []
    with pytest.raises(RequestError, match="the engine is closed") as raised:
        engine.generate("a red digit seven")
    assert raised.value.code is ErrorCode.TERMINATING


def test_an_engine_that_nobody_refers_to_ends_itself(groups: Groups) -> None:
    engine = DiffusionEngine(DIGITS_MODEL)
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None and groups.made[0].stopped and engine_threads() == []


def test_a_forked_child_leaves_the_engine_of_its_parent_alone(
    engine: DiffusionEngine, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        engine.close()
    assert not groups.made[0].stopped
    assert len(engine.generate("a red digit seven", steps=1)) == 1


def test_calls_of_several_threads_get_their_own_images(engine: DiffusionEngine) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        images = list(threads.map(lambda seed: engine.generate("a red digit seven", seed=seed, steps=3)[0], range(8)))
    assert [image.seed for image in images] == list(range(8))
    assert len({image.image.tobytes() for image in images}) == 8


def test_an_interrupted_call_raises_and_frees_its_places(engine: DiffusionEngine, groups: Groups) -> None:
    groups.made[0].stepping.clear()
    # A shell has SIGINT ignored in the programs that it runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate("a red digit seven", n=4)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    asyncio.run_coroutine_threadsafe(nothing_runs(engine), engine._thread._loop).result(10)


def test_ranks_that_are_lost_too_often_are_the_packages_own_error(groups: Groups) -> None:
    with DiffusionEngine(DIGITS_MODEL, max_restarts=0) as engine:
        group = groups.made[0]
        group.stepping.clear()
        timer = threading.Timer(0.05, lambda: group._failure.get_loop().call_soon_threadsafe(group.lose, "rank 0 was ended by SIGKILL"))
        timer.start()
        with pytest.raises(GroupFailed, match="SIGKILL"):
            engine.generate("a red digit seven")
        timer.join()
        with pytest.raises(RequestError) as raised:
            engine.generate("a red digit seven")
    assert raised.value.code is ErrorCode.ENGINE_FAILED


def test_the_bar_of_a_call_ends_with_all_its_images_and_steps(engine: DiffusionEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(["a red digit seven", "a blue digit one"], n=2, steps=3, progress=True)
    assert "4/4 images: 100%" in capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]


def test_the_load_has_a_bar_of_its_bytes(groups: Groups, capsys: pytest.CaptureFixture[str]) -> None:
    DiffusionEngine(DIGITS_MODEL, served_name="digits", progress=True).close()
    assert "loading digits: 100%" in (shown := capsys.readouterr().err) and "1.00MB/1.00MB" in shown


def test_there_is_no_bar_where_stderr_is_no_terminal_unless_asked(engine: DiffusionEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate("a red digit seven", steps=3)
    assert capsys.readouterr().err == ""


def test_counts_of_steps_wait_for_the_first_image_that_knows() -> None:
    assert (StepCounts(3).expected, StepCounts(3).taken, StepCounts(3).finished) == (None, 0, 0)
