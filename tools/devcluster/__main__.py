# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.devcluster COMMAND`."""

from .cli import main

main(prog_name="python -m tools.devcluster")
