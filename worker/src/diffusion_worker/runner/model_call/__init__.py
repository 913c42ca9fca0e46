# SPDX-License-Identifier: Apache-2.0
"""A call of a model's module: arguments, contents, outputs, and the cache of prompts."""
