# SPDX-License-Identifier: Apache-2.0
"""The load of a pipeline, and what is set up on it: weights, adapters, quantization, compilation, offloading, step cache."""
