# SPDX-License-Identifier: Apache-2.0
"""What the engine is and reports: lifecycle, state document, operations, and the protocol to a rank group."""
