# SPDX-License-Identifier: Apache-2.0
"""Log lines with their object: as fields with `--log-format json`, for searches; as sentences in plain text."""

import logging

from diffusion_operator.reconcile.keyed_queue import OBJECT


class ObjectFields(logging.Filter):
    """A filter that adds to each log line of a pass its object, under the name by which kopf's formatter knows it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the object of the current pass, if there is one, and return True: no line is left out."""
        key = OBJECT.get()
        if key is not None and not hasattr(record, "k8s_ref"):
            record.k8s_ref = key._asdict()
        return True
