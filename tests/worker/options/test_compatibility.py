# SPDX-License-Identifier: Apache-2.0
"""Options that exclude each other are refused at start, by both names; so are calls that an offloaded worker cannot do."""

import json
import sys
from pathlib import Path

import pytest

from diffusion_worker import cli
from diffusion_worker.compatibility import EXCLUSIVE, check_together
from diffusion_worker.config import Compile, Offload, Quantization, StepCache, WorkerConfig
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.process import DIGITS_MODEL, REPOSITORY
from support.worker.server_edge import Edge

MANUAL = REPOSITORY / "docs" / "acceleration.md"
# Each option of the table, as it is given and as a message names it.
GIVEN = {
    "--compile": ("--compile=default", "--compile default"),
    "--exact": ("--exact", "--exact"),
    "--tensor": ("--tensor=2", "--tensor 2"),
    "--sequence": ("--sequence=2", "--sequence 2"),
    "--shard": ("--shard=2", "--shard 2"),
    "--step-cache": ("--step-cache=first-block", "--step-cache first-block"),
    "--quantization": ("--quantization=int8", "--quantization int8"),
    "--offload": ("--offload=model", "--offload model"),
    "--load-format dummy": ("--load-format=dummy", "--load-format dummy"),
    "--offload group": ("--offload=group", "--offload group"),
}


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the program with these options, which it must refuse with exit code 1; return its error."""
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", f"--model={DIGITS_MODEL}", "--ranks=2", *options])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(("option", "other"), [(option, other) for option, other, _ in EXCLUSIVE])
def test_options_that_do_not_go_together_are_refused_at_start_by_both_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, other: str
) -> None:
    said = refusal(monkeypatch, capsys, GIVEN[option][0], GIVEN[other][0])
    assert f"Error: {GIVEN[option][1]} with {GIVEN[other][1]}: not supported together: " in said


def test_every_pair_that_does_not_go_together_is_in_the_manual() -> None:
    rows = [line.split("|")[1:3] for line in MANUAL.read_text().splitlines() if line.startswith("| ")]
    told, option = set(), ""
    for first, others in rows:
        option = first.strip().strip("`") or option
        told |= {(option, other.strip().strip("`")) for other in others.split(",")}
    assert {(option, other) for option, other, _ in EXCLUSIVE} <= told


def test_options_that_go_together_are_not_refused() -> None:
    fields = {"model": "m", "served_name": "m"}
    check_together(WorkerConfig(**fields, compile=Compile.DEFAULT, offload=Offload.MODEL))
    check_together(WorkerConfig(**fields, offload=Offload.MODEL, step_cache=StepCache.FIRST_BLOCK))
    check_together(WorkerConfig(**fields, exact=True, quantization=Quantization.INT8, offload=Offload.NONE))


def test_a_worker_that_offloads_does_not_start_with_a_policy_to_sleep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    desired = tmp_path / "desired.json"
    desired.write_text(json.dumps({"sleep": {"policy": "Asleep"}}))
    said = refusal(monkeypatch, capsys, "--offload=group", f"--desired={desired}")
    assert "--offload group: not supported with the sleep policy Asleep of" in said


async def test_a_worker_that_offloads_refuses_to_sleep_and_serves_on() -> None:
    edge = Edge(FakeRankGroup(), offload=Offload.MODEL)
    await edge.engine.start()
    answer = await edge.operate("sleep")
    assert (answer.status_code, answer.json()["code"]) == (400, "InvalidRequest")
    assert "--offload model" in answer.json()["message"]
    assert (await edge.state())["state"] == "ready"
    await edge.engine.terminate()
