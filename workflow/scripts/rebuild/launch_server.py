"""Becomes an SGLang server that cannot outlive the process that started it.

    python -P launch_server.py STARTER_PID SGLANG_ARGUMENT...

The kernel is asked for this process's death with its parent before anything of SGLang is imported. SGLang's
processes import this file as well, so it does nothing when it is imported.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def launch_server(starter: int, arguments: list[str]) -> None:
    """Run SGLang's own entry point in this process; end at once if `starter` is not the parent any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:
        raise SystemExit("the process that started this server has ended")
    sys.argv = ["sglang", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    launch_server(int(sys.argv[1]), sys.argv[2:])
