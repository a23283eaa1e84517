"""Accepted prompts on disk between the two passes, and which of them belong to which shard."""

import os
import tempfile
from array import array
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from rebuild.errors import StepError


class Spill:
    """Records in an unnamed file, appended in order and read by number; holds 8 bytes of memory for each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ends = array("Q", [0])

    def __enter__(self) -> Self:
        self.file = tempfile.TemporaryFile(dir=self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()

    def __len__(self) -> int:
        return len(self.ends) - 1

    def append(self, record: bytes) -> None:
        """Add a record; it can be read after `flush`."""
        self.file.write(record)
        self.ends.append(self.ends[-1] + len(record))

    def flush(self) -> None:
        """Make all records readable."""
        self.file.flush()

    def size(self, number: int) -> int:
        """Return the bytes of record `number`."""
        return self.ends[number + 1] - self.ends[number]

    def read(self, number: int) -> bytes:
        """Return record `number`."""
        return os.pread(self.file.fileno(), self.size(number), self.ends[number])


def assign_rows(count: int, shards: int, assign: str) -> list[range]:
    """Return the row numbers of each shard.

    `interleave` deals them out (row i to shard i mod shards); `contiguous` cuts them into runs whose
    lengths differ by one at most, so that no shard is empty.

    Raises:
        StepError: fewer rows than shards, or an assignment of another name.
    """
    if count < shards:
        raise StepError(
            "there are fewer prompts than shards",
            expected=f"at least {shards} accepted prompts, one for each shard",
            seen=f"{count} accepted prompts",
            remedy="lower `prompts.shards`, raise `prompts.limit`, or give more prompts",
        )
    if assign == "interleave":
        return [range(shard, count, shards) for shard in range(shards)]
    if assign == "contiguous":
        cuts = [shard * count // shards for shard in range(shards + 1)]
        return [range(start, end) for start, end in pairwise(cuts)]
    raise StepError(
        "unknown way of assigning prompts to shards",
        expected="interleave or contiguous",
        seen=assign,
        remedy="set `prompts.assign` in the config",
    )
