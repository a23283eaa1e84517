"""Becomes an SGLang server that cannot outlive the process that started it, and whose processes cannot outlive it.

    python -P launch_server.py STARTER_PID SGLANG_ARGUMENT...

The kernel is asked for this process's death with its parent before anything of SGLang is imported. SGLang's own
processes ask for theirs only after their imports, so a watcher in the server's session ends those that are left when
this process is gone. They import this file as well, so it does nothing when it is imported.
"""

import ctypes
import os
import runpy
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_S = 3.0  # SGLang's processes end about a second after the main one by themselves


def launch_server(starter: int, arguments: list[str]) -> None:
    """Run SGLang's own entry point in this process; end at once if `starter` is not the parent any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:
        raise SystemExit("the process that started this server has ended")
    start_watcher()
    sys.argv = ["sglang", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def start_watcher() -> None:
    """Fork a process that waits for this one's end and then kills what is left of its process group, itself included.

    It inherits the lease's descriptors, so the device is not free before that; and as long as it lives, the number of
    the group cannot be given to anybody else.
    """
    server = os.getpid()
    watched = os.pidfd_open(server)
    if os.fork():
        os.close(watched)
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the server, whose end is awaited
    ended = select.poll()
    ended.register(watched, select.POLLIN)
    ended.poll()
    time.sleep(GRACE_S)
    os.killpg(server, signal.SIGKILL)


if __name__ == "__main__":
    launch_server(int(sys.argv[1]), sys.argv[2:])
