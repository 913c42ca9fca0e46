# SPDX-License-Identifier: Apache-2.0
"""Sources of models and adapters: unions of which the schema demands exactly one member, in the same JSON as the worker's own.

The operator fetches nothing and reads no user's Secret: it hands these on, mounts what they name, and compares them by `identity`.
"""

import msgspec


class _Source(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    pass


class SecretKeyRef(_Source, frozen=True):
    name: str
    key: str = "token"


class SecretRef(_Source, frozen=True):
    name: str


class AdapterRepository(_Source, frozen=True):
    """A `.safetensors` file of a hub's repository, or a peft folder in it."""

    repo: str
    revision: str = "main"
    file: str | None = None
    subfolder: str | None = None
    token_secret_ref: SecretKeyRef | None = None


class ModelRepository(_Source, frozen=True):
    """A hub's repository as a whole, or what of it the patterns let through."""

    repo: str
    revision: str = "main"
    allow_patterns: tuple[str, ...] = ()
    token_secret_ref: SecretKeyRef | None = None


class S3Source(_Source, frozen=True):
    uri: str
    endpoint: str | None = None
    region: str | None = None
    credentials_secret_ref: SecretRef | None = None


class PvcSource(_Source, frozen=True):
    claim_name: str
    path: str


class HttpSource(_Source, frozen=True):
    url: str
    sha256: str


class ModelSource(_Source, frozen=True):
    """The place from which a model is loaded; exactly one member is set.

    There is no `http`, which serves single files: a model is a folder.
    """

    path: str | None = None
    hugging_face: ModelRepository | None = None
    s3: S3Source | None = None
    pvc: PvcSource | None = None


class AdapterSource(_Source, frozen=True):
    path: str | None = None
    hugging_face: AdapterRepository | None = None
    s3: S3Source | None = None
    pvc: PvcSource | None = None
    http: HttpSource | None = None


def identity(source: ModelSource | AdapterSource) -> str:
    """Return a line that identifies the content to fetch. Secrets and the query of an address, which may be a signature, are left out."""
    if source.hugging_face is not None:
        return _repository(source.hugging_face)
    if source.s3 is not None:
        return source.s3.uri + (f" at {source.s3.endpoint}" if source.s3.endpoint else "")
    if source.pvc is not None:
        return f"pvc://{source.pvc.claim_name}/{source.pvc.path}"
    if isinstance(source, AdapterSource) and source.http is not None:
        # Not by urlsplit, which raises for some: an address that is none is the worker's to refuse.
        scheme, _, rest = source.http.url.partition("?")[0].partition("#")[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}#sha256:{source.http.sha256}"
    return source.path or ""


def _repository(source: AdapterRepository | ModelRepository) -> str:
    inside = (source.file or source.subfolder) if isinstance(source, AdapterRepository) else ",".join(source.allow_patterns)
    return f"hf://{source.repo}@{source.revision}" + (f"/{inside}" if inside else "")


def secret_of(source: ModelSource | AdapterSource) -> str | None:
    """Return the name of the Secret with the source's credentials; None if the source names none."""
    if source.hugging_face is not None and source.hugging_face.token_secret_ref is not None:
        return source.hugging_face.token_secret_ref.name
    if source.s3 is not None and source.s3.credentials_secret_ref is not None:
        return source.s3.credentials_secret_ref.name
    return None


def claim_of(source: ModelSource | AdapterSource) -> str | None:
    """Return the name of the PersistentVolumeClaim that holds the source; None if it lies elsewhere."""
    return source.pvc.claim_name if source.pvc is not None else None
