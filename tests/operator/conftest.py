# SPDX-License-Identifier: Apache-2.0
from real_apiserver import kubeconfig_of_apiserver

__all__ = ["kubeconfig_of_apiserver"]
