# SPDX-License-Identifier: Apache-2.0
"""A streamed request at a Service from inside the cluster, timed.

It runs in the worker's container, which has Python, and imports none of our code:

    kubectl exec POD -c worker -- python3 -c "$(cat benchmarks/request_in_the_cluster.py)" URL BODY

BODY is the request as JSON.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

DEADLINE_S = 300.0


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Stream a request, and return the seconds from its sending to the first event of each kind, and to its end (`seconds`).

    `status` is that of HTTP, or 0 without an answer, and `code` names an error. A refusal or a lost connection raises nothing.
    """
    told: dict[str, Any] = {}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_progress": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/images/generations", data=data, headers={"Content-Type": "application/json"})
    asked = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            told["status"] = answer.status
            for line in answer:
                _note(line, time.monotonic() - asked, told)
    except urllib.error.HTTPError as error:
        told |= {"status": error.code, "code": json.loads(error.read()).get("error", {}).get("code")}
    except (OSError, ValueError) as error:
        told |= {"status": 0, "code": repr(error)}
    return told | {"seconds": time.monotonic() - asked}


def _note(line: bytes, seconds: float, told: dict[str, Any]) -> None:
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[len(b"data: ") :])
    told.setdefault(event.get("type", "error").rpartition(".")[2], seconds)
    if "error" in event:
        told["code"] = event["error"].get("code")


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1], json.loads(sys.argv[2]))))
