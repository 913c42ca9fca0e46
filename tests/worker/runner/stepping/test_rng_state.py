# SPDX-License-Identifier: Apache-2.0
"""Numbers drawn without a generator depend on the request's seed alone, not on other requests in the process."""

import torch

from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, FiberDone
from diffusion_worker.runner.stepping.rng_state import OwnRandomness


def drawn_after(seed: int, count: int) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.rand(count)


def test_two_requests_in_turn_draw_what_each_would_draw_alone() -> None:
    one, other = OwnRandomness(1), OwnRandomness(2)
    parts: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    for _ in range(3):
        for seed, randomness in ((1, one), (2, other)):
            with randomness:
                parts[seed].append(torch.rand(1))
    assert torch.equal(torch.cat(parts[1]), drawn_after(1, 3))
    assert torch.equal(torch.cat(parts[2]), drawn_after(2, 3))


def test_the_numbers_of_the_process_go_on_as_if_no_request_had_drawn() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        first = torch.rand(1)
        with OwnRandomness(1):
            torch.rand(5)
        assert torch.equal(torch.cat([first, torch.rand(1)]), drawn_after(7, 2))


def test_a_fiber_draws_by_the_seed_of_its_request() -> None:
    state = DiffusionRequestState(RequestSpec(request_id="a", prompt="", seed=5), lambda: torch.rand(2))
    event = state.resume()
    assert isinstance(event, FiberDone)
    assert torch.equal(event.frame, drawn_after(5, 2))
