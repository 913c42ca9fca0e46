# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of replicas, and when to look at a deployment again."""
