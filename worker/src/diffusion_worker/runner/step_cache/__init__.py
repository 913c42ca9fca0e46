# SPDX-License-Identifier: Apache-2.0
"""Step caches: what a request's denoiser calls may leave out, because an earlier step of the same request computed about that."""
