# SPDX-License-Identifier: Apache-2.0
"""What a line of the log is about: as fields with `--log-format json`, where a search needs them; plain lines stay sentences."""

import logging

from diffusion_operator.reconcile.keyed_queue import OBJECT


class ObjectFields(logging.Filter):
    """Gives each line of a pass its object, under the name by which kopf's formatter knows it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Nothing is left out."""
        key = OBJECT.get()
        if key is not None and not hasattr(record, "k8s_ref"):
            record.k8s_ref = key._asdict()
        return True
