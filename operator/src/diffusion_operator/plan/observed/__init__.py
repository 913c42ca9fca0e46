# SPDX-License-Identifier: Apache-2.0
"""What a pass has observed: objects, pods, replicas and their workers. It decides nothing."""
