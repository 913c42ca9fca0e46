# SPDX-License-Identifier: Apache-2.0
"""The structs of sources for models and adapters, with the same JSON everywhere."""

import msgspec


class _Source(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    pass


class SecretKey(_Source, frozen=True):
    """A key of a Secret, which is a file of the secrets folder: `<secrets>/<name>/<key>`."""

    name: str
    key: str = "token"


class SecretName(_Source, frozen=True):
    """A Secret with the keys `accessKeyId` and `secretAccessKey`, and perhaps `sessionToken`."""

    name: str


class HuggingFaceSource(_Source, frozen=True):
    """A repository of a hub. A model is the folder at `subfolder`, or without it the top. An adapter is such a folder, or a `file` there.

    `allow_patterns` choose among a folder's files.
    """

    repo: str
    revision: str = "main"
    file: str | None = None
    subfolder: str | None = None
    allow_patterns: list[str] = []
    token_secret_ref: SecretKey | None = None


class S3Source(_Source, frozen=True):
    """A file at `s3://bucket/key`, or with a trailing slash a folder."""

    uri: str
    endpoint: str | None = None
    region: str | None = None
    credentials_secret_ref: SecretName | None = None


class PvcSource(_Source, frozen=True):
    """A file or folder on a claim, which is a folder of the claims folder: `<claims>/<claimName>/<path>`."""

    claim_name: str
    path: str


class HttpSource(_Source, frozen=True):
    """A file at an https (or, where the worker allows it, http) address, with the digest it must have: 64 hexadecimal digits."""

    url: str
    sha256: str


class Source(_Source, frozen=True):
    """A source of a model or an adapter: exactly one of the members is set, else ValueError."""

    path: str | None = None
    hugging_face: HuggingFaceSource | None = None
    s3: S3Source | None = None
    pvc: PvcSource | None = None
    http: HttpSource | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of path, huggingFace, s3, pvc and http, found {' and '.join(given) or 'none'}")
