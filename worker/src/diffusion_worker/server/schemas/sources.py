# SPDX-License-Identifier: Apache-2.0
"""Sources of adapters in the control port's bodies: exactly one kind of source, each with its own fields.

Only the form is checked here. The package of sources checks the addresses that a worker may reach, and the content found there.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from diffusion_worker.sources.source import HttpSource, HuggingFaceSource, PvcSource, S3Source, SecretKey, SecretName, Source

NAME_PATTERN = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
KEY_PATTERN = r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$"
REPO_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$"
S3_PATTERN = r"^s3://[^/]+/.+$"
URL_PATTERN = r"^https?://[^/]+/.*$"
SHA256_PATTERN = r"^[0-9a-f]{64}$"
WEIGHTS_PATTERN = r"^[^/].*\.safetensors$"
SOURCE_FORMS = {
    NAME_PATTERN: "a name of a-z, 0-9, '.' and '-', first and last a letter or digit",
    KEY_PATTERN: "a key of letters, digits, '.', '_' and '-'",
    REPO_PATTERN: "OWNER/NAME",
    S3_PATTERN: "s3://BUCKET/KEY",
    URL_PATTERN: "an address such as https://HOST/PATH",
    SHA256_PATTERN: "64 hexadecimal digits with small letters",
    WEIGHTS_PATTERN: "a relative path that ends in .safetensors",
}
MEMBERS = ("path", "hugging_face", "s3", "pvc", "http")

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=253)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]


class ControlBody(BaseModel):
    """Settings that the bodies of the control port's own routes share: camelCase names, strict types, and an error for an unknown field.

    Bodies of vLLM's routes do not extend it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class SecretKeyBody(ControlBody):
    """A key of a Secret that is mounted in the worker."""

    name: Name
    key: Annotated[str, Field(pattern=KEY_PATTERN, max_length=253)] = "token"


class SecretNameBody(ControlBody):
    """A Secret that is mounted in the worker."""

    name: Name


class HuggingFaceBody(ControlBody):
    """A repository of a hub: one `file` of it, or the peft folder at `subfolder`."""

    repo: Annotated[str, Field(pattern=REPO_PATTERN, max_length=200)]
    revision: Annotated[str, Field(min_length=1, max_length=100)] = "main"
    file: Annotated[str | None, Field(pattern=WEIGHTS_PATTERN, max_length=1024)] = None
    subfolder: Text | None = None
    allow_patterns: Annotated[list[Text], Field(default_factory=list, max_length=32)]
    token_secret_ref: SecretKeyBody | None = None


class S3Body(ControlBody):
    """A file in a bucket, or a folder if the URI ends with a slash."""

    uri: Annotated[str, Field(pattern=S3_PATTERN, max_length=1024)]
    endpoint: Annotated[str | None, Field(pattern=r"^https?://.+$", max_length=1024)] = None
    region: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    credentials_secret_ref: SecretNameBody | None = None


class PvcBody(ControlBody):
    """A file or folder on a claim that is mounted in the worker."""

    claim_name: Name
    path: Text


class HttpBody(ControlBody):
    """A file at an address, with the digest it must have."""

    url: Annotated[str, Field(pattern=URL_PATTERN, max_length=2048)]
    sha256: Annotated[str, Field(pattern=SHA256_PATTERN)]


class SourceBody(ControlBody):
    """A source of an adapter, given by exactly one field. `path` names a peft folder or safetensors file that the worker can read."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    path: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    hugging_face: HuggingFaceBody | None = None
    s3: S3Body | None = None
    pvc: PvcBody | None = None
    http: HttpBody | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "SourceBody":
        given = [to_camel(name) for name in MEMBERS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise PydanticCustomError(
                "one_source", "expected exactly one of path, huggingFace, s3, pvc and http; found {found}", {"found": found}
            )
        return self

    def source(self) -> Source:
        """Convert the member that is set to the engine's `Source`; a validator has made sure that there is exactly one."""
        return Source(
            path=self.path,
            hugging_face=_hugging_face(self.hugging_face) if self.hugging_face else None,
            s3=_s3(self.s3) if self.s3 else None,
            pvc=PvcSource(**self.pvc.model_dump()) if self.pvc else None,
            http=HttpSource(**self.http.model_dump()) if self.http else None,
        )


def _hugging_face(body: HuggingFaceBody) -> HuggingFaceSource:
    fields: dict[str, Any] = body.model_dump(exclude={"token_secret_ref"})
    secret = body.token_secret_ref
    return HuggingFaceSource(**fields, token_secret_ref=SecretKey(secret.name, secret.key) if secret else None)


def _s3(body: S3Body) -> S3Source:
    secret = body.credentials_secret_ref
    return S3Source(body.uri, body.endpoint, body.region, SecretName(secret.name) if secret else None)
