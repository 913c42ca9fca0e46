# SPDX-License-Identifier: Apache-2.0
"""`python3 -m tools.release STEP`: one step of a release.

`image` and `chart` print `name=…` and `digest=…`, as GitHub reads the outputs of a step. Standard library alone: the machine that
publishes has no room for a virtual environment with torch beside the worker's container image.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

from tools.devcluster import images, programs
from tools.devcluster.errors import DevclusterError
from tools.devcluster.paths import log_dir
from tools.devcluster.progress import run_logged

from . import chart
from .version import PACKAGES, released_version


def main() -> int:
    """Run the step of the command line, and return 0, or 1 after printing an error of the devcluster."""
    arguments = parser().parse_args()
    try:
        run(arguments)
    except DevclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Run one step of a release; `image` and `chart` print the name and digest that they pushed, `sbom` prints nothing."""
    if arguments.step == "sbom":
        write_sbom(arguments.image, arguments.file)
        return
    version = released_version(arguments.tag)
    if arguments.step == "image":
        name = f"{arguments.registry}/diffusion-{arguments.package}"
        digest = images.publish(images.build(arguments.package), f"{name}:{version}")
    else:
        name, digest = chart.publish(arguments.registry, version, operator=arguments.operator, worker=arguments.worker)
    print(f"name={name}\ndigest={digest}")


def write_sbom(image: str, file: str) -> None:
    """Write the bill of materials of a container image in a registry to a file, as JSON of CycloneDX.

    It lists packages of Debian and Python, without their files, because GitHub takes only 16 MB.
    """
    scan = [str(programs.syft()), "scan", f"registry:{image}", "--output", f"cyclonedx-json={file}"]
    environment = {**os.environ, "SYFT_FILE_METADATA_SELECTION": "none", "SYFT_CHECK_FOR_APP_UPDATE": "false"}
    run_logged(scan, what=f"bill of materials of {image}", log=log_dir() / "sbom.log", env=environment)


def parser() -> argparse.ArgumentParser:
    """Build the command line of `python3 -m tools.release`, with the chosen step in `step`; references of images need a digest."""
    top = argparse.ArgumentParser(prog="python3 -m tools.release", description="Run one step of a release.")
    steps = top.add_subparsers(dest="step", required=True)
    image = steps.add_parser("image", help="build a container image and push it")
    image.add_argument("package", choices=PACKAGES)
    packed = steps.add_parser("chart", help="package the chart with both container images by digest, and push it")
    for step in (image, packed):
        # Names in a registry have no capitals, and those of owners on GitHub may.
        step.add_argument("registry", type=str.lower, help="registry, with a folder; one on 127.0.0.1 or localhost is asked without TLS")
        step.add_argument("tag", help="vX.Y.Z, the version of both packages")
    for package in PACKAGES:
        packed.add_argument(package, type=by_digest, help=f"the {package}'s container image, NAME@sha256:…")
    sbom = steps.add_parser("sbom", help="write the bill of materials of a container image, as JSON of CycloneDX")
    sbom.add_argument("image", type=by_digest, help="NAME@sha256:…, in its registry")
    sbom.add_argument("file", metavar="FILE.cdx.json")
    return top


def by_digest(reference: str) -> str:
    """Return the reference unchanged if it is NAME@sha256:… with 64 digits; else raise ArgumentTypeError."""
    if not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", reference):
        raise argparse.ArgumentTypeError(f"expected NAME@sha256:…, found {reference!r}")
    return reference


if __name__ == "__main__":
    sys.exit(main())
