# SPDX-License-Identifier: Apache-2.0
"""Observations of a pass: objects, pods, replicas and their workers."""
