# SPDX-License-Identifier: Apache-2.0
"""The store that watches fill, and what is read from it."""
