# SPDX-License-Identifier: Apache-2.0
"""A plain HTTP session to an API server of a benchmark."""

import ssl
from pathlib import Path

import aiohttp
from kubernetes.aio import client, config


async def session_of(kubeconfig: Path) -> aiohttp.ClientSession:
    """Return a session with the client certificate of a kubeconfig; paths are relative to its server."""
    configuration = client.Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return aiohttp.ClientSession(
        configuration.host, connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )
