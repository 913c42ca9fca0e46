# SPDX-License-Identifier: Apache-2.0
"""`helm test`: the API server knows both kinds, and the operator answers its probe. It needs only Python's standard library."""

import json
import pathlib
import ssl
import sys
import time
import urllib.request

ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
KINDS = {"DiffusionDeployment", "LoRAAdapter"}


def check_kinds_are_served() -> None:
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    request = urllib.request.Request("https://kubernetes.default.svc/apis/diffusion-operator.dev/v1alpha1")
    request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text()}")
    with urllib.request.urlopen(request, context=context, timeout=5) as answer:
        served = {resource["kind"] for resource in json.load(answer)["resources"]}
    if not served >= KINDS:
        raise OSError(f"the API server knows {sorted(served)} of our group, expected {sorted(KINDS)}")


def check_operator_answers(url: str) -> None:
    with urllib.request.urlopen(url, timeout=5) as answer:
        print("operator:", answer.status, answer.read(500).decode())


def main(url: str, deadline: float) -> None:
    while True:
        try:
            check_kinds_are_served()
            check_operator_answers(url)
            return
        # A Service made a moment ago may not have reached DNS and the node's rules yet.
        except OSError as error:
            if time.monotonic() > deadline:
                raise
            print("not yet:", error)
            time.sleep(1)


main(sys.argv[1], time.monotonic() + 60)
