"""The append-only log of finished answers: what makes a killed job resume at the next sample.

One JSON line per row of the generated table, in order of completion. It reaches the operating system line by line, so
a killed process loses nothing that was logged; it is forced to the disk every few seconds, so a dead machine loses no
more than that.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import orjson

from rebuild.errors import StepError

SYNC_EVERY_S = 2.0
LOCK_WAIT_S = 60.0  # a job that is told to stop may need half of it to end its server

Row = dict[str, Any]


class PartialLog:
    """Rows of finished samples on disk, found again by prompt; in memory only their offsets (about 100 bytes each).

    Error rows of an earlier attempt do not count as finished: what failed then is asked again. One process at a time
    has the log: a job whose driver was killed may still be on its way out when the next one starts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0  # unreadable lines of an earlier attempt
        self.retried = 0  # failures of an earlier attempt, which get another chance
        self.offsets: dict[str, list[int]] = {}
        self.synced = time.monotonic()

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+b", buffering=0)
        lock_file(self.file, self.path)
        self.end = self._read_back()
        self.file.truncate(self.end)
        return self

    def _read_back(self) -> int:
        """Index the whole lines; return where the last of them ends (a torn line after that is dropped)."""
        self.file.seek(0)
        offset = 0
        with open(self.path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    self.dropped += 1
                    return offset
                self._index(line, offset)
                offset += len(line)
        return offset

    def _index(self, line: bytes, offset: int) -> None:
        try:
            row = orjson.loads(line)
            prompt_id, status = row["prompt_id"], row["status"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            self.dropped += 1
            return
        if status == "error":
            self.retried += 1
        else:
            self.offsets.setdefault(prompt_id, []).append(offset)

    @property
    def rows(self) -> int:
        """Number of rows in the log."""
        return sum(map(len, self.offsets.values()))

    def append(self, row: Row) -> None:
        """Add one finished row; it survives the death of this process from here on.

        Raises:
            StepError: the file system did not take all of it.
        """
        line = orjson.dumps(row) + b"\n"
        self._write(line)
        self.offsets.setdefault(row["prompt_id"], []).append(self.end)
        self.end += len(line)

    def _write(self, line: bytes) -> None:
        """Write a whole line or nothing, so that the next one does not continue a part of it."""
        try:
            written, seen = self.file.write(line), "no space left"
        except OSError as error:
            written, seen = 0, str(error)
        if written != len(line):
            self.file.truncate(self.end)
            raise StepError(
                "a finished answer cannot be logged",
                where=str(self.path),
                expected=f"room for {len(line)} bytes",
                seen=seen,
                remedy="make room (df, quota); finished answers are kept, a new start goes on after them",
            )

    def sync_if_due(self) -> None:
        """Force the log to the disk when the last time was more than SYNC_EVERY_S ago."""
        if time.monotonic() - self.synced >= SYNC_EVERY_S:
            os.fsync(self.file.fileno())
            self.synced = time.monotonic()

    def rows_of(self, prompt_id: str) -> list[Row]:
        """Return the logged rows of one prompt, by turn."""
        return sorted(self._read(self.offsets.get(prompt_id, [])), key=lambda row: row["turn"])

    def _read(self, offsets: list[int]) -> Iterator[Row]:
        for offset in offsets:
            with open(self.path, "rb") as lines:
                lines.seek(offset)
                yield orjson.loads(lines.readline())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


def lock_file(file: BinaryIO, path: Path) -> None:
    """Keep other processes from this log for as long as the file is open; wait a while for one that is ending.

    Raises:
        StepError: another process keeps it.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                break
        except OSError:  # a file system without flock
            return
        time.sleep(0.2)
    raise StepError(
        "another process is at work on the answers of this shard",
        where=str(path),
        seen=f"it has kept the log for {LOCK_WAIT_S:.0f} s",
        remedy=f"see `fuser {path}`; wait for that process or stop it, then start again",
    )
