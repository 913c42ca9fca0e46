# SPDX-License-Identifier: Apache-2.0
"""The adapter files' part of `make soak`: mutated files, each given to a real manager of adapters of a tiny pipeline.

A file either binds, whole and finite, or is refused with a code of adapters. The refusal names the adapter and the faulty tensor. Anything
else is a fault, and so are a changed manager, leaked memory, and lost seconds.
"""

import json
import math
import random
import resource
import shutil
import time
from pathlib import Path

import torch

from diffusion_worker.errors import RequestError
from diffusion_worker.lora.checkpoint import read_checkpoint
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.located import CONFIG_FILE, PEFT_WEIGHTS
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse
from support.lora.adapter_mutations import Mutation, RawFile, mutation
from support.lora.files import CASES, Case, make_file, model_of
from support.soak.frame import Outcome, those_that_hold

NAME = "style"
KEPT, TRIED = 1, 2
MAX_RANK = 64
ADAPTER_CODES = {"InvalidAdapter", "UnsupportedFormat", "NoMatchingModules", "ModulesOutsideEnvelope", "RankTooLarge"}
# Tiny models, in namings that our reader knows and in namings that diffusers converts.
PICKED = ("SDXL, Kohya", "SD3, peft", "SD3, diffusers", "Flux 2, Kohya", "Qwen-Image, original", "Z-Image, Kohya", "Wan, original")
# Seconds of CPU for one file. A reader that counts to a number in a name, or tries a pattern for ever, takes longer.
MOST_SECONDS = 5.0
MOST_GROWTH_BYTES = 256 << 20
WARM_FILES = 50  # everything that is made only once exists after these
PROBE_EVERY = 25


class Target:
    """A LoRA manager over a tiny pipeline with the sound adapter `kept`, whose layer output is recorded at the beginning for comparison.

    Real: the manager, the reader of files and the pipeline's layers. Not real: the weights, which are random.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder / case.name.replace(", ", "-").replace(" ", "-")
        self.folder.mkdir()
        pipeline = case.build()
        made = make_file(case, pipeline, self.folder)
        self.model = model = model_of(pipeline)
        settings = {"slots": 2, "cached": 2, "max_rank": MAX_RANK, "device": torch.device("cpu")}
        self.manager = DiffusionLoRAManager(model.components, denoiser=model.denoiser, convert=model.convert, **settings)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {}, "target_modules": None}
        self.good = RawFile.parse(made.path.read_bytes(), json.dumps(config).encode() if case.format == "peft" else None)
        # Other names that messages may have: those of the modules that a fused module of the file becomes.
        self.targets = case.table(pipeline)
        self.manager.add_adapter(LoRARequest("kept", KEPT, str(self.write(Mutation("good", self.good, self.good.content()), "kept"))))
        self.layer = next(part for part in model.components[model.denoiser].modules() if hasattr(part, "base"))
        weight = self.layer.base.weight
        inputs = (weight.shape[1],) if weight.dim() == 2 else (weight.shape[1], 8, 8)
        self.probe = torch.randn(2, *inputs, generator=torch.Generator().manual_seed(1))
        self.manager.activate([LoRAUse(KEPT, 1.0)])
        self.before = self.manager.list_adapters()
        self.output = self.outputs()

    def outputs(self) -> torch.Tensor:
        """Compute an adapted layer on two fixed rows, of which the first uses the kept adapter and the second none."""
        with self.manager.set_adapter_mapping(self.model.denoiser, [[LoRAUse(KEPT, 1.0)], []]):
            found: torch.Tensor = self.layer(self.probe)
        return found

    def changed(self, when: str) -> list[str]:
        """Return one fault, which begins with `when`, if the layer's results differ from those at the beginning; otherwise an empty
        list."""
        return [] if torch.equal(self.outputs(), self.output) else [f"{when}: a layer gives other values than before"]

    def write(self, mutated: Mutation, name: str) -> Path:
        """Empty the folder `name` and write a mutated safetensors file there. Return that file's path, or the folder if it also has a
        peft configuration."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = folder / ("adapter.safetensors" if mutated.file.config is None else PEFT_WEIGHTS)
        path.write_bytes(mutated.content)
        if mutated.file.config is None:
            return path
        (folder / CONFIG_FILE).write_bytes(mutated.file.config)
        return folder

    def try_file(self, path: Path, mutated: Mutation) -> RequestError | None:
        """Load an adapter, activate it and remove it again; return the refusal of the load, or None. Any other error is raised, and
        AssertionError for factors that are not finite or too few."""
        try:
            self.manager.add_adapter(LoRARequest(NAME, TRIED, str(path)))
        except RequestError as error:
            return error
        try:
            self.manager.activate([LoRAUse(TRIED, 1.0)])
        finally:
            self.manager.remove_adapter(TRIED)
        read = read_checkpoint(str(path), model=self.model)
        for name, factors in read.modules.items():
            assert factors.a.isfinite().all() and factors.b.isfinite().all(), name
        used = sum(factors.a.numel() + factors.b.numel() for factors in read.modules.values())
        given = RawFile.parse(mutated.content).entries
        # A split fused projection uses more values than the file has: A is in each part.
        assert used >= sum(math.prod(entry["shape"]) for name, entry in given if not name.endswith(".alpha"))
        return None

    def names_of(self, mutated: Mutation) -> set[str]:
        """Return the names that a refusal may use for the faulty tensor: its own, its module's, or those of its targets in diffusers."""
        modules = {written for written in self.targets for name in mutated.names if name.startswith(written)}
        return mutated.names | modules | {target.removesuffix("~") for module in modules for target in self.targets[module]}


def run_files(folder: Path, count: int, *, seed: int, limit_s: float, picked: tuple[str, ...] = PICKED) -> Outcome:
    """Try `count` mutated files of the cases in `picked`, or as many as there is time for. Faults are wrong refusals and errors, changed
    results of the sound adapter, and memory that grew too much."""
    torch.set_num_threads(1)
    outcome = Outcome(seed, counts="bound slowest_s grown_bytes", tallies="refused kinds", slowest="")
    targets = [Target(case, folder) for name in picked for case in CASES if case.name == name]
    warm = _peak_bytes()
    for number in outcome.until(count, limit_s):
        rng = random.Random(seed * 1_000_003 + number)
        target = rng.choice(targets)
        other = rng.choice([other for other in targets if other.case.family != target.case.family] or targets)
        mutated = mutation(rng, target.good, other.good)
        which = f"seed {seed}, file {number} ({target.case.name}, {mutated.kind})"
        outcome.wrong += [f"{which}: {what}"[:700] for what in _wrong(outcome, target, mutated, which)]
        if number == WARM_FILES:
            warm = _peak_bytes()
        if number % PROBE_EVERY == 0:
            outcome.wrong += target.changed(which)
    outcome.grown_bytes = _peak_bytes() - warm
    if outcome.grown_bytes > MOST_GROWTH_BYTES:
        outcome.wrong.append(f"memory grew by {outcome.grown_bytes} bytes")
    outcome.wrong += [what for each in targets for what in each.changed(each.case.name)]
    return outcome


def _wrong(outcome: Outcome, target: Target, mutated: Mutation, which: str) -> list[str]:
    outcome.done += 1
    outcome.kinds[mutated.kind] += 1
    path = target.write(mutated, "tried")
    started = time.process_time()
    try:
        error = target.try_file(path, mutated)
    except Exception as unexpected:
        return [f"{type(unexpected).__name__}: {unexpected}"]
    seconds, left = time.process_time() - started, target.manager.list_adapters()
    if seconds > outcome.slowest_s:
        outcome.slowest_s, outcome.slowest = seconds, which
    wrong = {
        f"took {seconds:.1f} s": seconds > MOST_SECONDS,
        f"adapters {left} are left, {target.before} were there before": left != target.before,
    }
    if error is None:
        outcome.bound += 1
        wrong["was not refused"] = not mutated.may_be_good
    else:
        outcome.refused[error.code] += 1
        names, text = target.names_of(mutated), error.message
        in_form = error.code in ADAPTER_CODES and f"adapter {NAME!r}" in text and len(text) <= 2000
        wrong[f"{error.code}: {text}"] = not in_form
        wrong[f"expected one of {sorted(names)[:4]} in: {text}"] = in_form and names and not any(name in text for name in names if name)
    return those_that_hold(wrong)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
