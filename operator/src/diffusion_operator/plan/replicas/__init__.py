# SPDX-License-Identifier: Apache-2.0
"""Pods of a deployment: how many, which go, which model they have, who gets traffic."""
