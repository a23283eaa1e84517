"""A job that serves and never stops by itself: leases a device, starts a server, has it decode.

python serve_job.py MANIFEST.json LEASES LOGS
"""

import json
import sys
import time
from pathlib import Path

import requests

from rebuild.serving.devices import select_devices
from rebuild.serving.lease import lease_devices
from rebuild.serving.server import Server, start_server
from rebuild.step import begin_step

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "envs" / "cpu" / "stand_in"


def serve(manifest: Path, leases: Path, logs: Path) -> None:
    """Serve the model of the manifest until a signal comes; the server's pid and its first token are in `logs`."""
    model = json.loads(manifest.read_text())
    with (
        lease_devices(1, select_devices(["cpu"]), folder=leases) as lease,
        start_server(
            flags={},
            model=model,
            tensor_parallel=1,
            lease=lease,
            folder=logs,
            stand_in=STAND_IN,
        ) as server,
    ):
        (logs / "server.pid").write_text(str(server.pid))
        server.wait_ready(600)
        (logs / "ready").touch()
        while True:
            decode(server)


def decode(server: Server) -> None:
    """Have the server decode one long answer."""
    requests.post(
        f"{server.url}/generate",
        json={"text": "Once", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}},
        timeout=600,
    )
    time.sleep(0.01)


if __name__ == "__main__":
    begin_step(sys.argv[3] + "/job.log")
    serve(*map(Path, sys.argv[1:]))
