"""Leases on devices: a device belongs to one job of this node at a time, whatever the scheduler counted.

A lease is a flock on a node-local file named after the device's UUID. The kernel frees it when the last
process that holds the descriptor ends, so it needs no clean-up after any death; the descriptor goes to the
server as well, so that a device is not free while its server lives. Beside the lock, a record in the holder's
own name says who holds the device and which processes the server started: the next holder ends what is left
of them before it goes on.
"""

import fcntl
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.serving.devices import Device
from rebuild.serving.processes import (
    Identities,
    kill_processes,
    pid_space,
    session_processes,
    start_time,
    still_alive,
)
from rebuild.step import say

ASK_AGAIN_S = 0.5
SAY_AGAIN_S = 60.0
Log = Callable[[str], None]


@dataclass
class Lease:
    """Devices that are this process's own until the `lease_devices` block ends."""

    devices: list[Device]
    descriptors: list[int]  # for the server's `pass_fds`: the lease lasts while one of them is open
    folder: Path
    record: dict[str, Any] = field(default_factory=dict)

    def write_record(self, **facts: Any) -> None:
        """Note facts (the server's processes, its temporary folder) for whoever leases the devices next."""
        self.record |= facts
        for device in self.devices:
            write_json(record_path(self.folder, device), self.record)

    def remove_record(self) -> None:
        """Forget the record, unless processes that it names are still there."""
        if leftovers(self.record):
            return
        for device in self.devices:
            record_path(self.folder, device).unlink(missing_ok=True)


@contextmanager
def lease_devices(
    count: int, devices: list[Device], *, folder: Path | None = None, log: Log = say
) -> Iterator[Lease]:
    """Lease `count` of the devices, waiting as long as it takes; all of them at once or none.

    Before the block begins, processes that an earlier lease on these devices left behind are ended.

    Raises:
        StepError: there are fewer devices than asked for, or a leftover process cannot be ended.
    """
    check_count(count, devices)
    folder = open_folder(folder)
    with ExitStack() as held:
        # systemd-tmpfiles leaves a folder alone while somebody holds a lock on it
        hold_lock(held, folder, fcntl.LOCK_SH)
        locks = wait_for_locks(count, devices, folder, log)
        for descriptor in locks.values():
            held.callback(os.close, descriptor)
        taken = [device for device in devices if device.uuid in locks]
        lease = Lease(taken, list(locks.values()), folder)
        for device in taken:
            end_leftovers(record_path(folder, device), log)
        lease.write_record(**describe_holder())
        log(f"leased {', '.join(f'{device.id} ({device.name})' for device in taken)}")
        held.callback(lease.remove_record)
        yield lease


def check_granted(wanted: int, granted: int) -> None:
    """Raise a StepError when Snakemake granted fewer devices than the rule asked for (it does so silently)."""
    if granted < wanted:
        raise StepError(
            "the server needs more devices than Snakemake's limit allows",
            expected=f"gpu={wanted}, from `server.tensor_parallel`",
            seen=f"gpu={granted}, as `--resources` or the number of devices scaled it down",
            remedy=f"run with --resources gpu={wanted} or more, or lower `server.tensor_parallel`",
        )


def check_count(count: int, devices: list[Device]) -> None:
    """Raise a StepError when `count` devices can never be leased here."""
    if not 1 <= count <= len(devices):
        raise StepError(
            f"{count} devices are wanted and {len(devices)} can be leased on this node",
            expected="at least one, and no more than the node has",
            seen=", ".join(f"{device.id} ({device.name})" for device in devices) or "no device",
            remedy="check `server.tensor_parallel`, `devices` and CUDA_VISIBLE_DEVICES",
        )


def open_folder(folder: Path | None) -> Path:
    """Return the folder of the locks, which all users of the node share; make it when it is not there.

    It must be the same for all jobs, so it does not follow TMPDIR, which Snakemake and Slurm set per job.
    """
    folder = folder or Path(os.environ.get("REBUILD_LEASE_DIR", "/tmp/dflash-rebuild-leases"))
    with suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    return folder


def hold_lock(held: ExitStack, folder: Path, kind: int) -> None:
    """Hold a lock on the folder itself for as long as the stack lasts."""
    descriptor = os.open(folder, os.O_RDONLY)
    held.callback(os.close, descriptor)
    fcntl.flock(descriptor, kind)


def lock_path(folder: Path, device: Device) -> Path:
    """Return the file whose flock is the lease on the device."""
    return folder / f"{device.uuid}.lock"


def record_path(folder: Path, device: Device) -> Path:
    """Return the file in which this user's lease on the device is described.

    One per user: nobody is made to end processes that somebody else wrote down.
    """
    return folder / f"{device.uuid}.{os.getuid()}.json"


def wait_for_locks(count: int, devices: list[Device], folder: Path, log: Log) -> dict[str, int]:
    """Return the descriptors of `count` locked devices by UUID, asking again until so many are free."""
    began = time.monotonic()
    spoke = -SAY_AGAIN_S
    while True:
        locks = try_locks(count, devices, folder)
        if locks:
            return locks
        waited = time.monotonic() - began
        if waited - spoke >= SAY_AGAIN_S:
            spoke = waited
            log(f"waiting for {count} of {len(devices)} devices; {list_holders(devices, folder)}")
        for device in devices:
            end_orphans(record_path(folder, device), log)
        time.sleep(ASK_AGAIN_S * random.uniform(0.5, 1.5))


def try_locks(count: int, devices: list[Device], folder: Path) -> dict[str, int]:
    """Lock `count` of the devices and return the descriptors by UUID; {} with nothing held if too few are free."""
    locks: dict[str, int] = {}
    for device in devices:
        descriptor = try_lock(lock_path(folder, device))
        if descriptor is not None:
            locks[device.uuid] = descriptor
        if len(locks) == count:
            return locks
    for descriptor in locks.values():
        os.close(descriptor)
    return {}


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the file's lock, or None while another process holds it."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # held by another, or replaced after it was opened: the lock would be on nothing
    os.close(descriptor)
    return None


def open_lock(path: Path) -> int:
    """Open the lock file, which any user may lock; make it if need be.

    Opened without O_CREAT first: Linux refuses O_CREAT on other users' files in shared folders
    (fs.protected_regular).
    """
    existing = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, existing)
    except FileNotFoundError:
        pass
    except PermissionError as error:
        raise StepError(
            f"cannot lock devices: {path} may not be opened",
            expected="a folder that all users of the node may write to",
            remedy="point REBUILD_LEASE_DIR at such a folder, the same for everybody on the node",
        ) from error
    try:
        descriptor = os.open(path, existing | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, existing)
    os.fchmod(descriptor, 0o666)
    return descriptor


def describe_holder() -> dict[str, Any]:
    """Return who this process is, for the record."""
    return {
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "folder": str(Path.cwd()),
        "pid_space": pid_space(),
    }


def list_holders(devices: list[Device], folder: Path) -> str:
    """Return who holds the devices, as far as their records tell."""
    holders = []
    for device in devices:
        for path in folder.glob(f"{device.uuid}.*.json"):
            record = read_record(path)
            if record:
                holders.append(
                    f"{device.id} is held by process {record['pid']} since {record['since']} "
                    f"({record['folder']})"
                )
    return "; ".join(holders) or "their holders left no record"


def read_record(path: Path) -> dict[str, Any]:
    """Return the record; {} when there is none or it cannot be read."""
    try:
        record = read_json(path)
    except (FileNotFoundError, PermissionError, json.JSONDecodeError):
        return {}
    return record if isinstance(record, dict) else {}


def own_record(path: Path) -> dict[str, Any]:
    """Return the record if this user wrote it here and since the last boot; {} otherwise."""
    with suppress(FileNotFoundError):
        if path.stat().st_uid == os.getuid():
            record = read_record(path)
            return record if record.get("pid_space") == pid_space() else {}
    return {}


def end_orphans(path: Path, log: Log) -> None:
    """End a server that still holds its lease although the job that started it is gone."""
    record = own_record(path)
    if record and start_time(record["pid"]) != record["started"]:
        end_processes(record, log)


def end_leftovers(path: Path, log: Log) -> None:
    """End what an earlier holder of the device left behind: processes and temporary folder."""
    record = own_record(path)
    end_processes(record, log)
    remove_traces(record)
    path.unlink(missing_ok=True)


def remove_traces(record: Mapping[str, Any]) -> None:
    """Remove the temporary folder and the shared-memory files of a server that has ended."""
    if "temporary" in record:
        shutil.rmtree(record["temporary"], ignore_errors=True)
    for path in record.get("shared", []):
        Path(path).unlink(missing_ok=True)


def end_processes(record: dict[str, Any], log: Log) -> None:
    """Kill the processes of the record that are still alive, and all others of their session.

    Raises:
        StepError: some of them cannot be ended.
    """
    left = leftovers(record)
    if not left:
        return
    log(f"ending processes that process {record['pid']} left behind: {sorted(left)}")
    stubborn = kill_processes(left)
    if stubborn:
        raise StepError(
            "processes of an earlier server still use the device and do not end",
            seen=f"process ids {sorted(stubborn)} after SIGKILL",
            remedy="look at them with ps; in state D the driver or the disk hangs, and only a reboot helps",
        )


def leftovers(record: dict[str, Any]) -> Identities:
    """Return the living processes that the record accounts for.

    The session counts only if one of the recorded processes is still in it: while one lives, the
    session's number cannot have been given to anybody else.
    """
    known = still_alive({int(pid): began for pid, began in record.get("members", {}).items()})
    session = session_processes(record["session"]) if known else {}
    return known | (session if known.keys() & session.keys() else {})
