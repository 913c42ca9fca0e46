# SPDX-License-Identifier: Apache-2.0
"""Diffusers' pipelines: described, viewed for one request, and called."""
