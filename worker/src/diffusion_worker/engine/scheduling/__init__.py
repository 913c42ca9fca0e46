# SPDX-License-Identifier: Apache-2.0
"""The choice of the requests for each step, and the loop that runs the steps."""
