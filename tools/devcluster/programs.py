# SPDX-License-Identifier: Apache-2.0
"""The programs of the cluster, built from Go modules or unpacked from Debian packages into the cache; nothing prebuilt is committed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from . import checks
from .cache import cached, content_hash, locked
from .paths import HERE, log_dir
from .progress import run_logged, run_quiet

KUBERNETES = "1.36.2"
HELM = "v3.22.0"
KIND = "v0.33.0"
SYFT = "v1.57.0"
# Debian's is of 2022: it knows neither image volumes nor devices of resource claims.
CONTAINERD = "v2.4.2"

KUBE_NAMES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
    "cri-pull",
    "kubeadm",
    "crictl",
    "kindnetd",
)
_VERSION = "k8s.io/component-base/version"
_KUBE_LDFLAGS = f"-s -w -X {_VERSION}.gitVersion=v{KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor={KUBERNETES.split('.')[1]}"

# Unpacked beside each other, never installed: Debian would start them as services, now or after the next boot.
UNPACKED = ("containernetworking-plugins", "docker-registry")
# For kind. Debian's engine takes the machine's iptables; kind's images are built elsewhere.
DOCKER = ("containerd", "docker.io", "runc")
PACKET_FILTERS = (
    *("libc6", "libmnl0", "libnftnl11", "libxtables12", "libjansson4", "libgmp10", "libgcc-s1", "libtinfo6", "libmd0", "libedit2"),
    *("libbsd0", "libnetfilter-conntrack3", "libnfnetlink0", "libip4tc2", "libip6tc2", "libnftables1", "iptables", "nftables", "conntrack"),
)
# Installed, where they are missing: program -> package.
INSTALLED = {
    "buildah": "buildah",
    "chromium": "chromium",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "setpriv": "util-linux",
    "sysctl": "procps",
}


def kube() -> Path:
    """Return the folder with all Kubernetes programs: links named as in KUBE_NAMES to one binary, built in 7 minutes unless cached."""
    sources = HERE / "kube"

    def make(draft: Path) -> None:
        _go_build(
            sources,
            draft / "kube",
            ldflags=_KUBE_LDFLAGS,
            what=f"Kubernetes {KUBERNETES} from its Go modules (about 7 minutes on two cores, once)",
        )
        for name in KUBE_NAMES:
            (draft / name).symlink_to("kube")

    return cached("kube", content_hash([sources, _KUBE_LDFLAGS], relative_to=sources), make)


def coredns() -> Path:
    """Build CoreDNS from the Go module in this repository, unless the cache has it; return the path of the program."""
    return own_program("coredns", HERE / "coredns", what="CoreDNS (about 90 s, once)")


def pause() -> Path:
    """Build `pause`, which only waits as pid 1 of a pod or of our engine, unless the cache has it; return the path of the program."""
    return own_program("pause", HERE / "pause", what="pause")


def device_driver() -> Path:
    """Build the driver of a pretended device, for tests of resource claims, unless the cache has it; return the path of the program."""
    return own_program("device_driver", HERE / "device_driver", what="the test device's driver (about 30 s, once)")


def helm() -> Path:
    """Find Helm on PATH, or else install its Go module into the cache, and return the program's path."""
    return _found_or_installed("helm", f"helm.sh/helm/v3/cmd/helm@{HELM}", what=f"Helm {HELM} (about 90 s, once)")


def kind() -> Path:
    """Find kind on PATH, or else install its Go module into the cache, and return the program's path."""
    return _found_or_installed("kind", f"sigs.k8s.io/kind@{KIND}", what=f"kind {KIND} (about 30 s, once)")


def syft() -> Path:
    """Return the path of Syft, which lists the parts of a container image: the machine's own, else one built from its Go module.

    Only a release needs it.
    """
    module, its_version = f"github.com/anchore/syft/cmd/syft@{SYFT}", f"-X main.version={SYFT.removeprefix('v')}"
    return _found_or_installed("syft", module, what=f"syft {SYFT} (about 4 minutes, once)", ldflags=its_version)


def containerd() -> Path:
    """Build containerd with Go, unless the cache has it, and return its folder, where `ctr` and the shim for runc are too."""
    of = "github.com/containerd/containerd/v2"
    modules = [f"{of}/cmd/{name}@{CONTAINERD}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")]
    its_version = f"-X {of}/version.Version={CONTAINERD}"
    return _installed("containerd", modules, what=f"containerd {CONTAINERD} (about a minute, once)", ldflags=its_version)


def kind_sources() -> Path:
    """Download the sources of kind as a Go module, unless Go has them, and return their folder; the files of its node image are there."""
    return module_sources("sigs.k8s.io/kind", KIND)


def module_sources(module: str, version: str) -> Path:
    """Download the sources of a Go module, unless Go has them, and return their folder."""
    said = run_quiet([checks.go(), "mod", "download", "-json", f"{module}@{version}"], env=_go_environment(), deadline_s=120)
    return Path(json.loads(said)["Dir"])


def docker() -> Path:
    """Unpack a Docker engine, containerd and runc from Debian packages, unless cached; return their folder, which is like `/`."""
    return _unpacked("docker", DOCKER, what="the Docker engine")


def packet_filters() -> Path:
    """Unpack the Debian packages of iptables, nft and conntrack with their libraries, unless cached, and return their folder.

    It is laid out like `/`, and is the base of kube-proxy's image.
    """
    return _unpacked("packet-filters", PACKET_FILTERS, what="kube-proxy's tools")


def etcd() -> Path:
    """Build etcd, unless cached, and return the program's path. Debian's is too old for options that kubeadm sets."""
    return own_program("etcd", HERE / "etcd", what="etcd (about 2 minutes, once)")


def debian() -> Path:
    """Download Debian's packages of the CNI plugins and a registry, and unpack them in the cache.

    Nothing is installed, so no service starts. Programs are below the returned folder as they would be below `/`, such as in `usr/bin`.
    """
    return _unpacked("debian", UNPACKED, what="CNI plugins and a registry")


def prometheus(program: str = "prometheus") -> Path:
    """Return the path of Prometheus, or of its `promtool`: the machine's own, else Debian's, unpacked into the cache."""
    found = shutil.which(program)
    return Path(found) if found else _unpacked("prometheus", ("prometheus",), what="Prometheus") / "usr/bin" / program


def install_debian_packages(programs: tuple[str, ...]) -> None:
    """Install, by apt-get, the Debian packages of `programs` that this machine lacks. None of their services is started.

    Raises:
        CommandFailed: apt-get failed.
    """
    packages = missing_packages(programs)
    if not packages:
        return
    _apt_update()
    install = ["apt-get", "-q", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", "install", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with locked("apt"), checks.no_services():
        run_logged(install, what=f"apt-get install {' '.join(packages)}", log=log_dir() / "apt-install.log", env=environment)


def missing_packages(programs: tuple[str, ...], path: str = checks.SYSTEM_PATH) -> list[str]:
    """List Debian's packages, sorted, for those of `programs`, all keys of INSTALLED, that no folder in `path` has."""
    return sorted({INSTALLED[p] for p in programs if shutil.which(p, path=path) is None})


def _apt_update() -> None:
    with locked("apt"):
        run_logged(["apt-get", "-q", "update"], what="apt-get update", log=log_dir() / "apt-update.log")


def _unpacked(name: str, packages: tuple[str, ...], *, what: str) -> Path:
    def make(draft: Path) -> None:
        apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root"]
        _apt_update()
        run_logged([*apt, "download", *packages], what=f"download of {what}", log=log_dir() / "apt-download.log", cwd=draft)
        for package in draft.glob("*.deb"):
            run_logged(["dpkg", "-x", package, draft], what=f"unpack {package.name}", log=log_dir() / "dpkg.log")
            package.unlink()

    return cached(name, content_hash([*packages], relative_to=HERE), make)


def own_program(name: str, sources: Path, *, what: str) -> Path:
    """Build the Go program in a folder of this repository, unless the cache has it; return the path of the program.

    `what` names it in progress messages.
    """
    folder = cached(
        name, content_hash([sources], relative_to=sources), lambda draft: _go_build(sources, draft / name, ldflags="-s -w", what=what)
    )
    return folder / name


def _found_or_installed(name: str, module: str, *, what: str, ldflags: str = "") -> Path:
    found = shutil.which(name)
    return Path(found) if found else _installed(name, [module], what=what, ldflags=ldflags) / name


def _installed(name: str, modules: list[str], *, what: str, ldflags: str = "") -> Path:
    def make(draft: Path) -> None:
        environment = {**_go_environment(), "GOBIN": str(draft)}
        argv = [checks.go(), "install", "-trimpath", "-ldflags", f"-s -w {ldflags}", *modules]
        run_logged(argv, what=what, log=log_dir() / f"{name}.log", env=environment)

    return cached(name, content_hash([*modules], relative_to=HERE), make)


def _go_build(sources: Path, target: Path, *, ldflags: str, what: str) -> None:
    argv = [checks.go(), "build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", str(target), "."]
    run_logged(argv, what=what, log=log_dir() / f"{target.name}.log", env=_go_environment(), cwd=sources)


def _go_environment() -> dict[str, str]:
    # Without cgo the programs are static: they run in an empty image too. Their debugging data, which the linker drops, cost an eighth
    # of the compiler's time.
    flags = f"{os.environ.get('GOFLAGS', '')} -gcflags=all=-dwarf=false".strip()
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": flags}
