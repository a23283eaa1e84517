"""Tells a live Snakemake driver from one that was killed, so that resuming needs no manual unlock."""

import fcntl
import os
import platform
import shutil
import time
from pathlib import Path
from typing import TextIO

from rebuild.errors import StepError

PLANNING, RUNNING = "planning", "running jobs"


class DriverLock:
    """A flock that a driver holds for as long as it lives, beside Snakemake's own lock files.

    Snakemake's lock files outlive a killed driver; a flock does not. A driver that gets the flock may remove such
    stale files; one that does not get it leaves everything alone.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "driver.lock"
        self.lock_files = folder / "locks"
        self.exclusive = False
        self.handle: TextIO | None = None

    def take_over(self, wait_s: float = 60.0) -> str:
        """Take the flock and remove the lock files that a dead driver left; return `` or, if one is alive, who it is.

        A live driver that still plans is given up to `wait_s` for it: of two that start at the same moment, the one
        without the flock must not be the first to write Snakemake's lock files.
        """
        deadline = time.monotonic() + wait_s
        while not self.acquire():
            if RUNNING in self.holder() or time.monotonic() > deadline:
                return self.holder()
            time.sleep(0.1)
        if self.exclusive:
            shutil.rmtree(self.lock_files, ignore_errors=True)
        return ""

    def acquire(self) -> bool:
        """Take the flock unless a live driver has it; say whether it is ours now.

        On a file system without flock it counts as ours: Snakemake's own lock files then have to do.
        """
        if self.handle is not None:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(self.path, "a+")  # noqa: SIM115 (held for the life of the process)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.exclusive = True
        except BlockingIOError:
            handle.close()
            return False
        except OSError:
            self.exclusive = False
        self.handle = handle
        self._sign(PLANNING)
        return True

    def require(self) -> None:
        """Stop unless the flock is ours; note that jobs run from here on.

        Raises:
            StepError: another driver is at work in this directory.
        """
        if not self.acquire():
            raise StepError(
                "another Snakemake is at work in this directory",
                where=str(self.path.resolve()),
                seen=f"{self.holder()} holds the lock",
                remedy="wait for it, or stop it first (Ctrl-C there); resuming afterwards is safe",
            )
        self._sign(RUNNING)

    def holder(self) -> str:
        """Return who wrote the lock file last."""
        return self.path.read_text().strip() or "another process"

    def _sign(self, state: str) -> None:
        if self.handle is not None:
            self.handle.truncate(0)
            self.handle.write(
                f"process {os.getpid()} on {platform.node()}, {state} since {time.ctime()}\n"
            )
            self.handle.flush()
