"""How every script of the workflow begins: its log, its signals, and its death with its parent."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from io import TextIOWrapper
from pathlib import Path
from types import FrameType, TracebackType

from rebuild.errors import StepError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
terminal: int | None = None  # where this process wrote before its output went to the log
DRIVER_PID = "REBUILD_DRIVER_PID"  # environment variable that the Snakefile sets for its jobs


def begin_step(log: str) -> None:
    """Send all output of this process and its children to `log`, and end with the parent process.

    SIGTERM and SIGINT become `SystemExit`, so that `finally` blocks run on every way out. An uncaught
    exception leaves its traceback in the log, a `StepError` last of all in its own words.
    """
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    global terminal
    terminal = os.dup(2)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    sys.excepthook = report_exception
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    die_with_parent(signal.SIGTERM)
    die_with_driver(signal.SIGTERM)


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when its parent ends (Linux only)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def die_with_driver(number: int) -> None:
    """Send signal `number` to this process when the Snakemake that started it ends (Linux only).

    This covers what the kernel's parent-death signal does not: an older bash that stays between the two, and a driver
    that died while this script was still importing.
    """
    driver = os.environ.get(DRIVER_PID)
    if driver is None or sys.platform != "linux":
        return
    try:
        watched = os.pidfd_open(int(driver))
    except ProcessLookupError:
        os.kill(os.getpid(), number)
    except OSError:  # a kernel before 5.3
        return
    else:
        threading.Thread(target=_signal_after, args=(watched, number), daemon=True).start()


def _signal_after(watched: int, number: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), number)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Turn a termination signal into `SystemExit(128 + number)`; a second one is ignored while that unwinds."""
    for other in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    say(
        f"stopping on {signal.Signals(number).name}: what is finished is kept, a new start goes on after it"
    )
    raise SystemExit(128 + number)


def report_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write the traceback; a `StepError` has the last lines of the log, in its own words alone."""
    lines = traceback.format_exception(kind, error, trace)
    if isinstance(error, StepError):
        lines[-1] = f"\nSTOPPED: {error.describe()}\n"
    sys.stderr.writelines(lines)
    sys.stderr.flush()


def show(text: str) -> None:
    """Write text where the driver writes, and to the log."""
    print(text, flush=True)
    if terminal is not None:
        os.write(terminal, f"{text}\n".encode())


def say(message: str) -> None:
    """Write one time-stamped line to the log."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)
