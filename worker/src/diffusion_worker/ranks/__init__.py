# SPDX-License-Identifier: Apache-2.0
"""The rank processes and the wire to them. Only worker_proc (and what it preloads) imports torch."""
