# SPDX-License-Identifier: Apache-2.0
from support.operator.sole_operator import client, kubeconfig, kubelet

__all__ = ["client", "kubeconfig", "kubelet"]
