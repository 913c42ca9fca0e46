# SPDX-License-Identifier: Apache-2.0
"""Log lines with their object: as fields with `--log-format json`, for searches; as sentences in plain text."""

import logging

from diffusion_operator.reconcile.keyed_queue import OBJECT


class ObjectFields(logging.Filter):
    """A logging filter that attaches the reconciled object to each record, as the attribute `k8s_ref` that kopf's formatter reads."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Attach the object of the running pass, if any, and return True, so that every record is kept."""
        key = OBJECT.get()
        if key is not None and not hasattr(record, "k8s_ref"):
            record.k8s_ref = key._asdict()
        return True
