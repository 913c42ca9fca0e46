# SPDX-License-Identifier: Apache-2.0
"""The JSON of requests and answers, and the errors."""
