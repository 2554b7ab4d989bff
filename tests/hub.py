"""A hub on this machine: one repository, served as huggingface.co serves it, which takes uploads, and what was asked of
it."""

from __future__ import annotations

import base64
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
    kind: str = "model"
    """"model" or "dataset"."""
    port: int = 0
    requests: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Where the repository's pages are, and its files."""
        return f"/{self.name}" if self.kind == "model" else f"/{self.kind}s/{self.name}"

    @property
    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        start = f"GET {self.place}/resolve/{self.commit}/"
        return {one.removeprefix(start) for one in self.requests if one.startswith(start)}

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that is to use this hub and no other network."""
        nowhere = {f"{kind}_PROXY": "http://127.0.0.1:9" for kind in ("HTTP", "HTTPS", "ALL")}
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return nowhere | own | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}

    def entries(self, place: str = "", is_deep: bool = True) -> list[dict[str, Any]]:
        """The files and folders in a folder of the repository, and in those below it."""
        return [self._entry(one) for one in sorted((self.folder / place).glob("**/*" if is_deep else "*"))]

    def take(self, lines: list[dict[str, Any]]) -> None:
        """Write the files of a commit, whose content stands in it; the commit gets its own hash."""
        for line in lines:
            if line["key"] == "file":
                path = self.folder / line["value"]["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(line["value"]["content"]))
        self.commit = hashlib.sha1(self.commit.encode()).hexdigest()

    def _entry(self, file: Path) -> dict[str, Any]:
        if file.is_dir():
            return {"type": "directory", "path": str(file.relative_to(self.folder)), "size": 0, "oid": "0" * 40}
        data = file.read_bytes()
        entry = {"type": "file", "path": str(file.relative_to(self.folder)), "size": len(data), "oid": git_hash(data)}
        if len(data) < LARGE_BYTES:
            return entry
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry | {"lfs": lfs}


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving(folder: Path, name: str = "someone/tiny", commit: str = "c" * 40, kind: str = "model") -> Iterator[Hub]:
    """The folder as a repository, for the time of the block."""
    hub = Hub(name, folder, commit, kind)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            """What uploads ask, in their order: files go into the commit itself, none to a store of large files."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"POST {path}")
            api = f"/api/{hub.kind}s/{hub.name}"
            if path == "/api/repos/create":
                self._send_json({"url": f"http://127.0.0.1:{hub.port}{hub.place}", "name": hub.name})
            elif path == "/api/validate-yaml":
                self._send_json({"warnings": [], "errors": []})
            elif path == f"{api}/preupload/main":
                own = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                self._send_json({"files": [{"path": one["path"]} | own for one in json.loads(body)["files"]]})
            elif path == f"{api}/commit/main":
                hub.take([json.loads(line) for line in body.splitlines()])
                place = f"http://127.0.0.1:{hub.port}{hub.place}/commit/{hub.commit}"
                self._send_json({"success": True, "commitUrl": place, "commitOid": hub.commit})
            elif path == f"{api}/paths-info/{hub.commit}":
                asked = json.loads(body)["paths"]
                self._send_json([one for one in hub.entries() if one["path"] in asked])
            else:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "No such thing here"})

        def log_message(self, *words: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            path = path.replace("/resolve/main/", f"/resolve/{hub.commit}/")
            api, resolve = f"/api/{hub.kind}s/{hub.name}", f"{hub.place}/resolve/{hub.commit}/"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{hub.commit}"):
                siblings = [{"rfilename": one["path"]} for one in hub.entries() if one["type"] == "file"]
                self._send_json({"id": hub.name, "modelId": hub.name, "sha": hub.commit, "siblings": siblings})
            elif path.startswith((f"{api}/tree/main", f"{api}/tree/{hub.commit}")):
                place = path.removeprefix(f"{api}/tree/").partition("/")[2]
                self._send_json(hub.entries(place, "recursive=true" in self.path.lower()))
            elif path.startswith(resolve) and (hub.folder / path.removeprefix(resolve)).is_file():
                self._send_file(hub.folder / path.removeprefix(resolve))
            elif path.startswith(resolve):
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "No such file here"})
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
