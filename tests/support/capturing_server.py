"""A server that seems to capture hidden states, and does it wrong on demand; right answers come from the real engine."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rebuild.capture.engine_flags import Layers
from rebuild.capture.engine_hook import FAILED, PART, WHOLE
from rebuild.capture.engine_requests import Engine
from rebuild.serving.server import ServerDied
from rebuild.states.captured import Wanted

HIDDEN = 8
LAYERS = 6

# Given a sample's ids, name a fault or None.
Script = Callable[[list[int]], str | None]


class CapturingServer:
    """Answers /generate and writes a file for each sample, in threads of its own; use as a context manager."""

    def __init__(self, folder: Path, script: Script, wanted: Wanted, *, pause_s: float = 0) -> None:
        self.folder = folder
        self.script = script
        self.wanted = wanted
        self.pause_s = pause_s
        self.status: int | None = None
        self.asked: list[list[int]] = []
        self.tokens = itertools.count()
        self.moving = True
        self.hanging = threading.Event()
        self.log = folder / "server.log"
        self.log.write_text("the last line\n")

    def __enter__(self) -> "CapturingServer":
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        self.hanging.set()
        self.http.shutdown()
        self.http.server_close()

    def engine(self, session: Any, **changes: Any) -> Engine:
        """Return the engine as `engine_capture` makes it, over this server."""
        given: dict[str, Any] = {
            "server": self,
            "session": session,
            "folder": self.folder,
            "wanted": self.wanted,
            "layers": Layers.of(self.wanted, LAYERS),
            "hidden_size": HIDDEN,
            "vocabulary": 1000,
            "longest": 100,
            "at_once": 200,
            "stall_s": 0.5,
        }
        return Engine(**given | changes)

    def exit_status(self) -> int | None:
        return self.status

    def tokens_generated(self) -> int:
        return next(self.tokens) if self.moving else 0

    def died(self, what: str) -> ServerDied:
        return ServerDied(what, where=str(self.log))

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Do with one request as the script says."""
        ids, name = body["input_ids"], body["rid"]
        self.asked.append(ids)
        time.sleep(self.pause_s)
        fault = self.script(ids)
        if fault == "hangs":
            self.hanging.wait()
        if fault in ("400", "500"):
            return int(fault), {"error": {"message": "no"}}
        if fault == "aborts":
            return 200, {"meta_info": {"finish_reason": {"type": "abort", "message": "no room"}}}
        if fault == "fails to write":
            (self.folder / f"{name}{FAILED}").touch()
        elif fault == "writes for ever":
            (self.folder / f"{name}{PART}").touch()
        elif fault != "is not called":
            self.write(name, [*ids[:-1], 7] if fault == "other ids" else ids, fault)
        return 200, {"meta_info": {"finish_reason": {"type": "length", "length": 1}}}

    def write(self, name: str, ids: Sequence[int], fault: str | None) -> None:
        """Write the file of a sample whose state at a layer is 100 times the id, plus the layer."""
        rows = torch.tensor(ids)[:, None].expand(-1, HIDDEN) * 100
        if fault == "short states":
            rows = rows[1:]
        tensors = {"token_ids": torch.tensor(ids), "pre_norm": (rows + LAYERS - 1)}
        taps = [rows + layer for layer in self.wanted.layers if layer < LAYERS - 1]
        tensors |= {"taps": torch.stack(taps, 1)} if taps else {}
        tensors |= {"post_norm": rows + 50} if self.wanted.post_norm else {}
        if not (self.wanted.pre_norm or LAYERS - 1 in self.wanted.layers):
            del tensors["pre_norm"]
        kind = torch.float16 if fault == "another dtype" else torch.bfloat16
        states = {key: value.to(kind).contiguous() for key, value in tensors.items()}
        save_file(states | {"token_ids": tensors["token_ids"]}, self.folder / f"{name}{PART}")
        (self.folder / f"{name}{PART}").replace(self.folder / f"{name}{WHOLE}")


def handler_of(server: CapturingServer) -> type[BaseHTTPRequestHandler]:
    """Return the class that handles requests for this server."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = server.answer(body)
            payload = dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler
