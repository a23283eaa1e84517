"""One SGLang server as a child process: start, readiness, facts, and an end that leaves nothing behind."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from rebuild.errors import StepError
from rebuild.generate.client import Endpoint
from rebuild.serving.failure import explain_status, probable_cause, read_tail
from rebuild.serving.flags import (
    Flags,
    Purpose,
    cpu_overrides,
    server_arguments,
    server_environment,
)
from rebuild.serving.lease import Lease, remove_traces
from rebuild.serving.processes import kill_processes, mapped_files, session_processes
from rebuild.step import say

LAUNCHER = Path(__file__).with_name("launch_server.py")
PORTS = range(20000, 32000)  # below those that the kernel hands out by itself
SHARED_FILES = "/dev/shm/sglang_loads_"  # 16 KB of memory per start that SGLang never gives back
STOP_S = 20.0  # SGLang drains and ends in about 8 s
# The kernel ends the server when the thread that started it ends: this one lasts as long as the process.
STARTER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-starter")


class ServerDied(StepError):
    """A server that ended, or did not get ready, with its exit status and the last lines of its log."""

    ready = False  # whether it had got ready before


class Server:
    """A server process of ours; made by `start_server`, and stopped when its `with` block ends."""

    counts_tokens = True

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        port: int,
        model_name: str,
        log: Path,
        lease: Lease,
        temporary: Path,
        reserved: list[socket.socket],
    ) -> None:
        self.process = process
        self.pid = process.pid
        self.url = f"http://127.0.0.1:{port}"
        self.model_name = model_name
        self.log = log
        self.lease = lease
        self.temporary = temporary
        self.reserved = reserved
        self.noted: dict[str, Any] = {}
        self.got_ready = False
        self.session = requests.Session()
        self.session.trust_env = False  # no proxy between us and our own machine
        self.note_members()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def endpoints(self) -> list[Endpoint]:
        """Return where to ask."""
        return [Endpoint(self.url, self.model_name, self.alive)]

    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process lives.

        It is left a zombie until `stop`, so that its number, the session's, stays ours.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread is stopping it
            return self.process.wait()
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def alive(self) -> bool:
        """Tell whether the server's main process lives."""
        return self.exit_status() is None

    def note_members(self) -> None:
        """Write the session's processes and files into the lease's record when they have changed."""
        members = session_processes(self.pid)
        facts = {
            "session": self.pid,
            "members": members,
            "temporary": str(self.temporary),
            "shared": mapped_files(members, SHARED_FILES),
        }
        if facts != self.noted:
            self.noted = facts
            self.lease.write_record(**facts)

    def wait_ready(self, timeout_s: float, poll_s: float = 0.5) -> None:
        """Wait until this server, and not another one on its port, has answered its own warm-up.

        Raises:
            ServerDied: it ended, or the time is over.
        """
        began = time.monotonic()
        while not self.ready():
            self.note_members()  # the record helps whoever finds this server without this job
            status = self.exit_status()
            if status is not None:
                raise self.died(f"the server ended before it was ready, {explain_status(status)}")
            if time.monotonic() - began > timeout_s:
                raise self.died(f"the server was not ready after {timeout_s:.0f} s")
            time.sleep(poll_s)
        self.note_members()
        self.got_ready = True
        say(f"server ready after {time.monotonic() - began:.1f} s: {self.url}, log {self.log}")

    def ready(self) -> bool:
        """Tell whether our child lives, answers to its own name, and is healthy."""
        with contextlib.suppress(requests.RequestException, ValueError, KeyError):
            models = self.session.get(f"{self.url}/v1/models", timeout=5).json()["data"]
            if self.alive() and [model["id"] for model in models] == [self.model_name]:
                return self.session.get(f"{self.url}/health", timeout=30).status_code == 200
        return False

    def died(self, what: str) -> ServerDied:
        """Return the error for this server: what happened, the probable cause, the end of its log."""
        tail = read_tail(self.log)
        error = ServerDied(
            what,
            where=f"server log {self.log}",
            expected="a server that runs until this job stops it",
            seen="the log ends:\n" + tail,
            remedy=probable_cause(tail),
        )
        error.ready = self.got_ready
        return error

    def info(self) -> dict[str, Any]:
        """Return /server_info: the arguments as resolved, and the scheduler's state."""
        answer = self.session.get(f"{self.url}/server_info", timeout=60)
        answer.raise_for_status()
        return dict(answer.json())

    def effective_running_requests(self) -> int:
        """Return how many requests the server runs at once, after its own limits on memory and state slots."""
        info = self.info()
        states = info.get("internal_states") or [info]
        each = [
            state.get("effective_max_running_requests_per_dp") or state["max_running_requests"]
            for state in states
        ]
        return int(sum(each))

    def tokens_generated(self) -> int:
        """Return how many tokens the server has worked through since its start, prefill and decode together.

        Of what SGLang reports, `sglang:realtime_tokens_total` alone grows with every step of a running
        request; `generation_tokens_total` waits for the request's end, and `/v1/loads` has no count.
        A long prefill moves it too, so that it is not taken for a stall.
        """
        answer = self.session.get(f"{self.url}/metrics", timeout=60)
        answer.raise_for_status()
        return count_tokens(answer.text)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End every process of the server's session: SIGTERM, a while to go by itself, SIGKILL. Safe to repeat.

        SIGTERM goes to the main process alone: it has the schedulers release their memory, and takes the
        sudden death of one of them for a crash to be examined.
        """
        if self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        # before the process is reaped: until then nobody else can be given its number
        kill_processes(session_processes(self.pid))
        self.process.wait()
        self.session.close()
        for reservation in self.reserved:
            reservation.close()
        remove_traces(self.lease.record)


def start_server(
    *,
    flags: Flags,
    model: dict[str, Any],
    tensor_parallel: int,
    lease: Lease,
    folder: Path,
    stand_in: Path,
    attempt: int = 1,
    purpose: Purpose | None = None,
) -> Server:
    """Start a server of `model` (its manifest) on the leased devices and return at once.

    Its output goes to `folder/server-<attempt>.log`. `stand_in` is the folder envs/cpu/stand_in, which
    only servers on the CPU get to see. `purpose` is what work other than answering needs.
    """
    name = f"{Path(model['path']).name}-{uuid.uuid4().hex[:12]}"
    reserved = [reserve_port(), reserve_port()]
    port, nccl_port = (reservation.getsockname()[1] for reservation in reserved)
    arguments = server_arguments(
        flags,
        model=model,
        devices=lease.devices,
        tensor_parallel=tensor_parallel,
        port=port,
        nccl_port=nccl_port,
        served_name=name,
        purpose=purpose,
    )
    overrides = cpu_overrides(flags, model=model, devices=lease.devices)
    if overrides:
        say(f"on the CPU these flags take the place of the config's: {overrides}")
    temporary = make_temporary()
    environment = server_environment(lease.devices, stand_in, purpose=purpose)
    environment |= dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(temporary))
    log = folder / f"server-{attempt}.log"
    folder.mkdir(parents=True, exist_ok=True)
    say(f"starting server {attempt}, log {log}: sglang {' '.join(arguments)}")
    process = STARTER.submit(spawn, arguments, environment, log, lease.descriptors).result()
    return Server(
        process,
        port=port,
        model_name=name,
        log=log,
        lease=lease,
        temporary=temporary,
        reserved=reserved,
    )


def spawn(
    arguments: list[str], environment: dict[str, str], log: Path, descriptors: list[int]
) -> subprocess.Popen[bytes]:
    """Start the launcher in a session of its own, with the lease's descriptors, writing to `log`."""
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", str(LAUNCHER), str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=descriptors,
            start_new_session=True,
        )


def reserve_port() -> socket.socket:
    """Return a socket that keeps a free port from other jobs until it is closed.

    It is bound but does not listen, and allows reuse: the server can bind the port beside it, while
    another job's reservation, bound before it allows reuse, cannot.
    """
    for port in random.sample(PORTS, 500):
        reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            reservation.bind(("", port))
        except OSError:
            reservation.close()
            continue
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reservation
    raise StepError(f"no free port between {PORTS.start} and {PORTS.stop}", remedy="see `ss -tln`")


def make_temporary() -> Path:
    """Return a new temporary folder with a short path: the server's sockets in it allow 107 bytes."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="rebuild-", dir=parent if len(parent) < 60 else "/tmp"))


def count_tokens(metrics: str) -> int:
    """Return the sum of the tokens computed in all modes, from the text of /metrics."""
    values = re.findall(
        r'^sglang:realtime_tokens_total\{[^}]*mode="(?:prefill_compute|decode)"[^}]*\} (\S+)$',
        metrics,
        re.MULTILINE,
    )
    return int(sum(float(value) for value in values))
