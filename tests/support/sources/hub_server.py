# SPDX-License-Identifier: Apache-2.0
"""A server with the routes of a hub that a fetch uses: a repository at a revision, and its files at a commit.

Real: HTTP and its sockets. Not real: the hub itself, all of which is in memory.
"""

import hashlib
import json
from urllib.parse import unquote

from support.sources.http_sources import Served, SourceServer

ENDINGS_IN_LFS = (".safetensors", ".bin")


class HubServer(SourceServer):
    """Repositories by name; every `push` is a commit, which `main` and the branches given to it then are."""

    def __init__(self) -> None:
        super().__init__()
        self._commits: dict[str, dict[str, Served]] = {}
        self._branches: dict[tuple[str, str], str] = {}

    def push(self, repo: str, files: dict[str, bytes | Served], *, branch: str = "main") -> str:
        """Make these the files of a branch; returns the commit."""
        served = {path: file if isinstance(file, Served) else Served(file) for path, file in files.items()}
        state = "".join(f"{path} {file.sha256}\n" for path, file in sorted(served.items()))
        commit = hashlib.sha1(f"{repo} {state}".encode()).hexdigest()
        self._commits[f"{repo}@{commit}"] = served
        self._branches[repo, branch] = commit
        return commit

    def delete(self, repo: str) -> None:
        """The repository is gone, with all its files."""
        self._branches = {key: commit for key, commit in self._branches.items() if key[0] != repo}
        self._commits = {key: files for key, files in self._commits.items() if not key.startswith(f"{repo}@")}

    def find(self, path: str) -> Served | None:
        parts = unquote(path).strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            revision = "/".join(parts[5:]) if parts[4:5] == ["revision"] else "main"
            return self._info("/".join(parts[2:4]), revision)
        if len(parts) >= 5 and parts[2] == "resolve":
            return self._commits.get(f"{'/'.join(parts[:2])}@{parts[3]}", {}).get("/".join(parts[4:]))
        return self.files.get(path)

    def _info(self, repo: str, revision: str) -> Served | None:
        commit = self._branches.get((repo, revision), revision)
        files = self._commits.get(f"{repo}@{commit}")
        if files is None:
            return None
        siblings = [_sibling(path, file) for path, file in files.items()]
        answer = {"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        return Served(json.dumps(answer).encode(), headers={"Content-Type": "application/json"})


def _sibling(path: str, file: Served) -> dict[str, object]:
    blob_id = hashlib.sha1(b"blob %d\0" % len(file.content) + file.content).hexdigest()
    found: dict[str, object] = {"rfilename": path, "size": len(file.content), "blobId": blob_id}
    if path.endswith(ENDINGS_IN_LFS):
        found["lfs"] = {"sha256": file.sha256, "size": len(file.content), "pointerSize": 130}
    return found
