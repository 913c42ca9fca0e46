# SPDX-License-Identifier: Apache-2.0
"""Requests for images: checked, held while the model is cold, given their adapters, and answered."""
