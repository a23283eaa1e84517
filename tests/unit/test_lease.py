"""A device belongs to one process at a time, with real locks, processes and kills."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.serving.lease import check_granted, lease_devices, record_path
from rebuild.serving.processes import pid_space, session_processes, start_time
from tests.support import lease_holder
from tests.support.lease_holder import pretend_devices

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
SOON_S = 10.0
Processes = list[subprocess.Popen[str]]


@pytest.fixture
def started() -> Iterator[Processes]:
    processes: Processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start_holder(
    started: Processes, folder: Path, devices: int, count: int, rounds: int, hold_s: float
) -> subprocess.Popen[str]:
    numbers = [str(number) for number in (devices, count, rounds, hold_s)]
    command = [sys.executable, lease_holder.__file__, str(folder), *numbers]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
    )
    started.append(process)
    return process


def wait_until_holding(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().startswith("holding")


def start_family(started: Processes) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """Start a session whose leader has a child, as a server has its scheduler."""
    command = ["sh", "-c", "sleep 1000 & echo ready; wait"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    started.append(leader)
    assert leader.stdout is not None and leader.stdout.readline() == "ready\n"
    return leader, session_processes(leader.pid)


def write_record(folder: Path, pid: int, started_at: int | None, **facts: object) -> None:
    record = {"pid": pid, "started": started_at, "since": "then", "folder": "there"}
    path = record_path(folder, pretend_devices(1)[0])
    path.write_text(json.dumps(record | {"pid_space": pid_space()} | facts))


def lease_once(folder: Path, devices: int = 1, count: int = 1) -> list[str]:
    """Lease and give back; return what was logged."""
    said: list[str] = []
    with lease_devices(count, pretend_devices(devices), folder=folder, log=said.append):
        pass
    return said


def overlaps(lines: list[str]) -> int:
    """Count the pairs of holders that had a device at the same time."""
    times = defaultdict(list)
    for line in lines:
        uuid, began, ended = line.split()
        times[uuid].append((float(began), float(ended)))
    ordered = [sorted(spans) for spans in times.values()]
    return sum(a[1] > b[0] for spans in ordered for a, b in pairwise(spans))


def test_sixteen_processes_never_share_four_devices(tmp_path: Path, started: Processes) -> None:
    holders = [start_holder(started, tmp_path, 4, 1 + n % 2, 5, 0.02) for n in range(16)]
    lines = [line for holder in holders for line in holder.communicate(timeout=300)[0].splitlines()]
    held = [line for line in lines if not line.startswith("holding")]
    assert len(held) == 8 * 5 * 1 + 8 * 5 * 2
    assert {line.split()[0] for line in held} == {f"GPU-pretend-{n}" for n in range(4)}
    assert overlaps(held) == 0


def test_overlaps_would_be_seen() -> None:
    assert overlaps(["GPU-0 1.0 2.0", "GPU-0 1.5 2.5", "GPU-1 1.0 2.0"]) == 1


def test_who_needs_two_devices_holds_none_while_only_one_is_free(
    tmp_path: Path, started: Processes
) -> None:
    wait_until_holding(start_holder(started, tmp_path, 1, 1, 1, 1000))  # has GPU-pretend-0
    waiting = start_holder(started, tmp_path, 2, 2, 1, 0)
    assert waiting.stderr is not None and "waiting for 2 of 2" in waiting.stderr.readline()
    with lease_devices(1, pretend_devices(2)[1:], folder=tmp_path) as lease:
        assert [device.index for device in lease.devices] == [1]
    assert waiting.poll() is None


def test_a_killed_holder_frees_its_device_at_once(tmp_path: Path, started: Processes) -> None:
    holder = start_holder(started, tmp_path, 1, 1, 1, 1000)
    wait_until_holding(holder)
    threading.Timer(0.5, holder.kill).start()
    began = time.monotonic()
    said = lease_once(tmp_path)
    assert 0.4 < time.monotonic() - began < SOON_S
    assert "waiting for 1 of 1" in said[0]


def test_who_waits_is_told_who_holds(tmp_path: Path, started: Processes) -> None:
    holder = start_holder(started, tmp_path, 1, 1, 1, 1.5)
    wait_until_holding(holder)
    said = lease_once(tmp_path)
    assert f"gpu:0 is held by process {holder.pid} since 2" in said[0]
    assert str(Path.cwd()) in said[0]


def test_more_devices_than_there_are_is_an_error_and_no_wait(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="3 devices are wanted and 2"):
        lease_once(tmp_path, devices=2, count=3)


def test_a_request_that_resources_scaled_down_is_an_error() -> None:
    check_granted(2, 2)
    with pytest.raises(StepError, match="--resources gpu=4"):
        check_granted(4, 1)


def test_a_child_that_got_the_descriptor_keeps_the_device_after_the_holders_death(
    tmp_path: Path, started: Processes
) -> None:
    with lease_devices(1, pretend_devices(1), folder=tmp_path) as lease:
        child = subprocess.Popen(["sleep", "1000"], pass_fds=lease.descriptors, text=True)
        started.append(child)
        lease.remove_record()
    threading.Timer(1.0, child.kill).start()
    began = time.monotonic()
    lease_once(tmp_path)
    assert 0.9 < time.monotonic() - began < SOON_S


def test_a_server_that_outlived_its_job_and_holds_the_device_is_ended(
    tmp_path: Path, started: Processes
) -> None:
    with lease_devices(1, pretend_devices(1), folder=tmp_path) as lease:
        server = subprocess.Popen(
            ["sleep", "1000"], pass_fds=lease.descriptors, start_new_session=True, text=True
        )
        started.append(server)
        members = session_processes(server.pid)
    write_record(tmp_path, 2**22 + 1, 1, session=server.pid, members=members)
    assert any("ending processes" in line for line in lease_once(tmp_path))
    assert server.wait(SOON_S) == -signal.SIGKILL


def test_what_is_left_of_a_servers_session_is_ended_before_the_lease_begins(
    tmp_path: Path, started: Processes
) -> None:
    leader, members = start_family(started)
    bystander, others = start_family(started)
    write_record(tmp_path, 2**22 + 1, 1, session=leader.pid, members=members)
    leader.kill()
    leader.wait()
    assert len(session_processes(leader.pid)) == 1
    said = lease_once(tmp_path)
    assert session_processes(leader.pid) == {}
    assert session_processes(bystander.pid) == others
    assert any("left behind" in line for line in said)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("wrong", ["start time", "boot"])
def test_a_process_that_merely_got_the_number_of_a_recorded_one_is_left_alone(
    tmp_path: Path, started: Processes, wrong: str
) -> None:
    leader, members = start_family(started)
    if wrong == "start time":
        members = {pid: began - 1 for pid, began in members.items()}
        write_record(tmp_path, 2**22 + 1, 1, session=leader.pid, members=members)
    else:
        space = {"pid_space": "another boot"}
        write_record(tmp_path, 2**22 + 1, 1, session=leader.pid, members=members, **space)
    lease_once(tmp_path)
    assert leader.poll() is None
    assert len(session_processes(leader.pid)) == 2


def test_what_a_dead_server_left_on_disk_and_in_shared_memory_is_removed(tmp_path: Path) -> None:
    temporary, shared = tmp_path / "server", tmp_path / "shared"
    temporary.mkdir()
    (temporary / "socket").touch()
    shared.touch()
    facts = {"temporary": str(temporary), "shared": [str(shared)]}
    write_record(tmp_path, os.getpid(), start_time(os.getpid()), **facts)
    lease_once(tmp_path)
    assert not temporary.exists() and not shared.exists()


def test_a_torn_record_is_no_obstacle(tmp_path: Path) -> None:
    record_path(tmp_path, pretend_devices(1)[0]).write_text('{"pid": 12')
    assert lease_once(tmp_path) == ["leased gpu:0 (Pretend)"]


def test_all_users_may_lock_and_nobody_may_remove_anothers_files(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    lease_once(folder)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert (folder / "GPU-pretend-0.lock").stat().st_mode & 0o777 == 0o666


def test_the_folder_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBUILD_LEASE_DIR", str(tmp_path / "elsewhere"))
    with lease_devices(1, pretend_devices(1), log=str) as lease:
        assert lease.folder == tmp_path / "elsewhere"


def test_cleaners_of_temporary_folders_see_that_the_folder_is_in_use(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with lease_devices(1, pretend_devices(1), folder=tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_lock_on_a_file_that_was_replaced_is_no_lease(tmp_path: Path, started: Processes) -> None:
    wait_until_holding(start_holder(started, tmp_path, 1, 1, 1, 1000))
    lock = tmp_path / "GPU-pretend-0.lock"
    descriptor = os.open(lock, os.O_RDWR)
    lock.unlink()
    lease_once(tmp_path)
    assert not os.path.samestat(os.fstat(descriptor), lock.stat())
    os.close(descriptor)
