# SPDX-License-Identifier: Apache-2.0
"""Configurations of a peft adapter, drawn from a seed: ordinary patterns, hostile ones, and bytes that are no configuration.

peft itself decides which of them fit the file, with a bound on the time of its patterns. A configuration that takes longer must be refused.
In between, either may happen.
"""

import json
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import safe_open

from support.sources.hostile import Hostile
from support.worker.process import DIGITS

STRIPES = DIGITS / "loras" / "stripes"
# On a busy machine the deadline may come before the limit on the patterns' time.
CODES = frozenset({"InvalidAdapter", "UnsupportedFormat", "RankTooLarge", "Timeout"})
DEADLINE_S = 90.0
RANK = 8
# Seconds of CPU that peft takes: a pattern below the first may fit, and a pattern above the second must be refused.
SURELY_FAST_S, SURELY_SLOW_S = 0.2, 3.0
LEAVES = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
ALL = "|".join(re.escape(leaf) for leaf in LEAVES)
# Trainers and peft's own examples write such patterns. The second and the last do not fit all modules of the file.
ORDINARY = [
    rf".*\.({ALL})", r".*attn\.to_(q|k|v)", rf"^(?!.*context_embedder).*\.({ALL})$", rf"transformer_blocks\.\d+\.attn\.(?:{ALL})\Z",
    rf"(?=transformer_blocks)[\w.]+(?<!norm)\.({ALL})", r"(.*)\.(to_|add_)\w+(\.0)?", rf"(?i).*\.ATTN\.({ALL})",
    r".*(?<=attn\.)(to|add)_[a-z_]+(\.\d)?",
    r"(?P<block>transformer_blocks)\.(\d+)\.(?!ff).*", r".*(\w)\1\w*.*", r"transformer_blocks\.0\..*",
]  # fmt: skip
HOSTILE = [
    "(a|a)" * 40 + "!", "(.*)*!", r"(\w+\.?)+!", "(.|.)*!", r"(([a-z_]|\w)+\.?)*!",
    r"^(?:(?:.*)+)+!$", "(.+)+(.+)+(.+)+!", r"(?:(\w|\d|_|\.)+)+$!",
    "(" * 3000 + ")" * 3000, "(", "[", "*a", "a{1,65535}{1,65535}", "(?P<a>.)(?P<a>.)", r"\8", "a{99999999999}", "(?<=.*)a", "\ud800", "",
]  # fmt: skip
# Invalid values of fields that are no patterns.
NONSENSE: list[dict[str, Any]] = [
    {"r": 0}, {"r": -8}, {"r": 1 << 80}, {"r": "8"}, {"r": 4}, {"lora_alpha": 1e400}, {"lora_alpha": "8"}, {"lora_alpha": 1 << 2000},
    {"lora_alpha": None}, {"target_modules": 7}, {"target_modules": [None]}, {"rank_pattern": ["to_q"]}, {"rank_pattern": {"to_q": "8"}},
    {"alpha_pattern": {"to_q": float("nan")}}, {"peft_type": "NO"}, {"peft_type": {}}, {"init_lora_weights": "pissa"}, {"use_dora": True},
]  # fmt: skip
DOCUMENTS = [b"", b"[]", b"null", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b" " * (5 << 20), b'{"r": 8, "r": 9}' + b"\0"]


def modules() -> list[str]:
    """Return the names of the modules in the adapter `stripes`, as peft knows them, sorted."""
    with safe_open(STRIPES / "adapter_model.safetensors", "numpy") as file:
        names = list(file.keys())
    return sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names})


MODULES = modules()
BASE = json.loads((STRIPES / "adapter_config.json").read_text())


def draw(rng: random.Random, folder: Path) -> Hostile:
    """Make `folder` with the weights of `stripes` and a random configuration, and return it as a source with the allowed results.

    The load must succeed if `loads` is True, and fail if it is False; None allows either.
    """
    kind = rng.choice(list(KINDS))
    folder.mkdir()
    (folder / "adapter_model.safetensors").hardlink_to(STRIPES / "adapter_model.safetensors")
    if kind == "no configuration":
        (folder / "adapter_config.json").write_bytes(rng.choice(DOCUMENTS))
        return Hostile(kind, {"path": str(folder)}, CODES, False, DEADLINE_S)
    changes = KINDS[kind](rng)
    (folder / "adapter_config.json").write_text(json.dumps(BASE | changes))
    loads = False if kind == "nonsense" else fits(BASE | changes)
    return Hostile(
        f"{kind}: {'fits' if loads else 'in doubt' if loads is None else 'does not fit'}", {"path": str(folder)}, CODES, loads, DEADLINE_S
    )


def _targets(rng: random.Random) -> dict[str, Any]:
    return {"target_modules": rng.choice(ORDINARY)}


def _patterns(rng: random.Random) -> dict[str, Any]:
    """Return ranks and alphas by pattern; a rank other than the file's does not fit."""
    keys = [rng.choice((*LEAVES, r"attn\.to_[qk]", r"transformer_blocks\.[0-3]\..*", r".*_proj", r"(?!to_q)\w+")) for _ in range(3)]
    ranks = {key: RANK if rng.random() < 0.8 else 4 for key in keys}
    return {"rank_pattern": ranks, "alpha_pattern": {rng.choice(keys): rng.choice((1, 4, 16.5))}}


def _thousands(rng: random.Random) -> dict[str, Any]:
    """Return a field with hundreds or thousands of plain names or patterns, as many as a large model has."""
    names = [f"transformer_blocks.{number}.attn.other" for number in range(rng.choice((300, 1000, 4000)))]
    field = rng.choice(("target_modules", "alpha_pattern", "rank_pattern"))
    return {field: [*names, *LEAVES] if field == "target_modules" else {re.escape(name): RANK for name in names}}


def _hostile(rng: random.Random) -> dict[str, Any]:
    pattern = rng.choice(HOSTILE)
    field = rng.choice(("target_modules", "rank_pattern", "alpha_pattern"))
    return {field: pattern if field == "target_modules" else {pattern: RANK}}


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "targets": _targets,
    "patterns": _patterns,
    "thousands": _thousands,
    "hostile": _hostile,
    "nonsense": lambda rng: rng.choice(NONSENSE),
    "no configuration": lambda _: {},
}


def fits(config: dict[str, Any]) -> bool | None:
    """Return whether peft finds in time that the configuration fits the file; None if it fits, but peft needs long to find that."""
    began = time.process_time()
    try:
        found = _in_time(lambda: all(_fits(config, module) for module in MODULES))
    except (re.error, RecursionError, OverflowError, MemoryError, TimeoutError):
        return False
    return None if time.process_time() - began > SURELY_FAST_S and found else found


def _fits(config: dict[str, Any], module: str) -> bool:
    settings = LoraConfig(target_modules=config["target_modules"], r=RANK)
    rank = config["rank_pattern"].get(get_pattern_key(config["rank_pattern"], module), config["r"])
    get_pattern_key(config["alpha_pattern"], module)
    return bool(check_target_module_exists(settings, module)) and rank == RANK


def _in_time(work: Callable[[], bool]) -> bool:
    """Run `work` in the main thread and return its result; a signal raises TimeoutError in it after SURELY_SLOW_S of CPU time."""

    def over(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, SURELY_SLOW_S)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
