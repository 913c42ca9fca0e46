# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster for the demo and the tests: one given, one by kind, or a real node on this machine."""
