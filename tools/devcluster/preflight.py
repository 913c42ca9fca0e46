# SPDX-License-Identifier: Apache-2.0
"""`python3 -m tools.devcluster.preflight [--kind-too]`: the checks of the machine, by the system's Python before any environment exists.

With `--kind-too`, where the cluster is our own node: also those of a kind cluster beside it, without the worker's image.

Standard library alone, changes nothing, says one sentence and exits 1 where something is missing.
"""

import sys

PYTHON_MINIMUM = (3, 11)


def main() -> int:
    """Check that this machine meets its provider's requirements; with `--kind-too`, those of kind as well if the provider is our own node.

    Print the first unmet one to stderr. Return the exit code: 1 if there is any, else 0.
    """
    if sys.version_info < PYTHON_MINIMUM:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"error: Python 3.11 or later is needed, this is {found}: set PYTHON=/path/to/python3.11", file=sys.stderr)
        return 1
    # Only now: an older Python cannot read these.
    from .cluster import provider
    from .errors import DevclusterError
    from .providers.kind_engine import KindEngineProvider

    try:
        where = provider()
        where.check()
        if "--kind-too" in sys.argv[1:] and where.name == "node":
            KindEngineProvider().check_small()
    except DevclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
