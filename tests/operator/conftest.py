# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the operator."""

from support.operator.sole_operator import client, kubeconfig, kubelet

__all__ = ["client", "kubeconfig", "kubelet"]
