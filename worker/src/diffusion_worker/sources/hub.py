# SPDX-License-Identifier: Apache-2.0
"""Sources of kind huggingFace, through the hub library's own client; its `HF_ENDPOINT` names another hub.

The library lists the files of a revision and their addresses; the files come through our own download, like those of all kinds.
"""

from http import HTTPStatus
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.downloading import RemoteFile
from diffusion_worker.sources.job import ArtifactKind
from diffusion_worker.sources.mounted_secrets import read_secret
from diffusion_worker.sources.resolving import ResolveContext, Resolved
from diffusion_worker.sources.selection import ADAPTER_WEIGHTS, adapter_files, model_files, single_adapter
from diffusion_worker.sources.source import HuggingFaceSource


def resolve_hub(source: HuggingFaceSource, question: ResolveContext) -> Resolved:
    """Ask the hub for a revision's commit and file list, choose the files that are wanted, and return their addresses at that commit.

    Raises:
        RequestError: SourceNotFound, SourceUnauthorized, SecretMissing, NetworkError, UnsupportedFormat, InvalidAdapter, InvalidRequest,
            TooLarge.
    """
    secret = source.token_secret_ref
    # False and not None: with None the library would look for a token of this machine's user.
    token: str | bool = read_secret(question.secrets, secret.name, secret.key) if secret else False
    what = f"{question.what}: hub {source.repo}@{source.revision}"
    huggingface_hub.set_client_factory(lambda: question.client)
    info = _ask(huggingface_hub.HfApi(token=token), source, what)
    commit = str(info.sha or "")
    if not commit:
        raise RequestError(ErrorCode.NETWORK_ERROR, f"{what}: expected the commit of the revision, found none")
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    chosen = _choose(source, list(siblings), question.wanted, what)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    files = {name: _remote(source.repo, commit, siblings[path], headers=headers, what=f"{what}: {path}") for name, path in chosen.items()}
    return Resolved(files=files, revision=commit, folder=question.wanted is ArtifactKind.MODEL or len(files) > 1)


def _ask(api: huggingface_hub.HfApi, source: HuggingFaceSource, what: str) -> Any:
    try:
        return api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=30.0)
    except HFValidationError:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{what}: expected a repository as org/name") from None
    except HfHubHTTPError as error:
        raise _refusal(error, what) from None
    except httpx2.HTTPError as error:
        raise RequestError(ErrorCode.NETWORK_ERROR, f"{what}: the hub cannot be reached ({type(error).__name__})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RequestError(ErrorCode.NETWORK_ERROR, f"{what}: expected a hub's answer in JSON, found another form") from None


def _refusal(error: HfHubHTTPError, what: str) -> RequestError:
    """Return an error by the answer's status: SourceUnauthorized for 401 and 403, SourceNotFound for 404, NetworkError for any other.

    The exception's own text is dropped, since it has the request in it.
    """
    status = error.response.status_code
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        why = "the repository does not exist, or the token (tokenSecretRef) is missing or may not read it"
        return RequestError(ErrorCode.SOURCE_UNAUTHORIZED, f"{what}: the hub answered {status}: {why}")
    if status == HTTPStatus.NOT_FOUND:
        return RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{what}: the hub has no such repository or revision")
    return RequestError(ErrorCode.NETWORK_ERROR, f"{what}: the hub answered {status}")


def _choose(source: HuggingFaceSource, paths: list[str], wanted: ArtifactKind, what: str) -> dict[str, str]:
    """Choose the files to fetch, and return their paths in the repository by local name.

    Raises:
        RequestError: SourceNotFound for a missing `file` or `subfolder`; see also `adapter_files` and `model_files`.
    """
    prefix = f"{source.subfolder.strip('/')}/" if source.subfolder else ""
    if wanted is ArtifactKind.ADAPTER and source.file is not None:
        path = prefix + source.file
        single_adapter(path, what)
        if path not in paths:
            raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{what}: there is no file {path!r}")
        return {ADAPTER_WEIGHTS: path}
    names = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
    if prefix and not names:
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{what}: there is no folder {source.subfolder!r}")
    choose = adapter_files if wanted is ArtifactKind.ADAPTER else model_files
    return {name: prefix + path for name, path in choose(names, what, patterns=source.allow_patterns).items()}


def _remote(repo: str, commit: str, sibling: Any, *, headers: dict[str, str], what: str) -> RemoteFile:
    lfs = sibling.lfs
    url = huggingface_hub.hf_hub_url(repo, sibling.rfilename, revision=commit)
    return RemoteFile(
        url=url,
        what=what,
        identity=f"{url} {sibling.blob_id}",
        size=lfs.size if lfs else sibling.size,
        sha256=lfs.sha256 if lfs else None,
        headers=headers,
    )
