# SPDX-License-Identifier: Apache-2.0
"""Pure decisions: what was observed, the spec and the time in; actions and a status out. No client, no clock, no randomness."""
