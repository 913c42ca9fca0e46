# SPDX-License-Identifier: Apache-2.0
"""The chart of a release: it differs from the one in the tree by the names of both container images only."""

import pytest
import yaml

from tools.devcluster.errors import DevclusterError
from tools.release.chart import CHART, values_with_images

VALUES = (CHART / "values.yaml").read_text()
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
OPERATOR, WORKER = f"registry.example:5000/me/diffusion-operator@{DIGEST}", f"registry.example:5000/me/diffusion-worker@{DIGEST}"


def test_three_values_are_filled_and_all_else_stays_comments_too() -> None:
    filled = values_with_images(VALUES, operator=OPERATOR, worker=WORKER)
    expected = yaml.safe_load(VALUES)
    expected["image"] |= {"repository": "registry.example:5000/me/diffusion-operator", "digest": DIGEST}
    expected["engine"]["image"] = WORKER
    assert yaml.safe_load(filled) == expected
    changed = [line for line in filled.splitlines() if line not in VALUES.splitlines()]
    assert len(changed) == 3 and len(filled.splitlines()) == len(VALUES.splitlines())


@pytest.mark.parametrize("key", ["  repository:", "  digest:", "  image:"])
def test_a_value_that_is_not_empty_in_the_tree_is_not_replaced_unseen(key: str) -> None:
    with pytest.raises(DevclusterError, match=rf"expected (image|engine)\.{key.strip(' :')} to be \"\""):
        values_with_images(VALUES.replace(f'{key} ""', f"{key} mine", 1), operator=OPERATOR, worker=WORKER)
