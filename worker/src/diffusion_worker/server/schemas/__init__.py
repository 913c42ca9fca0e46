# SPDX-License-Identifier: Apache-2.0
"""The JSON that goes in and out, and the errors."""
