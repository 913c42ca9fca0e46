# SPDX-License-Identifier: Apache-2.0
"""A device that pods can claim and share, as those of a GPU's driver.

Real: the claim, the scheduler that gives it the device, the kubelet's driver, and the container runtime that puts it into containers.
Not real: the device, which is an environment variable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.devcluster import cluster, programs
from tools.devcluster.processes import start

DRIVER = "device.test.diffusion-operator.dev"
DEVICE = "test-device"


@contextmanager
def driver_running(log: Path) -> Iterator[None]:
    """Offer the device on the first node for as long as the block lasts."""
    nodes = cluster.provider().own_nodes()
    folders = [f"--kubelet={nodes.kubelet}", f"--cdi={nodes.cdi}"]
    words = [*nodes.command(programs.device_driver()), f"--kubeconfig={nodes.kubeconfig}", f"--node={nodes.first}", *folders]
    driver = start("device-driver", words, log=log, dies_with_us=True)
    try:
        yield
    finally:
        driver.stop()
