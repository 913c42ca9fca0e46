# SPDX-License-Identifier: Apache-2.0
"""To be deleted."""

from tools.suite.cold_start import Step, steps_of, timeline

LINES = [
    (9.0, "Made .venv in 8 s"),
    (12.0, "[  0:00]  Build the container images and the cluster's programs"),
    (20.0, "[   2.1 s] Kubernetes (about 10 minutes, once) …"),
    (112.0, "[ 100.0 s] Kubernetes (about 10 minutes, once): done in 99.0 s"),
    (112.5, "         done in 100.5 s: localhost/diffusion-worker:0123"),
    (113.0, "[  1:53]  A cluster"),
    (114.0, "         done in 1.0 s: provider 'node'"),
]


def test_steps_of_the_demo_and_of_devcluster_are_in_the_order_of_their_beginnings() -> None:
    assert steps_of(LINES) == [
        Step(".venv", 1.0, 8.0),
        Step("**Build the container images and the cluster's programs**", 12.0, 100.5),
        Step("Kubernetes (about 10 minutes)", 13.0, 99.0),
    ]


def test_a_bar_shows_when_a_step_ran() -> None:
    assert timeline([Step("one", 0.0, 60.0), Step("two", 60.0, 30.0)], 120.0)[2:] == [
        f"| one | 0 | 60 | `{'█' * 24}{'·' * 24}` |",
        f"| two | 60 | 30 | `{'·' * 24}{'█' * 12}{'·' * 12}` |",
    ]
