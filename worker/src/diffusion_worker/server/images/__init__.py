# SPDX-License-Identifier: Apache-2.0
"""The data port's routes for images and models."""
