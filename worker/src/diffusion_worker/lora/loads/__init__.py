# SPDX-License-Identifier: Apache-2.0
"""An adapter on its way to the ranks: checked, laid out and written by a process of its own."""
