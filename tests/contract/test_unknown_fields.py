# SPDX-License-Identifier: Apache-2.0
"""Fields that only a newer version of the other side has. Calls and sources refuse them, which their own tests show."""

import gzip
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from diffusion_operator.api.worker_state import WireError, WorkerState
from diffusion_operator.render.desired_config import named_shards
from diffusion_worker.engine.adapters.desired_files import DesiredFiles
from diffusion_worker.engine.sleep.policy import read_desired

NEWER = {"newer": [{"of": "a later version"}]}
ERROR = {"code": "Busy", "message": "m", "retryable": True}
STATE: dict[str, Any] = {
    "bootId": "b",
    "state": "ready",
    "operation": {"operationId": "o", "kind": "sleep", "error": ERROR},
    "load": {"stage": "Done"},
    "model": {"pipeline": "P"},
    "ranks": [{"rank": 0, "state": "ready", "memory": {"level": "HostMemory"}}],
    "adapters": [{"name": "x", "state": "Failed", "source": {"path": "/x"}, "error": ERROR}],
    "lastLoss": {"fault": "Died"},
    "held": {"current": 1},
    "desired": {"problem": ERROR},
    "revision": "b.1",
}


def newer(value: Any) -> Any:
    """Return a document with one more field in each of its objects, but for sources."""
    if isinstance(value, dict):
        return {name: one if name == "source" else newer(one) for name, one in value.items()} | NEWER
    return [newer(one) for one in value] if isinstance(value, list) else value


def test_unknown_fields_of_answers_state_and_mounted_files_are_ignored_on_both_sides(tmp_path: Path) -> None:
    def read_state(state: Any) -> WorkerState:
        return msgspec.json.decode(msgspec.json.encode(state), type=WorkerState)

    assert read_state(newer(STATE)) == read_state(STATE)
    assert msgspec.json.decode(msgspec.json.encode(newer(ERROR)), type=WireError) == msgspec.convert(ERROR, WireError)

    shard = gzip.compress(msgspec.json.encode(newer({"adapters": [{"name": "x", "source": {"path": "/x"}}]})))
    main = {
        "sleep": {"policy": "OnIdle"},
        "coldRequests": {"mode": "Reject"},
        "shards": [{"file": "s.gz", "sha256": hashlib.sha256(shard).hexdigest()}],
        "model": {"source": {"path": "/m"}, "revision": "r"},
    }
    (tmp_path / "s.gz").write_bytes(shard)
    plain, with_more = tmp_path / "plain.json", tmp_path / "newer.json"
    plain.write_bytes(msgspec.json.encode(main))
    with_more.write_bytes(msgspec.json.encode(newer(main)))
    found = read_desired(str(with_more))
    assert found == read_desired(str(plain))
    named, missing = DesiredFiles(str(with_more)).read(found)
    assert (list(named), missing) == (["x"], {})
    (reference,) = named_shards({"data": {"desired.json": with_more.read_text()}})
    assert reference.file == "s.gz"
