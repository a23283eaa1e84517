"""A model hub on this machine: one repository with one branch, served as huggingface_hub expects it, faults included."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CUT_AT = 0.9  # the client keeps whole pieces of 10 MB
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of `folder` as repository `repo`; `cut` names a file whose first transfer breaks off."""

    def __init__(self, folder: Path, repo: str, cut: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder = folder
        self.repo = repo
        self.cut = cut
        self.sent: list[tuple[str, int]] = []  # file and first byte of every transfer

    @property
    def url(self) -> str:
        """The address to give as HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def sizes(self) -> dict[str, int]:
        """Return the size of every file by its name."""
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in files}

    def facts(self, asked: str) -> Any:
        """Return what the API says of the repository at a revision, None of anything else."""
        if asked in ("revision/main", f"revision/{COMMIT}"):
            files = [{"rfilename": name, "size": size} for name, size in self.sizes().items()]
            return {"id": self.repo, "sha": COMMIT, "siblings": files}
        return None


class HubHandler(BaseHTTPRequestHandler):
    """Answers what a download asks for: repository facts, then each file."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send facts or a file."""
        asked = self.path.split("?")[0].removeprefix(f"/api/models/{self.server.repo}/")
        facts = self.server.facts(asked)
        if facts is None:
            self.send_file(with_body=True)
        else:
            self.reply(200, json.dumps(facts).encode())

    def do_HEAD(self) -> None:
        """Send what is known of a file."""
        self.send_file(with_body=False)

    def send_file(self, with_body: bool) -> None:
        """Send a file from the byte that was asked for, or 404."""
        prefix = f"/{self.server.repo}/resolve/{COMMIT}/"
        path = self.server.folder / self.path.removeprefix(prefix)
        if not self.path.startswith(prefix) or not path.is_file():
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        content = path.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        ranged = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{path.name}-1"', "Accept-Ranges": "bytes"}
        if not with_body:
            self.reply(200, content, headers, send=0)
            return
        self.server.sent.append((path.name, start))
        part = int(len(content) * CUT_AT) if path.name == self.server.cut else None
        self.server.cut = None if part else self.server.cut
        status = 206 if "Range" in self.headers else 200
        self.reply(status, content[start:], headers | (ranged if status == 206 else {}), send=part)

    def reply(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        send: int | None = None,
    ) -> None:
        """Send status, headers and the body, or just its first `send` bytes and then nothing more."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:send])
        self.close_connection = bool(send)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@contextmanager
def run_hub(folder: Path, repo: str, cut: str | None = None) -> Iterator[Hub]:
    """Serve the folder while the block runs."""
    hub = Hub(folder, repo, cut)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
