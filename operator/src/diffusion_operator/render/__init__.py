# SPDX-License-Identifier: Apache-2.0
"""Pure builders of the objects a DiffusionDeployment owns, one kind a file. A test validates each strictly against Kubernetes' schemas."""

from typing import Any

Manifest = dict[str, Any]
