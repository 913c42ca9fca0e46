# SPDX-License-Identifier: Apache-2.0
"""Rules for every HTTP request: token, size, time, log."""
