# SPDX-License-Identifier: Apache-2.0
"""The certificates and kubeconfigs of an API server, by the real openssl."""

import base64
import json
import subprocess
from pathlib import Path

import pytest

from tools.devcluster.certs import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("certs") / "ca")
    made.service_account_key()
    made.issue("server", user="kube-apiserver", group="kube", addresses=("DNS:localhost", "IP:127.0.0.1"))
    made.issue("admin", user="kubernetes-admin", group="system:masters")
    return made


def test_a_certificate_is_the_authoritys_and_serves_its_addresses(authority: Authority) -> None:
    words = ["openssl", "verify", "-CAfile", str(authority.file("ca.crt")), "-verify_ip", "127.0.0.1", str(authority.file("server.crt"))]
    subprocess.run(words, check=True, capture_output=True)
    assert authority.file("server.key").stat().st_mode & 0o077 == 0


def test_a_kubeconfig_needs_no_other_file_and_is_private(authority: Authority, tmp_path: Path) -> None:
    file = authority.kubeconfig("admin", server="https://127.0.0.1:6443", target=tmp_path / "kubeconfig")
    document = json.loads(file.read_text())
    assert document["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:6443"
    assert base64.b64decode(document["users"][0]["user"]["client-certificate-data"]) == authority.file("admin.crt").read_bytes()
    assert file.stat().st_mode & 0o077 == 0
