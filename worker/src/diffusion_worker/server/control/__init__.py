# SPDX-License-Identifier: Apache-2.0
"""The control port's routes."""
