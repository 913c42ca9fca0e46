# SPDX-License-Identifier: Apache-2.0
"""Loads a pipeline and fits it out: weights, adapters, quantization, compilation, offloading, step cache."""
