# SPDX-License-Identifier: Apache-2.0
"""The making of the digits model: images, captions, architecture, and the three trainings (autoencoder, denoiser, adapters)."""
