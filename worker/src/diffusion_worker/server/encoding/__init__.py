# SPDX-License-Identifier: Apache-2.0
"""Images to bytes and back, in threads."""
