# SPDX-License-Identifier: Apache-2.0
"""The mounted folder of a pod, as the kubelet fills it from the ConfigMap that the pod's volume names.

Real: the files' bytes. Not real: the delay, since each file is here at once.
"""

import base64
import gzip
import json
from collections.abc import Callable, Mapping
from typing import Any

from diffusion_operator.api.names import ADAPTERS_KEY, DESIRED_KEY, desired_config_name

Find = Callable[[str], Mapping[str, Any] | None]
"""A function that returns a ConfigMap by its name."""


def mounted_files(find: Find, deployment: str) -> dict[str, bytes]:
    """Return the files by name that a deployment's pods have mounted; none without the ConfigMap."""
    found = find(desired_config_name(deployment)) or {}
    texts = {name: text.encode() for name, text in found.get("data", {}).items()}
    return texts | {name: base64.b64decode(content) for name, content in found.get("binaryData", {}).items()}


def mounted_desired(find: Find, deployment: str) -> dict[str, Any]:
    """Return the desired file with the adapters of the other file, in its order; none without a desired file."""
    files = mounted_files(find, deployment)
    desired: dict[str, Any] = json.loads(files.get(DESIRED_KEY, b"{}"))
    # It may be another owner's object, without that file.
    adapters = json.loads(gzip.decompress(files[ADAPTERS_KEY]))["adapters"] if ADAPTERS_KEY in files else []
    return desired | {"adapters": adapters}
