# SPDX-License-Identifier: Apache-2.0
"""Pairs of options: a real API server refuses every pair that the worker refuses, and takes every pair that the worker takes."""

from itertools import combinations

import msgspec
import pytest

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.render.worker_arguments import worker_arguments
from diffusion_worker import compatibility
from diffusion_worker.errors import ConfigError
from support.apiserver.kind_api import Api, Document, dd, merged
from support.operator.worker_driver import config_of_arguments

pytestmark = pytest.mark.apiserver

# The choices in the worker's table, as fields of a spec.
CHOICES: dict[str, Document] = {
    "--tensor": {"parallelism": {"tensor": 2}},
    "--sequence": {"parallelism": {"sequence": 2}},
    "--shard": {"parallelism": {"shard": 2}},
    "--exact": {"engine": {"exact": True}},
    "--load-format dummy": {"engine": {"loadFormat": "Dummy"}},
    "--compile default": {"engine": {"compile": "Default"}},
    "--compile max-autotune": {"engine": {"compile": "MaxAutotune"}},
    "--offload model": {"engine": {"offload": "Model"}},
    "--offload group": {"engine": {"offload": "Group"}},
    "--quantization int8": {"engine": {"quantization": "Int8"}},
    "--quantization fp8": {"engine": {"quantization": "FP8"}},
    "--quantization nf4": {"engine": {"quantization": "NF4"}},
    "--step-cache first-block": {"engine": {"stepCache": "FirstBlock"}},
    "--step-cache taylor-seer": {"engine": {"stepCache": "TaylorSeer"}},
    "--step-cache mag-cache": {"engine": {"stepCache": "MagCache"}},
}
PAIRS = [(one, other) for one, other in combinations(CHOICES, 2) if one.partition(" ")[0] != other.partition(" ")[0]]


def document(*options: str) -> Document:
    spec: Document = {"parallelism": {"ranksPerReplica": 4}}
    for option in options:
        spec = merged(spec, CHOICES[option])
    return dd(**spec)


def refused_by_the_worker(found: Document) -> bool:
    metadata = found["metadata"] | {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    arguments = worker_arguments(msgspec.convert({"metadata": metadata, "spec": found["spec"]}, DiffusionDeployment))
    try:
        compatibility.check_together(config_of_arguments(arguments))
    except ConfigError:
        return True
    return False


def test_every_row_of_the_workers_table_is_one_of_the_pairs() -> None:
    named = {option for row in compatibility.EXCLUSIVE for option in row[:2]}
    assert [option for option in named if not any(choice == option or choice.startswith(f"{option} ") for choice in CHOICES)] == []


@pytest.mark.parametrize("option", CHOICES)
def test_an_option_alone_is_taken(api: Api, option: str) -> None:
    assert not refused_by_the_worker(document(option))
    api.create(document(option))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_the_api_server_refuses_the_pairs_that_the_worker_refuses(api: Api, one: str, other: str) -> None:
    found = document(one, other)
    if refused_by_the_worker(found):
        assert "excludes" in api.refusal(lambda: api.create(found))
    else:
        api.create(found)


@pytest.mark.parametrize("option", CHOICES)
def test_what_the_worker_never_sleeps_with_is_refused_with_a_policy_that_sleeps(api: Api, option: str) -> None:
    found = document(option)
    found["spec"]["sleep"] = {"policy": "OnIdle"}
    if option.partition(" ")[0] in compatibility.NO_SLEEP:
        assert "must be AlwaysAwake" in api.refusal(lambda: api.create(found))
    else:
        api.create(found)
