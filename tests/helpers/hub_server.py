"""A stand-in for the Hub on the loopback interface: what `huggingface_hub` asks for, served from folders.

    with HubServer({"owner/name": folder}, token="secret") as hub:
        hub.url, hub.commit("owner/name"), hub.requests

Large files (`.safetensors`) are listed as the Hub lists large storage, by SHA-256; the others by git object id.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serve `repositories` (folders by repository id), each with one commit on the branch `main`.

    `requests` lists `(method, path, range header)` of every request. `break_after[path]` makes the next download of
    a file end early after that many bytes, as a lost connection does.
    """

    def __init__(self, repositories: dict[str, Path], token: str | None = None):
        self.repositories = {name: Path(folder) for name, folder in repositories.items()}
        self.token = token
        self.requests: list[tuple[str, str, str | None]] = []
        self.break_after: dict[str, int] = {}
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def commit(repository: str) -> str:
        return hashlib.sha1(repository.encode()).hexdigest()

    def downloads(self, suffix: str) -> list[str]:
        """Return the paths of whole-file downloads that end in `suffix`."""
        return [path for method, path, part in self.requests if method == "GET" and path.endswith(suffix) and not part]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *arguments) -> None:
        """Say nothing; `HubServer.requests` is the log."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        hub, path = self.server_hub, urlsplit(self.path).path
        parts = [unquote(part) for part in path.strip("/").split("/")]
        hub.requests.append((self.command, unquote(path), self.headers.get("Range")))
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._error(401, "RepoNotFound")
        is_api = parts[:2] == ["api", "models"]
        # /api/models/{owner}/{name}/{action}/{revision}/{path}, or without the first two
        parts = [*(parts[2:] if is_api else parts), "", "", "", ""]
        repository, action, revision = "/".join(parts[:2]), parts[2], parts[3]
        rest = "/".join(parts[4:]).strip("/")
        if repository not in hub.repositories:
            return self._error(404, "RepoNotFound")
        if revision not in ("main", hub.commit(repository)):
            return self._error(404, "RevisionNotFound")
        root = hub.repositories[repository]
        if is_api and action == "revision":
            return self._json({"id": repository, "modelId": repository, "sha": hub.commit(repository), "siblings": []})
        if is_api and action == "tree":
            return self._tree(root, rest)
        if not is_api and action == "resolve":
            return self._file(root / rest, repository, unquote(path))
        return self._error(404, "EntryNotFound")

    def _tree(self, root: Path, subfolder: str) -> None:
        folder = root / subfolder
        if not folder.is_dir():
            return self._error(404, "EntryNotFound")
        entries = []
        for path in sorted(folder.rglob("*")):
            name, size = path.relative_to(root).as_posix(), path.stat().st_size
            if path.is_dir():
                entries.append({"type": "directory", "path": name, "oid": "0" * 40, "size": 0})
            elif path.suffix == ".safetensors":
                large = {"oid": _etag(path), "size": size, "pointerSize": 130}
                entries.append({"type": "file", "path": name, "oid": "1" * 40, "size": size, "lfs": large})
            else:
                entries.append({"type": "file", "path": name, "oid": _etag(path), "size": size})
        return self._json(entries)

    def _file(self, path: Path, repository: str, request: str) -> None:
        if not path.is_file():
            return self._error(404, "EntryNotFound", repository)
        content = path.read_bytes()
        headers = {
            "ETag": f'"{_etag(path)}"',
            "X-Repo-Commit": self.server_hub.commit(repository),
            "Accept-Ranges": "bytes",
        }
        if path.suffix == ".safetensors":
            headers |= {"X-Linked-ETag": f'"{_etag(path)}"', "X-Linked-Size": str(len(content))}
        status, part = 200, self.headers.get("Range")
        if part:
            first, _, last = part.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            status, content = 206, content[start:stop]
        cut = self.server_hub.break_after.pop(request, None) if self.command == "GET" and not part else None
        return self._send(status, content, headers, cut)

    def _json(self, content) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, repository: str | None = None) -> None:
        headers = {"X-Error-Code": code}
        if repository is not None:
            headers["X-Repo-Commit"] = self.server_hub.commit(repository)
        self._send(status, json.dumps({"error": code}).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


def _etag(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
