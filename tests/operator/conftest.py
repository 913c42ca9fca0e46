# SPDX-License-Identifier: Apache-2.0
from support.operator.real_apiserver import kubeconfig_of_apiserver
from support.operator.sole_operator import client, kubeconfig, kubelet

__all__ = ["client", "kubeconfig", "kubeconfig_of_apiserver", "kubelet"]
