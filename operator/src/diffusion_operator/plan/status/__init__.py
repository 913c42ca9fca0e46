# SPDX-License-Identifier: Apache-2.0
"""The status of a DiffusionDeployment, with its conditions."""
