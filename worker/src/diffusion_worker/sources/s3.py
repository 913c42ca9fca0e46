# SPDX-License-Identifier: Apache-2.0
"""Sources of kind s3, through obstore: it signs addresses and lists folders; the files come through our own download.

So the address of every file is checked when it is connected to. A listing is made by obstore's own client, which resolves
names by itself, so it goes through a relay that checks them.
"""

import re
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import httpx2
import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.downloading import Interrupted, RemoteFile, raise_for_status
from diffusion_worker.sources.file_cache import key_of
from diffusion_worker.sources.job import ArtifactKind
from diffusion_worker.sources.mounted_secrets import read_optional_secret, read_secret
from diffusion_worker.sources.relay import relay
from diffusion_worker.sources.resolving import ResolveContext, Resolved
from diffusion_worker.sources.selection import ADAPTER_WEIGHTS, adapter_files, model_files, single_adapter
from diffusion_worker.sources.source import S3Source
from diffusion_worker.sources.transport_rules import allowed_addresses, require_scheme

if TYPE_CHECKING:
    from obstore.store import S3Config

DEFAULT_REGION = "us-east-1"
REGION = re.compile(r"[A-Za-z0-9-]+")
LIST_TIMEOUT_S = 30
# Longest life of a signature in seconds: a week is the most that S3 accepts.
MAX_SIGNED_S = 7 * 86_400


def resolve_s3(source: S3Source, question: ResolveContext) -> Resolved:
    """List the files to fetch: those of an adapter or model below a key that is empty or ends with a slash, else the object.

    An object's revision is its version or ETag. A folder's is a hash over names and ETags.

    Raises:
        RequestError: SourceNotFound, SourceUnauthorized, SecretMissing, NetworkError, UnsupportedFormat, InvalidAdapter, InvalidRequest,
            TooLarge.
    """
    bucket = Bucket(source, question)
    if bucket.key and not bucket.key.endswith("/"):
        if question.wanted is ArtifactKind.MODEL:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"{bucket.address}: expected a slash at the end of the address, as a model is a folder"
            )
        single_adapter(bucket.key, bucket.address)
        file, revision = bucket.object()
        return Resolved(files={ADAPTER_WEIGHTS: file}, revision=revision, folder=False)
    objects = bucket.list()
    choose = adapter_files if question.wanted is ArtifactKind.ADAPTER else model_files
    files = {name: bucket.remote(objects[path]) for name, path in choose(list(objects), bucket.address).items()}
    state = key_of(*(f"{name} {file.etag}" for name, file in sorted(files.items())))
    return Resolved(files=files, revision=f"etags-{state[:16]}", folder=question.wanted is ArtifactKind.MODEL or len(files) > 1)


class Bucket:
    """The bucket and key of an `s3://` address, with endpoint and credentials. The constructor checks them; it may raise RequestError."""

    def __init__(self, source: S3Source, question: ResolveContext) -> None:
        parts = urlsplit(source.uri)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"source.s3.uri: expected s3://bucket/key, found {source.uri[:200]!r}")
        self.address = f"{question.artifact}: {source.uri}"
        self.key = parts.path.lstrip("/")
        self._name = parts.netloc
        self._client = question.client
        self._expires = timedelta(seconds=min(question.deadline_s + 60, MAX_SIGNED_S))
        region = source.region or DEFAULT_REGION
        if source.endpoint is None and not REGION.fullmatch(region):
            raise RequestError(ErrorCode.INVALID_REQUEST, "source.s3.region: expected a region of letters, digits and '-'")
        self._endpoint = (source.endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/")
        _check_endpoint(self._endpoint, question)
        settings = _settings(source, question)
        self._signed = "access_key_id" in settings
        self._reach, self._allow_http = question.reach, question.allow_http
        self._config: S3Config = {**settings, "endpoint": self._endpoint, "region": region, "virtual_hosted_style_request": False}
        # This store only signs, and opens no connection.
        self._store = S3Store(self._name, config=self._config, client_options={"allow_http": question.allow_http})

    def list(self) -> dict[str, Any]:
        """Return obstore's metadata of all objects below the key, by their paths below it; raise RequestError, also if there are none."""
        try:
            with relay(self._reach, allow_http=self._allow_http) as proxy:
                found = obstore.list(self._listing_store(proxy), self.key or None).collect()
        except (UnauthenticatedError, PermissionDeniedError):
            raise RequestError(
                ErrorCode.SOURCE_UNAUTHORIZED, f"{self.address}: credentials for the bucket are missing or insufficient"
            ) from None
        except FileNotFoundError:
            raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{self.address}: there is no such bucket") from None
        except (BaseError, OSError) as error:
            # The error's text repeats the answer, which may name the access key.
            raise RequestError(ErrorCode.NETWORK_ERROR, f"{self.address}: the bucket cannot be listed ({type(error).__name__})") from None
        if not found:
            raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{self.address}: the bucket has no object below this address")
        return {meta["path"].removeprefix(self.key): meta for meta in found}

    def _listing_store(self, proxy: str) -> S3Store:
        timeout = timedelta(seconds=LIST_TIMEOUT_S)
        return S3Store(
            self._name,
            config=self._config,
            client_options={"allow_http": self._allow_http, "timeout": timeout, "proxy_url": proxy},
            retry_config={"max_retries": 2, "retry_timeout": timeout},
        )

    def object(self) -> tuple[RemoteFile, str | None]:
        """Ask for the key's metadata by HEAD; return a file to download, and its version, else its ETag, else None.

        Raises:
            RequestError: SourceNotFound, SourceUnauthorized, NetworkError.
        """
        try:
            answer = self._client.head(self._url("HEAD", self.key))
            if answer.status_code != HTTPStatus.OK:
                raise_for_status(answer, self.address)
        except Interrupted as error:
            raise RequestError(ErrorCode.NETWORK_ERROR, f"{self.address}: {error}") from None
        except httpx2.HTTPError as error:
            raise RequestError(
                ErrorCode.NETWORK_ERROR, f"{self.address}: the object's host cannot be reached ({type(error).__name__})"
            ) from None
        etag, version = answer.headers.get("etag"), answer.headers.get("x-amz-version-id")
        length = answer.headers.get("content-length", "")
        meta = {"path": self.key, "e_tag": etag, "size": int(length) if length.isdecimal() else None}
        return self.remote(meta), version if version not in (None, "null") else (etag or "").strip('"') or None

    def remote(self, meta: Any) -> RemoteFile:
        """Describe an object by its metadata for the download; the identity changes with its ETag or size.

        The address is signed if there are credentials, for a minute beyond the fetch's deadline, though never more than a week.
        """
        identity = f"{self._endpoint} {self._name} {meta['path']} {meta['e_tag']} {meta['size']}"
        label = f"{self.address}: {meta['path']}" if meta["path"] != self.key else self.address
        return RemoteFile(url=self._url("GET", meta["path"]), label=label, identity=identity, size=meta["size"], etag=meta["e_tag"])

    def _url(self, method: Any, path: str) -> str:
        if self._signed:
            return obstore.sign(self._store, method, path, self._expires)
        return f"{self._endpoint}/{self._name}/{quote(path)}"


def _settings(source: S3Source, question: ResolveContext) -> "S3Config":
    """Read access key, secret key and an optional session token from the mounted Secret; without a Secret, turn signatures off.

    Raises:
        RequestError: SecretMissing, InvalidRequest.
    """
    if source.credentials_secret_ref is None:
        return {"skip_signature": True}
    name = source.credentials_secret_ref.name
    settings: S3Config = {
        "access_key_id": read_secret(question.secrets, name, "accessKeyId"),
        "secret_access_key": read_secret(question.secrets, name, "secretAccessKey"),
    }
    if token := read_optional_secret(question.secrets, name, "sessionToken"):
        settings["session_token"] = token
    return settings


def _check_endpoint(endpoint: str, question: ResolveContext) -> None:
    refused = RequestError(
        ErrorCode.INVALID_REQUEST, "source.s3.endpoint: expected https://host or https://host:port, without a user's name"
    )
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refused from None
    if not host or parts.username is not None or parts.query:
        raise refused
    require_scheme(parts.scheme, allow_http=question.allow_http)
    allowed_addresses(host, port or (443 if parts.scheme == "https" else 80), question.reach)
