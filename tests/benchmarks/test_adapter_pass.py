# SPDX-License-Identifier: Apache-2.0
"""The benchmark of passes over many adapters (P17), run tiny. A write where nothing changed is an error of the benchmark."""

from benchmarks.adapter_pass import figures, samples


def test_passes_over_adapters_are_sampled_and_those_that_find_nothing_new_write_nothing() -> None:
    found = samples(tiny=True)
    assert {name for name in found if name.endswith("_500_ms")} >= {"unchanged_500_ms", "one_changed_500_ms", "longest_turn_500_ms"}
    assert all(one > 0 for times in found.values() for one in times)
    assert figures(found)["pass_500_adapters_ms"] > 0
