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
    repository = f"{question.artifact}: hub {source.repo}@{source.revision}"
    huggingface_hub.set_client_factory(lambda: question.client)
    info = _ask(huggingface_hub.HfApi(token=token), source, repository)
    commit = str(info.sha or "")
    if not commit:
        raise RequestError(ErrorCode.NETWORK_ERROR, f"{repository}: expected the commit of the revision in the hub's answer, found none")
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    chosen = _choose(source, list(siblings), question.wanted, repository)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    files = {
        name: _remote(source.repo, commit, siblings[path], headers=headers, label=f"{repository}: {path}") for name, path in chosen.items()
    }
    return Resolved(files=files, revision=commit, folder=question.wanted is ArtifactKind.MODEL or len(files) > 1)


def _ask(api: huggingface_hub.HfApi, source: HuggingFaceSource, repository: str) -> Any:
    try:
        return api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=30.0)
    except HFValidationError:
        rule = "letters, digits, -, _ and ., at most 96 of them, without -- and .., no - or . at either end, and no .git at the end"
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{repository}: expected org/name of {rule}") from None
    except HfHubHTTPError as error:
        raise _refusal(error, repository) from None
    except httpx2.HTTPError as error:
        raise RequestError(ErrorCode.NETWORK_ERROR, f"{repository}: the hub cannot be reached ({type(error).__name__})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RequestError(ErrorCode.NETWORK_ERROR, f"{repository}: expected a hub's answer in JSON, found another form") from None


def _refusal(error: HfHubHTTPError, repository: str) -> RequestError:
    """Return an error by the answer's status: SourceUnauthorized for 401 and 403, SourceNotFound for 404, NetworkError for any other.

    The exception's own text is dropped, since it has the request in it.
    """
    status = error.response.status_code
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        why = "the repository does not exist, or the token (tokenSecretRef) is missing or may not read it"
        return RequestError(ErrorCode.SOURCE_UNAUTHORIZED, f"{repository}: the hub answered {status}: {why}")
    if status == HTTPStatus.NOT_FOUND:
        return RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{repository}: the hub has no such repository or revision")
    return RequestError(ErrorCode.NETWORK_ERROR, f"{repository}: the hub answered {status}")


def _choose(source: HuggingFaceSource, paths: list[str], wanted: ArtifactKind, repository: str) -> dict[str, str]:
    """Choose the files to fetch, and return their paths in the repository by local name.

    Raises:
        RequestError: SourceNotFound for a missing `file` or `subfolder`; see also `adapter_files` and `model_files`.
    """
    prefix = f"{source.subfolder.strip('/')}/" if source.subfolder else ""
    if wanted is ArtifactKind.ADAPTER and source.file is not None:
        path = prefix + source.file
        single_adapter(path, repository)
        if path not in paths:
            raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{repository}: the repository has no file {path!r}")
        return {ADAPTER_WEIGHTS: path}
    names = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
    if prefix and not names:
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{repository}: the repository has no folder {source.subfolder!r}")
    choose = adapter_files if wanted is ArtifactKind.ADAPTER else model_files
    return {name: prefix + path for name, path in choose(names, repository, patterns=source.allow_patterns).items()}


def _remote(repo: str, commit: str, sibling: Any, *, headers: dict[str, str], label: str) -> RemoteFile:
    lfs = sibling.lfs
    url = huggingface_hub.hf_hub_url(repo, sibling.rfilename, revision=commit)
    return RemoteFile(
        url=url,
        label=label,
        identity=f"{url} {sibling.blob_id}",
        size=lfs.size if lfs else sibling.size,
        sha256=lfs.sha256 if lfs else None,
        headers=headers,
    )
