# SPDX-License-Identifier: Apache-2.0
"""What the plan gives back: actions, Events, and differences found."""
