# SPDX-License-Identifier: Apache-2.0
"""The steps of a release, which .github/workflows/release.yml runs: container images, chart and bills of materials, in any registry."""
