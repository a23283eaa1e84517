"""Processes as Linux knows them: who lives in a session, and ending exactly those."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Identities = dict[int, int]  # process id -> start time: together they name one process for ever


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; [] for a process that is gone or dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in "ZX" else fields


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None for one that is gone or dead."""
    fields = read_stat(pid)
    return int(fields[19]) if fields else None


def session_processes(session: int) -> Identities:
    """Return the living processes of a session."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    stats = {pid: read_stat(pid) for pid in pids}
    return {pid: int(f[19]) for pid, f in stats.items() if f and int(f[3]) == session}


def still_alive(identities: Identities) -> Identities:
    """Return those of the processes that live; a number that another process took over does not count."""
    return {pid: began for pid, began in identities.items() if start_time(pid) == began}


def kill_processes(identities: Identities, timeout_s: float = 10.0) -> Identities:
    """SIGKILL exactly these processes and wait until they are gone; return those that are not."""
    for pid in still_alive(identities):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while (left := still_alive(identities)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def mapped_files(pids: Iterable[int], beginning: str) -> list[str]:
    """Return the files that the processes have mapped into memory and whose path begins so."""
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.partition(beginning)[2] for line in lines if beginning in line}
    return sorted(beginning + rest for rest in found)


def pid_space() -> str:
    """Return what process ids are relative to: this boot of this machine, and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
