# SPDX-License-Identifier: Apache-2.0
"""One call of a model's module: its arguments, contents, outputs, and the cache of prompts."""
