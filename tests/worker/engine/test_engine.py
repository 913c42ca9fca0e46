# SPDX-License-Identifier: Apache-2.0
"""The engine's pure parts: refusals of requests before they run. The order of running ones is in test_scheduler.py."""

import pytest

from diffusion_worker.config import RequestLimits
from diffusion_worker.engine.requests.admission import GenerationParams, check
from diffusion_worker.errors import RETRYABLE, STATUS, ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo

MODEL = ModelInfo(pipeline="P", dtype="float32", size_multiple=8, weights_bytes=1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": "  "}, "prompt: expected a text"),
        ({"prompt": "x" * 9000}, "prompt: expected at most 8192 characters, found 9000"),
        ({"n": 0}, "n: expected 1 to 10, found 0"),
        ({"n": 11}, "n: expected 1 to 10, found 11"),
        ({"seed": -1}, "seed: expected 0 to"),
        ({"seed": 2**63}, "seed: expected 0 to"),
        ({"steps": 0}, "num_inference_steps: expected 1 to 200, found 0"),
        ({"steps": 201}, "num_inference_steps"),
        ({"guidance_scale": -0.1}, "guidance_scale"),
        ({"width": 60, "height": 64}, "multiples of 8, found 60x64"),
        ({"width": 0, "height": 64}, "at least 8x8"),
        ({"width": 4096, "height": 4096}, "at most 4194304 pixels"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_field_expected_and_found(change: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        check(GenerationParams(**{"prompt": "a red digit seven"} | change), RequestLimits(), MODEL)  # type: ignore[arg-type]
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_a_prompt_is_never_repeated_in_an_error() -> None:
    with pytest.raises(RequestError) as refused:
        check(GenerationParams(prompt="secret " * 2000), RequestLimits(), MODEL)
    assert "secret" not in str(refused.value)


def test_every_code_has_a_status_and_retryable_ones_are_no_fault_of_the_caller() -> None:
    assert set(STATUS) == set(ErrorCode)
    # 429 is the exception: no single caller is at fault when all of them together ask for too much.
    assert all(STATUS[code] >= 500 for code in RETRYABLE - {ErrorCode.OVERLOADED})
