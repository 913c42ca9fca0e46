# SPDX-License-Identifier: Apache-2.0
"""The HTTP edge of one worker: a data port and a control port in one process that never imports torch."""
