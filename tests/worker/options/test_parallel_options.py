# SPDX-License-Identifier: Apache-2.0
"""Sizes of the parallel kinds: impossible ones are refused by the option's name, before torch is imported."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from diffusion_worker import cli
from diffusion_worker.compatibility import check_together
from diffusion_worker.config import RequestLimits, WorkerConfig
from diffusion_worker.engine.requests import admission
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo
from support.worker.process import DIGITS_MODEL


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the program with these options, which it must refuse with exit code 1; return its error."""
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", f"--model={DIGITS_MODEL}", *options])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tensor=0"], "--tensor"),
        (["--sequence=17"], "--sequence"),
        (["--shard=two"], "--shard"),
        (["--tensor=2"], "--tensor 2: expected a divisor of --ranks 1, found 2"),
        (["--ranks=4", "--sequence=3"], "--sequence 3: expected a divisor of --ranks 4, found 3"),
        (["--ranks=2", "--sequence=2", "--shard=2"], "--sequence 2 x --shard 2: expected a divisor of --ranks 2, found 4"),
        (["--ranks=4", "--tensor=2", "--shard=2"], "--tensor 2 with --shard 2: not supported together"),
        (["--ranks=4", "--tensor=2", "--sequence=2"], "--tensor 2 with --sequence 2: not supported together"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_the_options_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert says in refusal(monkeypatch, capsys, *options)


def test_sharded_weights_with_a_policy_to_sleep_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    desired = tmp_path / "desired.json"
    desired.write_text(json.dumps({"sleep": {"policy": "Asleep"}}))
    said = refusal(monkeypatch, capsys, "--ranks=2", "--shard=2", f"--desired={desired}")
    assert "--shard 2: not supported with the sleep policy Asleep" in said


def test_the_ranks_are_the_product_of_all_sizes_or_the_worker_does_not_start() -> None:
    for ranks, tensor, sequence, shard in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4), (1, 2, 3), (1, 2)):
        config = WorkerConfig(model="m", served_name="m", ranks=ranks, tensor=tensor, sequence=sequence, shard=shard)
        alone = not (tensor > 1 and sequence * shard > 1)
        if alone and any(ranks == rows * tensor * sequence * shard for rows in range(1, 9)):
            check_together(config)
        else:
            with pytest.raises(ConfigError, match=r"--(tensor|sequence|shard)"):
                check_together(config)


def refused_size(size: tuple[int, int], model: ModelInfo) -> RequestError | None:
    width, height = size
    try:
        admission.check(GenerationParams(prompt="p kumquatfen", width=width, height=height), RequestLimits(), model)
    except RequestError as error:
        return error
    return None


def test_a_size_whose_tokens_do_not_divide_is_refused_before_it_takes_a_row() -> None:
    model = ModelInfo("FluxPipeline", "float32", 8, 0, token_pixels=16, tokens_multiple=4)
    assert refused_size((64, 64), model) is None
    # A token is 16 x 16 pixels: the sizes have 2 x 2 tokens, and 3 x 3.
    assert refused_size((32, 32), model) is None
    error = refused_size((48, 48), model)
    assert error is not None and error.code is ErrorCode.INVALID_REQUEST
    assert (
        error.message == "size: expected a size whose number of tokens, of 16x16 pixels each, is a multiple of 4 (--sequence), found 48x48"
    )
    # 8 pixels more in a side add no token.
    assert refused_size((72, 64), model) is None
    assert refused_size((48, 48), ModelInfo("FluxPipeline", "float32", 8, 0)) is None
