# SPDX-License-Identifier: Apache-2.0
from real_apiserver import kubeconfig_of_apiserver
from sole_operator import client, kubeconfig, kubelet

__all__ = ["client", "kubeconfig", "kubeconfig_of_apiserver", "kubelet"]
