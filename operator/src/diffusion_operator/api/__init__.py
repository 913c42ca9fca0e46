# SPDX-License-Identifier: Apache-2.0
"""Structs of both custom resources and of the worker's state document, and the names the cluster knows us by. No client, no decisions."""
