# SPDX-License-Identifier: Apache-2.0
"""The model side of a rank: pipelines as fibers, merged model calls, rows spread over ranks."""
