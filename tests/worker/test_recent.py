# SPDX-License-Identifier: Apache-2.0
"""A collection that forgets its oldest entries."""

from diffusion_worker.recent import Recent


def test_the_oldest_entry_goes_and_one_that_is_set_again_is_the_newest() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"], recent["a"], recent["c"] = 1, 2, 3, 4
    assert list(recent.items()) == [("a", 3), ("c", 4)]
