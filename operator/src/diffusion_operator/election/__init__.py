# SPDX-License-Identifier: Apache-2.0
"""The election of the one process that writes, and the gate that holds the others' writes back."""
