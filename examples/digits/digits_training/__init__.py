# SPDX-License-Identifier: Apache-2.0
"""How the digits model is made: images, captions, architecture, and the three trainings (autoencoder, denoiser, adapters)."""
