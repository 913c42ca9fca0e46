# SPDX-License-Identifier: Apache-2.0
"""Sources of models and adapters: a child process fetches them into a cache addressed by digest."""
