# SPDX-License-Identifier: Apache-2.0
"""Parts of a pod that a spec may add to a replica's, under Kubernetes' own names: variables, volumes, mounts, privileges.

Fields that nobody set are left out again when a part is rendered.
"""

from enum import StrEnum

import msgspec


class _Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    pass


class KeyReference(_Part, frozen=True):
    """A key of a Secret or ConfigMap."""

    name: str
    key: str
    optional: bool | None = None


class FieldReference(_Part, frozen=True):
    field_path: str


class EnvSource(_Part, frozen=True):
    """Origin of a variable's value: a key of a ConfigMap or Secret, or a field of the pod. The schema demands exactly one."""

    config_map_key_ref: KeyReference | None = None
    secret_key_ref: KeyReference | None = None
    field_ref: FieldReference | None = None


class EnvVar(_Part, frozen=True):
    name: str
    value: str = ""
    value_from: EnvSource | None = None


class EnvOrigin(_Part, frozen=True):
    name: str
    optional: bool | None = None


class EnvFrom(_Part, frozen=True):
    """All keys of one ConfigMap or Secret as variables of the container; the schema demands exactly one of the two."""

    prefix: str | None = None
    config_map_ref: EnvOrigin | None = None
    secret_ref: EnvOrigin | None = None


class KeyToPath(_Part, frozen=True):
    key: str
    path: str
    mode: int | None = None


class ConfigMapVolume(_Part, frozen=True):
    name: str
    items: tuple[KeyToPath, ...] = ()
    default_mode: int | None = None
    optional: bool | None = None


class SecretVolume(_Part, frozen=True):
    secret_name: str
    items: tuple[KeyToPath, ...] = ()
    default_mode: int | None = None
    optional: bool | None = None


class ClaimVolume(_Part, frozen=True):
    claim_name: str
    read_only: bool | None = None


class Medium(StrEnum):
    DEFAULT = ""
    MEMORY = "Memory"


class EmptyDirVolume(_Part, frozen=True):
    medium: Medium | None = None
    size_limit: int | str | None = None


class CsiVolume(_Part, frozen=True):
    driver: str
    read_only: bool | None = None
    fs_type: str | None = None
    volume_attributes: dict[str, str] = {}


class HostPathType(StrEnum):
    ANY = ""
    DIRECTORY = "Directory"
    DIRECTORY_OR_CREATE = "DirectoryOrCreate"
    FILE = "File"
    SOCKET = "Socket"
    CHAR_DEVICE = "CharDevice"
    BLOCK_DEVICE = "BlockDevice"


class HostPathVolume(_Part, frozen=True):
    path: str
    type: HostPathType | None = None


class ExtraVolume(_Part, frozen=True):
    """A volume that a spec adds to the pods. The schema demands exactly one member beside `name`."""

    name: str
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyDirVolume | None = None
    csi: CsiVolume | None = None
    host_path: HostPathVolume | None = None


class VolumeMount(_Part, frozen=True):
    name: str
    mount_path: str
    sub_path: str | None = None
    read_only: bool | None = None


class Capabilities(_Part, frozen=True):
    add: tuple[str, ...] = ()


class ContainerSecurity(_Part, frozen=True):
    """Privileges of the worker's container beyond the restricted profile."""

    privileged: bool | None = None
    capabilities: Capabilities = Capabilities()
