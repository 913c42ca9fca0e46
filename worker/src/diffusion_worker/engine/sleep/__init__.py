# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of the model: calls, policies, what ranks do, and the record in a file."""
