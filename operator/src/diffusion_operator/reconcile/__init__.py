# SPDX-License-Identifier: Apache-2.0
"""Observe, plan, act, write the status once: one file a kind, and the queue that drives them. No kopf, no client library."""
