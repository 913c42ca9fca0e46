# SPDX-License-Identifier: Apache-2.0
"""Entry point (placeholder until the next commit)."""
def main() -> None: raise SystemExit(2)
