# SPDX-License-Identifier: Apache-2.0
"""The mounted folder of a pod, as the kubelet fills it from the ConfigMaps that the pod's volume names.

Real: the files' bytes. Not real: the delay, since each file is here at once.
"""

import base64
import gzip
import json
from collections.abc import Callable, Mapping
from typing import Any

from diffusion_operator.api.names import DESIRED_KEY, SHARDS, desired_config_name, shard_config_name, shard_file

Find = Callable[[str], Mapping[str, Any] | None]
"""A function that returns a ConfigMap by its name."""


def mounted_files(find: Find, deployment: str) -> dict[str, bytes]:
    """Return the files by name that a deployment's pods have mounted: the main one and the shards.

    Files whose ConfigMap is missing, or lacks their content, are left out.
    """
    # It may be another owner's object, without that file.
    main = (find(desired_config_name(deployment)) or {}).get("data", {}).get(DESIRED_KEY)
    files = {DESIRED_KEY: main.encode()} if main is not None else {}
    for number in range(SHARDS):
        content = (find(shard_config_name(deployment, number)) or {}).get("binaryData", {}).get(shard_file(number))
        files |= {shard_file(number): base64.b64decode(content)} if content is not None else {}
    return files


def mounted_desired(find: Find, deployment: str) -> dict[str, Any]:
    """Return the main file, with the adapters of the shards that it names, sorted by name; none without a main file."""
    files = mounted_files(find, deployment)
    desired: dict[str, Any] = json.loads(files.get(DESIRED_KEY, b"{}"))
    named: dict[str, Any] = {}
    for content in (files[shard["file"]] for shard in desired.get("shards", ()) if shard["file"] in files):
        named |= {one["name"]: one for one in json.loads(gzip.decompress(content))["adapters"]}
    return desired | {"adapters": [named[name] for name in sorted(named)]}
