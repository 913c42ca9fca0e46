# SPDX-License-Identifier: Apache-2.0
"""Names of the components of pipelines that denoise."""

# These have most of the weights and of the work. Adapters are for the first one that a pipeline has.
DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
# Parallel kinds and step caches are made for these.
DIVISIBLE_DENOISERS = ("transformer", "transformer_2", "unet")
