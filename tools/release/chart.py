# SPDX-License-Identifier: Apache-2.0
"""The chart of a release: its default values name both container images by digest, so the chart's own digest stands for all three."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from tools.devcluster import programs
from tools.devcluster.errors import DevclusterError
from tools.devcluster.images import has_tls, pushed_digest
from tools.devcluster.paths import REPOSITORY
from tools.devcluster.progress import run_logged, run_quiet

CHART = REPOSITORY / "charts" / "diffusion-operator"


def publish(registry: str, version: str, *, operator: str, worker: str) -> tuple[str, str]:
    """Package the chart with both container images by digest, push it below `registry`, and return its name there and its digest."""
    folder = f"{registry}/charts"
    with tempfile.TemporaryDirectory() as draft:
        log = Path(draft) / "push.log"
        helm, chart, archive = str(programs.helm()), _with_images(Path(draft), operator, worker), f"{draft}/{CHART.name}-{version}.tgz"
        run_quiet([helm, "package", chart, "--version", version, "--app-version", version, "--destination", draft])
        push = [helm, "push", archive, f"oci://{folder}", *([] if has_tls(registry) else ["--plain-http"])]
        run_logged(push, what=f"push the chart to {folder}", log=log)
        return f"{folder}/{CHART.name}", pushed_digest(log)


def values_with_images(values: str, *, operator: str, worker: str) -> str:
    """Return the text of values.yaml with both container images in it, by digest; comments stay.

    Raises:
        DevclusterError: a field for them is missing or not empty.
    """
    repository, _, digest = operator.partition("@")
    for section, key, value in (("image", "repository", repository), ("image", "digest", digest), ("engine", "image", worker)):
        values, found = re.subn(rf'^({section}:\n(?:  .*\n)*?  {key}: )""$', rf'\g<1>"{value}"', values, flags=re.MULTILINE)
        if found != 1:
            raise DevclusterError(f'expected {section}.{key} to be "" in the chart\'s values.yaml, so that a release can fill it')
    return values


def _with_images(draft: Path, operator: str, worker: str) -> Path:
    chart = draft / CHART.name
    shutil.copytree(CHART, chart)  # symbolic links become files
    values = chart / "values.yaml"
    values.write_text(values_with_images(values.read_text(), operator=operator, worker=worker))
    return chart
