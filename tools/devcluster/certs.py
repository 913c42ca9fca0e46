# SPDX-License-Identifier: Apache-2.0
"""A certificate authority, the certificates under it and the kubeconfigs with them inside: all made by openssl, valid for 30 days."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from .progress import run_quiet

DAYS = "30"


class Authority:
    """A certificate authority of openssl in a folder, as ca.crt and ca.key; the constructor makes a new one.

    Each certificate that it issues is stored there too, as NAME.crt with its NAME.key.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key("ca")
        run_quiet(
            [
                "openssl",
                "req",
                "-x509",
                "-new",
                "-key",
                self.file("ca.key"),
                "-subj",
                "/CN=diffusion-operator-devcluster",
                "-days",
                DAYS,
                "-out",
                self.file("ca.crt"),
            ]
        )

    def file(self, name: str) -> Path:
        """Return where `name` is in the authority's folder, or would be, since nothing is looked up."""
        return self.directory / name

    def _key(self, name: str) -> None:
        run_quiet(["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", self.file(f"{name}.key")])
        self.file(f"{name}.key").chmod(0o600)

    def service_account_key(self) -> Path:
        """Generate sa.key, with which the cluster signs tokens of service accounts, and sa.pub to verify them; return sa.key's path."""
        self._key("sa")
        run_quiet(["openssl", "ec", "-in", self.file("sa.key"), "-pubout", "-out", self.file("sa.pub")])
        return self.file("sa.key")

    def issue(self, name: str, *, user: str, group: str, addresses: tuple[str, ...] = ()) -> None:
        """Make NAME.key and NAME.crt, signed by the authority; `user` and `group` are what Kubernetes takes from it.

        The certificate is for clients and servers alike. `addresses`, such as `DNS:…` or `IP:…`, are those that clients of a server accept.
        """
        self._key(name)
        extensions = "keyUsage=digitalSignature,keyEncipherment\nextendedKeyUsage=serverAuth,clientAuth\n"
        if addresses:
            extensions += f"subjectAltName={','.join(addresses)}\n"
        self.file(f"{name}.ext").write_text(extensions)
        request = run_quiet(["openssl", "req", "-new", "-key", self.file(f"{name}.key"), "-subj", f"/O={group}/CN={user}"])
        # A serial of our own keeps openssl from writing a file that two at once would fight over.
        serial = str(int.from_bytes(name.encode()[:15]))
        sign = ["openssl", "x509", "-req", "-CA", str(self.file("ca.crt")), "-CAkey", str(self.file("ca.key")), "-set_serial", serial]
        run_quiet([*sign, "-days", DAYS, "-extfile", self.file(f"{name}.ext"), "-out", self.file(f"{name}.crt")], stdin=request)

    def kubeconfig(self, name: str, *, server: str, target: Path) -> Path:
        """Write a kubeconfig with the certificate and key of `name` inside to `target`, over any older one, and return `target`.

        It is JSON, which is YAML too. A new file is readable by its owner alone.
        """
        cluster = {"server": server, "certificate-authority-data": self._encoded("ca.crt")}
        user = {"client-certificate-data": self._encoded(f"{name}.crt"), "client-key-data": self._encoded(f"{name}.key")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "devcluster", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": name}}],
            "current-context": "devcluster",
        }
        target.touch(mode=0o600)
        target.write_text(json.dumps(document, indent=1))
        return target

    def _encoded(self, name: str) -> str:
        return base64.b64encode(self.file(name).read_bytes()).decode()
