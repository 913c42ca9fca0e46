# SPDX-License-Identifier: Apache-2.0
"""The decision which model classes may share a call between requests, and its grounds."""
