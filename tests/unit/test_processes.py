"""Processes are told apart by when they began."""

import os
import signal
import subprocess
from pathlib import Path

from rebuild.serving.processes import (
    kill_processes,
    mapped_files,
    session_processes,
    start_time,
    still_alive,
)


def test_the_dead_and_the_unreaped_have_no_start_time() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    assert start_time(child.pid) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(child.pid) is None
    child.wait()
    assert start_time(child.pid) is None


def test_a_name_with_brackets_and_spaces_is_read_rightly(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([odd, "1000"], start_new_session=True)
    assert list(session_processes(child.pid)) == [child.pid]
    child.kill()
    child.wait()


def test_only_the_process_with_that_beginning_is_killed() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    began = start_time(child.pid)
    assert began is not None
    assert kill_processes({child.pid: began + 1}) == {}
    assert child.poll() is None
    assert still_alive({child.pid: began, 2**22 + 1: 5}) == {child.pid: began}
    assert kill_processes({child.pid: began}) == {}
    assert child.wait() == -signal.SIGKILL


def test_mapped_files_are_found_by_their_beginning() -> None:
    libraries = mapped_files([os.getpid(), 2**22 + 1], str(Path(os.__file__).parents[2]))
    own = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert set(libraries) <= own
    assert mapped_files([os.getpid()], "/no/such/file") == []
