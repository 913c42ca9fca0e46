# SPDX-License-Identifier: Apache-2.0
"""Requests as fibers: suspended at model calls, merged with others, advanced by the step."""
