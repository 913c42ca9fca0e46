# SPDX-License-Identifier: Apache-2.0
"""Serves one diffusion model on a group of ranks. Importing this package imports neither torch nor diffusers."""
