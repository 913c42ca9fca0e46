# SPDX-License-Identifier: Apache-2.0
"""The names under which pipelines have the components that denoise."""

# Most of the weights and of the work are in them; adapters are for the first one there is.
DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
# Parallel kinds and step caches are made for these.
DIVISIBLE_DENOISERS = ("transformer", "transformer_2", "unet")
