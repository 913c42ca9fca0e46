# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of benchmarks: ranks, models, clients and operators that ours are measured with or against."""
