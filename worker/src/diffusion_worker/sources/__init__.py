# SPDX-License-Identifier: Apache-2.0
"""Where models and adapters come from: fetched by a child process into a cache addressed by digest."""
