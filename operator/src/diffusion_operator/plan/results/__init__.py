# SPDX-License-Identifier: Apache-2.0
"""Results of the plan: actions, Events, and differences found."""
