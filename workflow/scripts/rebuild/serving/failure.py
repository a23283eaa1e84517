"""Why a server ended, in words: its exit status, and what the end of its log most probably means."""

import re
import signal
from pathlib import Path

TAIL_BYTES = 6000
TAIL_LINES = 40
CAUSES = {
    r"address already in use|port.*in use": "its port was taken by another process; a new start gets a new one",
    r"error: (unrecognized arguments|argument|the following arguments)": "it does not take "
    "its command line: correct `server.flags`",
    r"increase --mem-fraction-static": "the share of the device's memory that it may use is too small for "
    "weights and cache: raise mem-fraction-static in `server.flags`, or `server.tensor_parallel`",
    r"out of memory|cannot allocate memory": "the device's memory does not suffice: lower mem-fraction-static or "
    "max-running-requests in `server.flags`, or raise `server.tensor_parallel`",
    r"not a local folder|does not appear to have a file|No such file|Repo id must be": "it does not find a "
    "file of the model: check `model.source`",
}


def read_tail(log: Path) -> str:
    """Return the last lines of the server's log."""
    with open(log, "rb") as handle:
        handle.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return "\n".join(handle.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:])


def explain_status(status: int) -> str:
    """Return an exit status in words."""
    if status == -signal.SIGKILL:
        return "killed by SIGKILL (the kernel does that when memory runs out: see dmesg)"
    if status < 0:
        return f"by signal {signal.Signals(-status).name}"
    return f"with status {status}"


def probable_cause(tail: str) -> str:
    """Return what the log's end most probably means, for the reader of the error."""
    for pattern, meaning in CAUSES.items():
        if re.search(pattern, tail, re.IGNORECASE):
            return meaning
    return "read the server's log; the first error in it counts"
