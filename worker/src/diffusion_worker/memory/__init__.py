# SPDX-License-Identifier: Apache-2.0
"""Where weights live, and how their memory is given back."""
