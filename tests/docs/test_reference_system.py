# SPDX-License-Identifier: Apache-2.0
"""The page of the reference system's surface: each name that it has here exists and has a test, each dash has a reason."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "development" / "reference-system.md"
HOMES = {
    "DiffusionModelRunner": "diffusion_worker.runner.model_runner",
    "DiffusionWorker": "diffusion_worker.runner.diffusion_worker",
    "WorkerProc": "diffusion_worker.ranks.worker_proc",
    "LoRAModelManager": "diffusion_worker.lora",
    "LRUCacheLoRAModelManager": "diffusion_worker.lora",
    "DiffusionLoRAManager": "diffusion_worker.lora",
}
# Attributes that only instances have.
SET_BY_CONSTRUCTOR = {"capacity", "lora_slots"}
# Names of the reference system that must exist here.
ASKED = {
    "load_model", "load_weights", "execute_model", "execute_stepwise", "supports_step_mode", "clear_prompt_embed_cache",
    "get_prompt_embed_cache_stats", "init_device", "init_lora_manager", "generate", "add_lora", "remove_lora", "list_loras", "pin_lora",
    "profile", "sleep", "wake_up", "handle_sleep_task", "handle_wake_task", "shutdown", "worker_main", "worker_busy_loop", "recv_message",
    "execute_rpc", "return_result", "__len__", "capacity", "lora_slots", "adapter_slots", "add_adapter", "activate_adapter",
    "deactivate_adapter", "remove_adapter", "get_adapter", "pin_adapter", "list_adapters", "remove_all_adapters", "remove_oldest_adapter",
    "register_module", "set_adapter_mapping", "create_dummy_lora", "get_dummy_lora_warmup_rank", "create_lora_manager",
}  # fmt: skip
EXPLAINED = ("memory_pool_context_fn", "kv_transfer_manager", "wake_event", "stage_id", "result queue's handle", "mixtures of experts")


class Row(NamedTuple):
    """A row of the page's tables: a name in the reference system, its counterpart here, the reason and the test."""

    reference: str
    here: str
    why: str
    test: str


def rows() -> list[Row]:
    """Parse the page's Markdown tables: each line becomes a `Row`, except headings and the rules below them."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and not line.startswith(("| reference |", "|---"))]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


PRESENT = [row for row in rows() if row.here != "—"]
ABSENT = [row for row in rows() if row.here == "—"]


def found(name: str) -> Any:
    """Return the object that a dotted name of the page stands for: an attribute of a class in `HOMES`, or a member of a module.

    None if the class lacks it. For an attribute that only `__init__` sets, a match of its assignment in the source is returned.
    """
    owner, _, attribute = name.rpartition(".")
    if owner not in HOMES:
        return getattr(importlib.import_module(owner), attribute)
    made = getattr(importlib.import_module(HOMES[owner]), owner)
    if attribute in SET_BY_CONSTRUCTOR:
        source = inspect.getsource(made.__init__)
        return re.search(rf"self\.{attribute} = ", source)
    return getattr(made, attribute, None)


@pytest.mark.parametrize("row", PRESENT, ids=lambda row: row.reference)
def test_what_the_page_says_is_here_is_on_its_class_and_has_a_test_that_is_there(row: Row) -> None:
    assert found(row.here.strip("`")) is not None
    texts = [path.read_text() for path in (ROOT / "tests" / "worker").rglob("*.py")]
    assert [text for text in texts if re.search(rf"^(async )?def {row.test.strip('`')}\(", text, re.MULTILINE)], row.test
    assert row.why


@pytest.mark.parametrize("row", ABSENT, ids=lambda row: row.reference)
def test_what_is_not_here_has_a_reason_and_no_test(row: Row) -> None:
    assert len(row.why.split()) > 5
    assert row.test == ""


def test_every_name_that_was_asked_for_is_here() -> None:
    names = {row.reference.strip("`") for row in PRESENT}
    assert ASKED - names == set()
    explained = " ".join(row.reference for row in ABSENT)
    assert [name for name in EXPLAINED if name not in explained] == []
