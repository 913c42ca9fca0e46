# SPDX-License-Identifier: Apache-2.0
"""Every example is taken by a real API server as it stands."""

from pathlib import Path

import msgspec
import pytest
import yaml

from diffusion_operator.api.source import AdapterSource
from kind_api import Api

pytestmark = pytest.mark.apiserver

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*/*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_example_is_accepted(api: Api, file: Path) -> None:
    for document in yaml.safe_load_all(file.read_text()):
        document["metadata"]["namespace"] = "default"
        assert api.create(document)["metadata"]["name"] == document["metadata"]["name"]


def test_there_is_an_example_of_every_kind_of_source() -> None:
    specs = [yaml.safe_load(file.read_text())["spec"] for file in EXAMPLES if file.parent.name == "adapters"]
    kinds = {kind for spec in specs if "deploymentRef" in spec for kind in spec["source"]}
    assert kinds == {field.encode_name for field in msgspec.structs.fields(AdapterSource)}
