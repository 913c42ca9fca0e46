# SPDX-License-Identifier: Apache-2.0
"""`python3 -m tools.devcluster.preflight`: the checks of the machine, by the system's Python before any environment exists.

Standard library alone, changes nothing, says one sentence and exits 1 where something is missing.
"""

import sys

PYTHON_MINIMUM = (3, 11)


def main() -> int:
    """Check that this machine meets its provider's requirements.

    Print the first unmet one to stderr. Return the exit code: 1 if there is any, else 0.
    """
    if sys.version_info < PYTHON_MINIMUM:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"error: Python 3.11 or later is needed, this is {found}: set PYTHON=/path/to/python3.11", file=sys.stderr)
        return 1
    # Only now: an older Python cannot read these.
    from .cluster import provider
    from .errors import DevclusterError

    try:
        provider().check()
    except DevclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
