"""Telling a live driver from a killed one."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.start.driver_lock import DriverLock

HOLDER = """
import sys
from pathlib import Path
from rebuild.start.driver_lock import DriverLock
lock = DriverLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
sys.stdin.readline()
lock.require()
print("running", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Snakemake's folder with the lock files of a driver that was killed."""
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "0.input.lock").write_text("config.yaml\n")
    return tmp_path


@pytest.fixture
def holder(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        env=os.environ | {"PYTHONPATH": "workflow/scripts"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


def test_the_lock_files_of_a_killed_driver_are_removed(folder: Path):
    assert DriverLock(folder).take_over() == ""
    assert not (folder / "locks").exists()


def test_a_fresh_folder_is_taken_over(tmp_path: Path):
    lock = DriverLock(tmp_path / ".snakemake")
    assert lock.take_over() == ""
    lock.require()


def go_on(holder: "subprocess.Popen[str]") -> None:
    """Have the holder run its jobs."""
    assert holder.stdin and holder.stdout
    print(file=holder.stdin, flush=True)
    assert holder.stdout.readline() == "running\n"


def test_a_living_driver_is_named_and_its_lock_files_stay(
    folder: Path, holder: "subprocess.Popen[str]"
):
    go_on(holder)
    lock = DriverLock(folder)
    named = f"process {holder.pid} on {os.uname().nodename}, running jobs since"
    assert lock.take_over().startswith(named)
    assert (folder / "locks" / "0.input.lock").exists()
    with pytest.raises(StepError, match=f"process {holder.pid} on .* holds the lock"):
        lock.require()


def test_the_lock_ends_with_its_holder(folder: Path, holder: "subprocess.Popen[str]"):
    lock = DriverLock(folder)
    assert not lock.acquire()
    holder.kill()
    holder.wait()
    lock.require()
    assert (folder / "locks").exists()  # by now they are this driver's own


def test_a_child_does_not_inherit_the_lock(folder: Path):
    first = DriverLock(folder)
    assert first.acquire()
    assert first.handle
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        first.handle.close()
        assert DriverLock(folder).acquire()
        child.kill()


def test_a_driver_that_still_plans_is_waited_for(folder: Path, holder: "subprocess.Popen[str]"):
    lock = DriverLock(folder)
    assert "planning since" in lock.take_over(wait_s=0.3)
    later = threading.Timer(0.3, go_on, [holder])
    later.start()
    assert "running jobs since" in lock.take_over(wait_s=30)
    later.join()


def test_when_a_driver_that_planned_is_gone_the_next_takes_over(
    folder: Path, holder: "subprocess.Popen[str]"
):
    threading.Timer(0.3, holder.kill).start()
    assert DriverLock(folder).take_over(wait_s=30) == ""
    assert not (folder / "locks").exists()


def test_without_flock_snakemakes_own_lock_files_are_left_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = DriverLock(folder)
    assert lock.take_over() == ""
    assert (folder / "locks" / "0.input.lock").exists()
    lock.require()
