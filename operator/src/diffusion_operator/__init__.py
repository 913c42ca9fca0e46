# SPDX-License-Identifier: Apache-2.0
"""The operator: keeps DiffusionDeployments and LoRAAdapters as their specs ask, through pods and the workers' control API."""
