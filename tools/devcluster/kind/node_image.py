# SPDX-License-Identifier: Apache-2.0
"""The image of kind's nodes: `kind build` from our own parts, since it would pull what no module and no Debian package has.

kind is pinned, because 0.33 warns that a later version refuses cgroup v1, and some machines of this project have no other. The base is
Debian bookworm for the same reason: the systemd of kind's own base gave cgroup v1 up.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from .. import programs
from ..cache import cached, content_hash
from ..errors import CommandFailed
from ..images import BASE_SUITE
from ..paths import HERE, cache_dir, log_dir
from ..progress import run_logged, run_quiet, step
from . import kube_images
from .engine import Engine, docker

_PACKAGES = (
    "systemd,dbus,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,pigz,e2fsprogs,bash,"
    "ca-certificates,curl,jq,procps,runc"
)
_ENTRYPOINT = 'ENTRYPOINT ["/usr/local/bin/entrypoint","/sbin/init"]'
_CONTAINER = "devcluster-node-image"
# Folders of kind's files that go into the base as they are.
_FILES = ("etc", "etc/containerd", "etc/default", "etc/sysctl.d", "etc/systemd/system", "etc/systemd/system/kubelet.service.d", "kind")
# Units that make no sense in a container go, as kind's own Dockerfile has it.
_SET_UP_BASE = r"""
cd /lib/systemd/system
rm -f sysinit.target.wants/systemd-tmpfiles-setup.service multi-user.target.wants/* /etc/systemd/system/*.wants/*
rm -f local-fs.target.wants/* sockets.target.wants/*udev* sockets.target.wants/*initctl* basic.target.wants/*
echo ReadKMsg=no >> /etc/systemd/journald.conf
ln -sf /lib/systemd/systemd /sbin/init
systemctl enable kubelet.service containerd.service undo-mount-hacks.service
systemctl mask systemd-binfmt.service
mkdir -p /etc/kubernetes/manifests
ctr oci spec | jq '.hooks.createContainer[.hooks.createContainer| length] |= . + {"path": "/kind/bin/mount-product-files.sh"}' \
  | jq 'del(.process.rlimits)' > /etc/containerd/cri-base.json
rm -rf /var/cache/debconf/* /var/cache/apt/* /var/lib/apt/lists/* /var/log/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/*
"""
# No oom_score_adj below a container's own, which takes CAP_SYS_RESOURCE; images named localhost/… come from the registry by the engine.
_SET_UP_NODE = """
chown root:root /usr/bin/kube; chmod 755 /usr/bin/kube
for name in kubeadm kubelet kubectl crictl cri-pull; do ln -sf kube /usr/bin/$name; done
printf "v$KUBERNETES" > /kind/version; mkdir -p /kind/manifests /etc/containerd/certs.d/localhost
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' /etc/containerd/config.toml
printf '\\n[plugins."io.containerd.grpc.v1.cri".registry]\\n  config_path = "/etc/containerd/certs.d"\\n' >> /etc/containerd/config.toml
printf 'server = "http://%s"\\n' "$REGISTRY" > /etc/containerd/certs.d/localhost/hosts.toml
nohup containerd > /tmp/containerd.log 2>&1 &
for _ in $(seq 100); do ctr version > /dev/null 2>&1 && exit; sleep 0.1; done; cat /tmp/containerd.log; exit 1
"""


def reference(registry: str) -> str:
    """Return the image's name, tagged with the hash of all that goes in: kind's version, packages, programs and these scripts.

    Images named localhost/… come from `registry`, a host with a port.

    The programs are built first if the cache lacks them.
    """
    made = [program.relative_to(cache_dir()) for program in (*_programs(), programs.packet_filters(), _root_archive())]
    scripts = [HERE / "kind/node_image.py", HERE / "kind/kube_images.py"]
    key = content_hash([*map(str, made), registry, *scripts], relative_to=HERE)
    return f"localhost/kind-node:{key}"


def build(engine: Engine, registry: str) -> str:
    """Build the image of kind's nodes unless the engine, which must run, has one of this content; return its name.

    After a build, all other images of the engine but the base are removed.
    """
    name = reference(registry)
    if _exists(engine, name):
        return name
    base = _base(engine)
    with step("kind: image of its nodes (about 30 s, once)"):
        _remove_container(engine)
        try:
            _fill(engine, base, registry)
            docker(engine, "commit", "--change", _ENTRYPOINT, _CONTAINER, name, deadline_s=180)
        finally:
            _remove_container(engine)
    for older in set(docker(engine, "images", "--format", "{{.Repository}}:{{.Tag}}").split()) - {name, base}:
        docker(engine, "rmi", "--force", older)
    return name


def prepare() -> None:
    """Make the parts of the image that need no engine, unless the cache has them: programs and Debian's files."""
    _programs()
    programs.packet_filters()
    _root_archive()


def _programs() -> tuple[Path, ...]:
    return (programs.kube(), programs.coredns(), programs.etcd(), programs.pause(), programs.containerd())


def _fill(engine: Engine, base: str, registry: str) -> None:
    archive = cache_dir() / "kind-images.tar"
    names = run_quiet([programs.kube() / "kubeadm", "config", "images", "list", "--kubernetes-version", f"v{programs.KUBERNETES}"]).split()
    cni = (programs.kind_sources() / "pkg/build/nodeimage/const_cni.go").read_text()
    kindnetd = _found(r'const kindnetdImage = "(.+)"', cni)
    sandbox = _found(r'sandbox_image = "(.+)"', (programs.kind_sources() / "images/base/files/etc/containerd/config.toml").read_text())
    kube_images.write([*dict.fromkeys([*names, sandbox, kindnetd])], archive)
    docker(engine, "run", "--detach", "--entrypoint=sleep", "--name", _CONTAINER, "--security-opt=seccomp=unconfined", base, "infinity")
    docker(engine, "cp", programs.kube() / "kube", f"{_CONTAINER}:/usr/bin/kube")
    _run(engine, f"KUBERNETES={programs.KUBERNETES}\nREGISTRY={registry}\n{_SET_UP_NODE}")
    # kind's own manifest. Without one of a storage class, kind makes its older default, which provisions nothing.
    manifest = _found(r"(?s)const defaultCNIManifest = `\n(.+?)\n`\n", cni).replace("` + kindnetdImage + `", kindnetd)
    docker(engine, "exec", "--interactive", _CONTAINER, "cp", "/dev/stdin", "/kind/manifests/default-cni.yaml", stdin=manifest)
    docker(engine, "cp", archive, f"{_CONTAINER}:/images.tar")
    archive.unlink()
    _run(engine, "ctr --namespace=k8s.io images import --all-platforms --no-unpack --digests /images.tar; rm /images.tar", deadline_s=180)
    _run(engine, "kill $(cat /proc/[0-9]*/stat | awk '$2 == \"(containerd)\" {print $1; exit}'); sleep 1; rm -f /tmp/containerd.log")


def _run(engine: Engine, script: str, *, deadline_s: float = 60.0) -> None:
    docker(engine, "exec", "--interactive", _CONTAINER, "bash", "-eu", stdin=script, deadline_s=deadline_s)


def _remove_container(engine: Engine) -> None:
    words = ["docker", "rm", "--force", "--volumes", _CONTAINER]
    subprocess.run(words, env=engine.environment(), capture_output=True, timeout=60)


def _exists(engine: Engine, name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], env=engine.environment(), capture_output=True, timeout=60).returncode == 0


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise CommandFailed(f"expected {pattern!r} in the sources of kind {programs.KIND}; it is not there")
    return match[1]


def _base(engine: Engine) -> str:
    """Import Debian with systemd and kind's files as an image, unless the engine has it; return its name."""
    archive = _root_archive()
    name = f"localhost/kind-base:{archive.parent.name.rpartition('-')[2]}"
    if not _exists(engine, name):
        with step("kind: base image"):
            docker(engine, "import", "--change=ENV container=docker", f"--change={_ENTRYPOINT}", archive, name, deadline_s=300)
    return name


def _root_archive() -> Path:
    key = content_hash([programs.KIND, programs.CONTAINERD, BASE_SUITE, _PACKAGES, _SET_UP_BASE, *_FILES], relative_to=HERE)
    return cached("kind-root", key, _make_root) / "root.tar"


def _make_root(draft: Path) -> None:
    programs.install_debian_packages(("debootstrap",))
    root = draft / "root"
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words: list[str | Path] = [*apart, "debootstrap", "--variant=minbase", f"--include={_PACKAGES}", BASE_SUITE, root]
    run_logged(words, what="Debian for kind's nodes (about 2 minutes, once)", log=log_dir() / "kind-debootstrap.log")
    files = programs.kind_sources() / "images/base/files"
    for folder in _FILES:
        _copy(files / folder, root / folder, mode=0o644)
    for folder in ("usr/local/bin", "kind/bin"):
        _copy(files / folder, root / folder, mode=0o755)
    _copy(programs.containerd(), root / "usr/local/bin", mode=0o755)
    plugins = programs.debian() / "usr/lib/cni"
    _copy(plugins, root / "opt/cni/bin", mode=0o755, names=("host-local", "loopback", "ptp", "portmap", "bridge"))
    (root / "usr/local/sbin/runc").symlink_to("/usr/sbin/runc")
    run_quiet([*apart, "chroot", root, "sh", "-e"], stdin=_SET_UP_BASE)
    pack: list[str | Path] = ["tar", "-C", root, "--numeric-owner", "-cf", draft / "root.tar", "."]
    run_logged(pack, what="archive of kind's base", log=log_dir() / "tar.log")
    shutil.rmtree(root)


def _copy(source: Path, target: Path, *, mode: int, names: tuple[str, ...] = ()) -> None:
    """Copy the files directly in a folder, not those of its subfolders, and set their mode; with `names` only the files of these names."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and (not names or file.name in names):
            shutil.copyfile(file, target / file.name)
            (target / file.name).chmod(mode)
