# SPDX-License-Identifier: Apache-2.0
"""Adapters as the server process knows them: by name and content, loaded on all ranks or on none."""
