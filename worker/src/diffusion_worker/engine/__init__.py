# SPDX-License-Identifier: Apache-2.0
"""Admission, scheduling and the life of requests, adapters and sleep. No torch."""
