"""A real SGLang server as a child: ready when it is itself, counted while it works, gone when anything ends."""

import http.server
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from rebuild.serving import server as server_module
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import Lease, lease_devices, record_path
from rebuild.serving.processes import session_processes
from rebuild.serving.server import Server, ServerDied, count_tokens, reserve_port, start_server
from tests.support import serve_job
from tests.support.tiny_llama import build_tiny_llama

SCRIPTS = serve_job.ROOT / "workflow" / "scripts"
READY_S = 600.0
GONE_S = 10.0
CPU = select_devices(["cpu"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    with lease_devices(1, CPU, folder=tmp_path / "leases") as held:
        yield held


@pytest.fixture(scope="module")
def server(model: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with (
        lease_devices(1, CPU, folder=folder / "leases") as held,
        start(model, held, folder) as running,
    ):
        running.wait_ready(READY_S)
        yield running


def start(model: dict[str, Any], held: Lease, folder: Path, **flags: Any) -> Server:
    return start_server(
        flags=flags,
        model=model,
        tensor_parallel=1,
        lease=held,
        folder=folder,
        stand_in=serve_job.STAND_IN,
    )


def refusal(model: dict[str, Any], held: Lease, folder: Path, **flags: Any) -> ServerDied:
    with start(model, held, folder, **flags) as server, pytest.raises(ServerDied) as died:
        server.wait_ready(READY_S)
    assert session_processes(server.pid) == {}
    return died.value


def ask(server: Server, tokens: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    request = {"text": "Once upon a time", "sampling_params": parameters}
    answer: dict[str, Any] = requests.post(
        f"{server.url}/generate", json=request, timeout=600
    ).json()
    return answer


def wait_for(condition: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def test_a_ready_server_is_ours_and_answers_at_once(server: Server) -> None:
    models = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in models] == [server.model_name]
    assert ask(server, 5)["meta_info"]["completion_tokens"] == 5
    info = server.info()
    assert info["served_model_name"] == server.model_name
    assert info["enable_metrics"] is True


def test_the_requests_that_it_runs_at_once_are_what_the_scheduler_allows(server: Server) -> None:
    assert server.effective_running_requests() == 32


def test_the_token_count_grows_while_one_long_answer_is_decoded(server: Server) -> None:
    before = server.tokens_generated()
    asking = threading.Thread(target=ask, args=(server, 2000))
    asking.start()
    seen = []
    while asking.is_alive():
        seen.append(server.tokens_generated())
        time.sleep(0.2)
    asking.join()
    assert seen == sorted(seen)
    assert len({count for count in seen if before < count < before + 1900}) >= 3
    assert server.tokens_generated() >= before + 1999


def test_the_leases_record_names_every_process_of_the_server(server: Server) -> None:
    record = json.loads(record_path(server.lease.folder, CPU[0]).read_text())
    living = session_processes(server.pid)
    assert record["session"] == server.pid
    assert {int(pid): began for pid, began in record["members"].items()} == living
    assert len(living) >= 3  # main process, scheduler, detokenizer
    assert record["shared"] and all(Path(path).exists() for path in record["shared"])


def test_the_servers_main_process_holds_the_lease(server: Server) -> None:
    held = {entry.readlink() for entry in Path(f"/proc/{server.pid}/fd").iterdir()}
    assert server.lease.folder / "cpu.lock" in held


def test_a_stopped_server_leaves_nothing_behind(server: Server) -> None:
    shared = server.lease.record["shared"]
    server.stop()
    server.stop()
    assert not server.alive()
    assert session_processes(server.pid) == {}
    assert not server.temporary.exists()
    assert not [path for path in shared if Path(path).exists()]


def test_a_server_that_is_killed_while_it_decodes_is_found_dead(
    model: dict[str, Any], lease: Lease, tmp_path: Path
) -> None:
    with start(model, lease, tmp_path) as server:
        server.wait_ready(READY_S)
        asking = threading.Thread(target=ask_the_doomed, args=(server,))
        asking.start()
        assert wait_for(lambda: server.tokens_generated() > 200, 60)
        os.kill(server.pid, signal.SIGKILL)
        assert wait_for(lambda: not server.alive(), GONE_S)
        asking.join(60)
    assert server.exit_status() == -signal.SIGKILL
    assert session_processes(server.pid) == {}


def ask_the_doomed(server: Server) -> None:
    with pytest.raises(requests.RequestException):
        ask(server, 8000)


def test_an_unknown_flag_ends_the_server_before_it_loads_a_model(
    model: dict[str, Any], lease: Lease, tmp_path: Path
) -> None:
    died = refusal(model, lease, tmp_path, **{"max-runing-requests": 7})
    assert "status 2" in died.what
    assert "unrecognized arguments: --max-runing-requests" in died.seen
    assert "server.flags" in died.remedy
    assert str(tmp_path / "server-1.log") in died.where


def test_a_model_that_is_not_there_is_named_as_the_cause(
    model: dict[str, Any], lease: Lease, tmp_path: Path
) -> None:
    died = refusal(model | {"path": str(tmp_path / "absent")}, lease, tmp_path)
    assert "model.source" in died.remedy


class AnotherServer(http.server.BaseHTTPRequestHandler):
    """Answers like a healthy server of another model."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "somebody-else"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


@contextmanager
def another_server() -> Iterator[int]:
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), AnotherServer)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    yield other.server_address[1]
    other.shutdown()
    other.server_close()


def test_another_server_on_its_port_is_not_taken_for_it(
    model: dict[str, Any], lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another_server() as port:
        monkeypatch.setattr(server_module, "reserve_port", lambda: PortOf(port))
        died = refusal(model, lease, tmp_path)
    assert "ended before it was ready" in died.what
    assert "port was taken" in died.remedy


class PortOf(socket.socket):
    """A reservation that is none: the port belongs to somebody else."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)


def test_a_server_that_does_not_get_ready_in_time_is_ended(
    model: dict[str, Any], lease: Lease, tmp_path: Path
) -> None:
    with start(model, lease, tmp_path) as server, pytest.raises(ServerDied, match="after 1 s"):
        server.wait_ready(1)
    assert session_processes(server.pid) == {}


def test_a_server_outlives_the_thread_that_asked_for_it(
    model: dict[str, Any], lease: Lease, tmp_path: Path
) -> None:
    made: list[Server] = []
    thread = threading.Thread(target=lambda: made.append(start(model, lease, tmp_path)))
    thread.start()
    thread.join()
    time.sleep(1)
    with made[0] as server:
        assert server.alive()


@pytest.mark.parametrize("moment", ["while it loads", "while it decodes"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_server_process_outlives_its_job(
    model: dict[str, Any], tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    manifest, leases = tmp_path / "manifest.json", tmp_path / "leases"
    manifest.write_text(json.dumps(model))
    command = [sys.executable, serve_job.__file__, str(manifest), str(leases), str(tmp_path)]
    job = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(SCRIPTS)})
    first = tmp_path / ("server.pid" if moment == "while it loads" else "ready")
    assert wait_for(lambda: first.exists() or job.poll() is not None, READY_S)
    assert first.exists(), (tmp_path / "job.log").read_text()
    time.sleep(random.uniform(0, 5))
    server_pid = int((tmp_path / "server.pid").read_text())
    assert session_processes(server_pid)
    job.send_signal(number)
    job.wait(server_module.STOP_S + GONE_S)
    assert wait_for(lambda: not session_processes(server_pid), GONE_S)
    with lease_devices(1, CPU, folder=leases, log=str) as lease:
        assert lease.devices == CPU
    assert not list(leases.glob("*.json"))


def test_ports_are_never_given_to_two() -> None:
    reserved = [reserve_port() for _ in range(300)]
    assert len({reservation.getsockname()[1] for reservation in reserved}) == 300
    with socket.create_server(("127.0.0.1", reserved[0].getsockname()[1])) as listening:
        assert listening.fileno() > 0
    for reservation in reserved:
        reservation.close()


def test_tokens_are_summed_over_schedulers_and_modes() -> None:
    metrics = """
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_compute",model_name="m"} 7.0
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_cache",model_name="m"} 100.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode",model_name="m"} 1.0e+02
sglang:realtime_tokens_total{dp_rank="1",mode="decode",model_name="m"} 3.0
sglang:realtime_tokens_created{dp_rank="1",mode="decode",model_name="m"} 1.7e+09
sglang:generation_tokens_total{model_name="m"} 55.0
"""
    assert count_tokens(metrics) == 110
