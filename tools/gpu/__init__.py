# SPDX-License-Identifier: Apache-2.0
"""The first minutes on a machine with one GPU: `make gpu`. The runner needs nothing but Python; items run in processes of their own."""
