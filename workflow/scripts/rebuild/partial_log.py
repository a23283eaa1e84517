"""The append-only log of finished answers: what makes a killed job resume at the next sample.

One JSON line per row of the generated table, in order of completion. It reaches the operating system line by line, so
a killed process loses nothing that was logged; it is forced to the disk every few seconds, so a dead machine loses no
more than that.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

SYNC_EVERY_S = 2.0

Row = dict[str, Any]


class PartialLog:
    """Rows of finished samples on disk, found again by prompt; in memory only their offsets (about 100 bytes each).

    Error rows of an earlier attempt do not count as finished: what failed then is asked again.
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
        """Add one finished row; it survives the death of this process from here on."""
        line = orjson.dumps(row) + b"\n"
        self.file.write(line)
        self.offsets.setdefault(row["prompt_id"], []).append(self.end)
        self.end += len(line)

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
