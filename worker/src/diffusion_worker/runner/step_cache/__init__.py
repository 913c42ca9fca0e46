# SPDX-License-Identifier: Apache-2.0
"""Step caches: layers that a request's denoiser calls may skip, because an earlier step of the same request computed about the same."""
