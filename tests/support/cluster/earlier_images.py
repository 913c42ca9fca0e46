# SPDX-License-Identifier: Apache-2.0
"""Container images of the version before: its code upon the layers of today's images, so that a build takes seconds.

Real: its operator and its worker. Not real: their libraries, which are those of today, and the ranks in the image of servers, which are
fake.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.release.earlier import EarlierVersion
from tools.demo.installation import Images
from tools.devcluster import cluster, images

INSTALLED = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
USER 0
COPY earlier /src/earlier
RUN pip install --no-deps --no-build-isolation --force-reinstall /src/earlier
USER 65532:65532
"""
SERVERS = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY support /opt/support
ENV PYTHONPATH=/opt/support
ENTRYPOINT ["python3", "-m", "%s"]
"""


@dataclass(frozen=True)
class EarlierImages:
    """References to the container images of the earlier version, as the cluster's nodes know them."""

    release: Images
    servers: str
    """The worker's server process over fake ranks: about 80 MB of memory instead of 1 GB."""


def build_earlier(earlier: EarlierVersion, folder: Path) -> EarlierImages:
    """Build images of the earlier version's operator and worker, and of its server over fake ranks, and load them into the cluster.

    `folder` gets the build contexts.
    """
    operator = _build(folder / "operator", "earlier-operator", images.build("operator"), INSTALLED, {"earlier": earlier.root / "operator"})
    worker = _build(folder / "worker", "earlier-worker", images.build("worker"), INSTALLED, {"earlier": earlier.root / "worker"})
    servers = _build(folder / "servers", "earlier-servers", worker, SERVERS % earlier.worker_program, {"support": earlier.support})
    load = cluster.provider().load_image
    return EarlierImages(release=Images(operator=load(operator), worker=load(worker)), servers=load(servers))


def _build(folder: Path, name: str, base: str, dockerfile: str, copied: Mapping[str, Path]) -> str:
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile.lstrip())
    for target, source in copied.items():
        shutil.copytree(source, folder / target)
    return images.build_upon(base, folder, name)
