"""The launcher: no process of a server outlives its main process, not even one that never asked for that."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rebuild.serving import launch_server
from rebuild.serving.processes import session_processes

# A server whose child, like SGLang's own while they import, does not notice its parent's death.
SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("serving", flush=True)
time.sleep(1000)
"""
SOON_S = launch_server.GRACE_S + 10


@pytest.fixture
def server(tmp_path: Path) -> "subprocess.Popen[str]":
    """A launched server with one child and its watcher."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    process = subprocess.Popen(
        [sys.executable, "-P", launch_server.__file__, str(os.getpid())],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "serving\n"
    assert len(session_processes(process.pid)) == 3
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_server_whose_main_process_is_gone(
    server: "subprocess.Popen[str]", number: signal.Signals
):
    session = server.pid
    os.kill(session, number)
    server.wait(SOON_S)
    deadline = time.monotonic() + SOON_S
    while session_processes(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session_processes(session) == {}


def test_a_server_whose_starter_is_gone_does_not_start(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-P", launch_server.__file__, "1"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "has ended" in done.stderr
