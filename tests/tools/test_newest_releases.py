# SPDX-License-Identifier: Apache-2.0
"""`make canary`: it takes each dependency without its bound, and says which pins are behind. It was run by hand, with the network."""

from tools import newest_releases
from tools.requirements import versions


def test_each_dependency_of_both_distributions_and_of_the_tests_is_taken_without_its_bound() -> None:
    names = newest_releases.names()
    assert {"torch", "diffusers", "kopf", "msgspec", "pytest", "ruff"} <= set(names)
    assert [name for name in names if set(name) & set("<>=!~ ")] == []


def test_a_release_that_is_not_the_pinned_one_is_listed_by_the_name_that_an_index_compares() -> None:
    pinned = versions("huggingface_hub==2.4.0\ntorch==2.13.0\nMarkupSafe==3.0.4\n")
    newest = versions("huggingface-hub==2.4.0\ntorch==2.15.0\nmarkupsafe==3.0.4\nnew-one==1.0\n")
    assert [line.split() for line in newest_releases.changes(pinned, newest)] == [["new-one", "none", "1.0"], ["torch", "2.13.0", "2.15.0"]]
