"""A hub on this machine: one repository, served as huggingface.co serves it, and what was asked of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 10_000
"""From here on a file is stored as LFS does."""


@dataclass
class Hub:
    """What is served, and the requests so far: method and path."""

    name: str
    folder: Path
    commit: str
    port: int = 0
    requests: list[str] = field(default_factory=list)

    @property
    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        start = f"GET /{self.name}/resolve/{self.commit}/"
        return {one.removeprefix(start) for one in self.requests if one.startswith(start)}

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that is to use this hub and no other network."""
        nowhere = {f"{kind}_PROXY": "http://127.0.0.1:9" for kind in ("HTTP", "HTTPS", "ALL")}
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return nowhere | own | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}

    def entries(self) -> list[dict[str, Any]]:
        files = sorted(one for one in self.folder.rglob("*") if one.is_file())
        return [self._entry(file) for file in files]

    def _entry(self, file: Path) -> dict[str, Any]:
        data = file.read_bytes()
        entry = {"type": "file", "path": str(file.relative_to(self.folder)), "size": len(data), "oid": git_hash(data)}
        if len(data) < LARGE_BYTES:
            return entry
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry | {"lfs": lfs}


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving(folder: Path, name: str = "someone/tiny", commit: str = "c" * 40) -> Iterator[Hub]:
    """The folder as a repository, for the time of the block."""
    hub = Hub(name, folder, commit)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *words: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            api, resolve = f"/api/models/{hub.name}", f"/{hub.name}/resolve/{hub.commit}/"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{hub.commit}"):
                siblings = [{"rfilename": one["path"]} for one in hub.entries()]
                self._send_json({"id": hub.name, "modelId": hub.name, "sha": hub.commit, "siblings": siblings})
            elif path in (f"{api}/tree/main", f"{api}/tree/{hub.commit}"):
                self._send_json(hub.entries())
            elif path.startswith(resolve) and (hub.folder / path.removeprefix(resolve)).is_file():
                self._send_file(hub.folder / path.removeprefix(resolve))
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

        def _send_json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send_file(self, file: Path) -> None:
            data = file.read_bytes()
            etag = hashlib.sha256(data).hexdigest() if len(data) >= LARGE_BYTES else git_hash(data)
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit, **linked})

        def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.port = server.server_port
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
